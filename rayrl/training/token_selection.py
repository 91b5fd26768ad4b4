"""Tokens that an objective treats apart, chosen over a whole optimizer step, so that micro-batches do not matter."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rayrl.training.batch import FloatArray, TrainBatch
from rayrl.training.engine import TrainEngine
from rayrl.training.losses import LossView, PolicyLoss
from rayrl.training.token_columns import columns_mask, to_columns


def choose_tokens(engine: TrainEngine, batch: TrainBatch, loss_fn: PolicyLoss, seed: int) -> TrainBatch:
    """Return the batch of one optimizer step with `held_back` filled, for objectives that choose tokens.

    One more forward pass with the weights as they are now, those that the step will start from; a collective call.
    The choice is the same on every rank: all hold the whole batch, and `seed` with the count of optimizer steps decides
    what is random in it.
    """
    if not loss_fn.chooses_tokens:
        return batch
    logprobs = engine.forward_logprobs(batch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + engine.status().optimizer_steps)
    chosen = loss_fn.choose_tokens(_whole_view(batch, logprobs), generator)
    assert chosen is not None, "the objective chooses tokens"
    held_back = np.zeros(len(batch.tokens), dtype=np.uint8)
    held_back[batch.loss_mask != 0] = chosen[columns_mask(batch)].numpy()
    return replace(batch, held_back=held_back)


def _whole_view(batch: TrainBatch, logprobs: FloatArray) -> LossView:
    """Return all trajectories of the batch as one view without gradient."""

    def columns(flat: FloatArray | None) -> Tensor | None:
        return None if flat is None else to_columns(batch, flat)

    return LossView(
        logprobs=to_columns(batch, logprobs),
        entropy=None,
        sampler_logprobs=to_columns(batch, batch.logprobs),
        proximal_logprobs=columns(batch.proximal_logprobs),
        ref_logprobs=None,
        advantages=columns(batch.advantages),
        loss_mask=columns_mask(batch),
        token_versions=to_columns(batch, batch.versions.astype(np.float32)).long(),
    )
