"""Consumed trajectories on disk: one Parquet file per step, in the schema of the wire.

Called in a worker process: the driver never holds tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrl.types.arrow import TRAJECTORY_SCHEMA
from rayrl.utils.atomic_file import atomic_writer


def rollout_path(folder: str | Path, step: int) -> Path:
    """Return the file of a step, for example `rollouts/step_000012.parquet`."""
    return Path(folder) / f"step_{step:06d}.parquet"


def write_rollouts(path: str | Path, batches: Sequence[pa.RecordBatch | pa.Table]) -> Path:
    """Write all trajectories of one step, one row each, in the order given, and return the file.

    The file is complete or absent; one of an earlier try of the same step (before a resume) is replaced. The folder
    is made if it is missing. Raises OSError as the file system gives it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(target) as file:
        with pq.ParquetWriter(file, TRAJECTORY_SCHEMA, compression="zstd") as writer:
            for batch in batches:
                writer.write(batch)
    return target


def read_rollouts(path: str | Path) -> pa.Table:
    """Return the trajectories of one step."""
    return pq.read_table(path, schema=TRAJECTORY_SCHEMA)
