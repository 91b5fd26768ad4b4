"""What the recorded collectives of a run say: per process its last call, and the first divergence."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayrl.errors import CheckpointError
from rayrl.infra.collective_record import CollectiveRecord, Divergence, first_divergence
from rayrl.infra.collective_ring import read_ring

FOLDER = "collectives"
"""Below the logs of a run; one `.ring` file for each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveReport:
    """The recorded collectives of a run."""

    last: Mapping[str, CollectiveRecord]
    """The last call of each process that made one."""
    divergence: Divergence | None


def report_collectives(logs: Path) -> CollectiveReport | None:
    """Return what the files below a run's `logs` say; None if nothing was recorded."""
    records: dict[str, list[CollectiveRecord]] = {}
    for path in sorted((logs / FOLDER).glob("*.ring")):
        try:
            records[path.stem] = read_ring(path)
        except (OSError, CheckpointError):
            records[path.stem] = []
    if not any(records.values()):
        return None
    last = {name: calls[-1] for name, calls in records.items() if calls}
    return CollectiveReport(last=last, divergence=first_divergence(records))
