"""The quickstart: a tiny model from nothing, a few seconds of SFT, then asynchronous GRPO. Run by `make quickstart`.

Everything of one call lies below `runs/quickstart/<time>`: the model, the SFT run, the GRPO run. The numbers of the
recipe are in the two config files.
"""

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayrl import RunResult

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ALPHABET = "0123456789+="


def main() -> None:
    """Run the three parts; the last line printed is the result."""
    started = time.monotonic()
    # Imported here so that the seconds reported include the loading of torch and Ray.
    from rayrl.utils.logger import get_logger, setup_logging

    setup_logging()
    get_logger("quickstart").info("loading torch and Ray")
    from rayrl import Run, RunConfig, SFTRun, SFTRunConfig
    from rayrl.models.tiny import create_tiny_model

    root = Path("runs/quickstart") / datetime.now().strftime("%Y%m%d-%H%M%S")
    model = root / "model"
    create_tiny_model(model, alphabet=ALPHABET)

    sft = SFTRun(SFTRunConfig.load(CONFIGS / "quickstart_sft.yaml", _overrides(root, "sft", model))).train()
    _leave_if_stopped(sft)
    exported = sft.run_dir / "export"
    grpo = Run(RunConfig.load(CONFIGS / "quickstart_grpo.yaml", _overrides(root, "grpo", exported))).train()
    _leave_if_stopped(grpo)

    before, after = grpo.metrics["eval/accuracy_before"], grpo.metrics["eval/accuracy"]
    seconds = time.monotonic() - started
    print(
        f"quickstart: accuracy before={before:.2f} after={after:.2f} seconds={seconds:.0f} run={grpo.run_dir}",
        flush=True,
    )


def _overrides(root: Path, name: str, model: Path) -> list[str]:
    return [f"run.output_root={root}", f"run.name={name}", f"model.path={model}"]


def _leave_if_stopped(result: "RunResult") -> None:
    if result.status == "stopped":
        print(f"quickstart: stopped after {result.steps} steps, run={result.run_dir}", flush=True)
        raise SystemExit(3)


if __name__ == "__main__":
    main()
