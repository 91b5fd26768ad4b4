"""What a run leaves beside its ledger: a ledger that is missing was removed if any of it is there."""

from pathlib import Path

from rayrl.audit.identity import LEDGER
from rayrl.tracking.jsonl_sink import read_rows


def has_ledger(run_dir: Path) -> bool:
    """Return whether there is a ledger; one without a byte was never written."""
    path = run_dir / LEDGER
    return path.is_file() and path.stat().st_size > 0


def traces_of_steps(run_dir: Path) -> list[str]:
    """Return the files that only a run with a ledger leaves, relative to its folder; of each kind one."""
    patterns = ("checkpoints/step_*", "rollouts/step_*", "export/*", "audit.json", f"{LEDGER}-wal")
    firsts = (next(iter(sorted(run_dir.glob(pattern))), None) for pattern in patterns)
    found = [path.relative_to(run_dir).as_posix() for path in firsts if path is not None]
    if _has_metrics(run_dir / "metrics.jsonl"):
        found.append("metrics.jsonl")
    return found


def _has_metrics(path: Path) -> bool:
    """Messages alone are there before the first step."""
    if not path.is_file():
        return False
    try:
        return any("step" in row for row in read_rows(path))
    except ValueError:
        return True
