"""The digest of what a training step consumed: it ties the ledger to the rollout log."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

_LISTS = ("tokens", "loss_mask", "logprobs", "versions")


def group_digest(batches: Iterable[pa.RecordBatch | pa.Table]) -> str:
    """Return sha256 over all trajectories: ids, tokens, masks, logprobs, versions and rewards, in order.

    It is the same however the rows are cut into batches, in memory and read back from Parquet.
    """
    hashes: dict[str, Any] = {}
    for batch in batches:
        chunks = batch.to_batches() if isinstance(batch, pa.Table) else [batch]
        for chunk in chunks:
            for name, data in _columns(chunk):
                hashes.setdefault(name, hashlib.sha256()).update(data)
    whole = hashlib.sha256()
    for name in sorted(hashes):
        whole.update(name.encode() + hashes[name].digest())
    return whole.hexdigest()


def _columns(batch: pa.RecordBatch) -> Iterable[tuple[str, Any]]:
    yield "prompt_id", "".join(f"{name}\n" for name in batch["prompt_id"].to_pylist()).encode()
    yield "sample_index", _bytes(batch["sample_index"])
    # A missing reward is NaN here; a reward that is NaN never gets into a batch.
    yield "reward", _bytes(batch["reward"])
    for name in _LISTS:
        column = batch[name]
        yield f"{name}/length", np.diff(column.offsets.to_numpy()).astype(np.int64)
        yield name, _bytes(column.flatten())


def _bytes(column: pa.Array) -> Any:
    return np.ascontiguousarray(column.to_numpy(zero_copy_only=False))
