"""What a run returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The end of a run that did not fail; a failed one raises."""

    status: Literal["done", "stopped"]
    """`stopped`: asked to leave by a signal or by `RunHandle.stop`; `--resume auto` goes on."""
    steps: int
    """Training steps finished, those before a resume included."""
    metrics: Mapping[str, float]
    """Last value of each metric. `eval/accuracy_before` and `reward/first` are the first ones of the run; those before
    a resume as far as its JSON lines tell."""
    run_dir: Path
    """Absolute folder of the run."""
