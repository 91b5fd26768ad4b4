"""The trainer's side of a probe: checksums of its weights, and scores of what an engine sampled."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rayrl.infra.weight_manifest import checksum_of
from rayrl.training.batch import TrainBatch
from rayrl.training.engine import TrainEngine

if TYPE_CHECKING:
    from torch import Tensor


def checksums(tensors: Iterable[tuple[str, "Tensor"]]) -> dict[str, str]:
    """Return the checksum of each weight, drawn one by one."""
    return {name: checksum_of(tensor) for name, tensor in tensors}


def score(engine: TrainEngine, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the logprobs of each completion of `prompt` under the weights now. Collective, as the engine is."""
    rows = [np.asarray([*prompt, *completion], np.int32) for completion in completions]
    masks = [np.asarray([0] * len(prompt) + [1] * len(completion), np.uint8) for completion in completions]
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    total = int(offsets[-1])
    batch = TrainBatch(
        tokens=np.concatenate(rows),
        loss_mask=np.concatenate(masks),
        logprobs=np.zeros(total, np.float32),
        versions=np.full(total, -1, np.int32),
        offsets=offsets,
        rewards=np.zeros(len(rows), np.float32),
        # Prompts are not shared: each completion is scored as if it were alone.
        group_ids=np.arange(len(rows), dtype=np.int64),
    )
    logprobs = engine.forward_logprobs(batch)
    return [logprobs[start + len(prompt) : end].tolist() for start, end in pairwise(offsets)]
