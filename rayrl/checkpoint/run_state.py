"""What the driver needs to go on: counters, the data cursor, and the groups that were finished but not yet trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrl.errors import CheckpointError
from rayrl.types.arrow import TRAJECTORY_SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The driver's state after a step.

    Example: `RunState(step=10, version=10, dataset_state={"epoch": 0, "frontier": 160}, buffered=3,
    ledger_position=10, consumed=160, config_digest="9f…", run_id="4a…")`.
    """

    step: int
    """Training steps done; the next one is `step + 1`."""
    version: int
    """Weight version of the saved weights."""
    dataset_state: Mapping[str, Any]
    """Cursor of the dataset; JSON-able."""
    buffered: int
    """Finished groups that were waiting to be trained; they are in the groups file."""
    ledger_position: int
    """`Ledger.position` when this was saved: a ledger behind it is not the one of this run."""
    consumed: int
    """Groups trained on since the start of the run."""
    config_digest: str
    run_id: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further state of parts that have some, such as adaptive coefficients; JSON-able."""

    def to_json(self) -> str:
        """Return the state as JSON text; TypeError if it holds something else than JSON can."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "RunState":
        """Return the state that `to_json` wrote. CheckpointError says what is missing or unknown."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"the run state is not JSON: {error}") from error
        names = {item.name for item in fields(cls)}
        given = set(data) if isinstance(data, dict) else set()
        if given != names:
            raise CheckpointError(
                f"the run state lacks {sorted(names - given)} and has unknown {sorted(given - names)}; "
                "it was written by another version of rayrl"
            )
        return cls(**data)


def write_groups(path: str | Path, batches: Sequence[pa.RecordBatch]) -> None:
    """Write buffered groups as one Arrow file, one record batch per group, in order. Raises OSError."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, TRAJECTORY_SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_groups(path: str | Path) -> list[pa.RecordBatch]:
    """Return the groups that `write_groups` wrote. CheckpointError if the file is missing or damaged."""
    try:
        with pa.OSFile(str(path), "rb") as file:
            reader = pa.ipc.open_file(file)
            if not reader.schema.equals(TRAJECTORY_SCHEMA):
                raise CheckpointError(f"buffered groups {path} have another schema than this version of rayrl")
            return [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except (OSError, pa.ArrowInvalid) as error:
        raise CheckpointError(f"cannot read buffered groups {path}: {error}") from error
