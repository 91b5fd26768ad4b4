"""Small runs for audit tests."""

from pathlib import Path
from typing import Any

from small_runs import small_run

from rayrl import RunConfig


def small_config(model: Path, root: Path, num_steps: int, driver: dict[str, Any], **sections: Any) -> RunConfig:
    """Return an asynchronous run of a tiny model over an epoch of nine prompts."""
    rows = root / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(3) for b in range(3)))
    return small_run(
        model,
        root,
        **{
            "dataset": {"type": "jsonl", "path": str(rows)},
            "rollout__group_size": 2,
            "driver": {"groups_per_step": 3, "num_steps": num_steps, "max_staleness": 1, **driver},
            "inference__num_engines": 2,
            "checkpoint": {"every": 2, "export_hf": False},
            **sections,
        },
    )
