"""Small runs for audit tests."""

from pathlib import Path
from typing import Any

from rayrl import RunConfig
from rayrl.config.loader import parse_section


def small_config(model: Path, root: Path, num_steps: int, driver: dict[str, Any], **sections: Any) -> RunConfig:
    """Return an asynchronous run of a tiny model over an epoch of nine prompts."""
    rows = root / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(3) for b in range(3)))
    data: dict[str, Any] = {
        "run": {"name": "small", "output_root": str(root)},
        "model": {"path": str(model), "max_context": 24},
        "dataset": {"type": "jsonl", "path": str(rows)},
        "reward": {"type": "exact_match"},
        "rollout": {
            "workflow": {"type": "single_turn", "prompt_format": "text"},
            "group_size": 2,
            "sampling": {"max_new_tokens": 4},
        },
        "driver": {"groups_per_step": 3, "num_steps": num_steps, "max_staleness": 1, **driver},
        "training": {"optimizer": {"lr": 1e-3}},
        "inference": {"engine": {"type": "transformers", "max_batch_size": 16}, "num_engines": 2},
        "tracking": {"sinks": ["jsonl"]},
        "checkpoint": {"every": 2, "export_hf": False},
        **sections,
    }
    return parse_section(RunConfig, data)
