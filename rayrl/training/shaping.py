"""What happens to rewards and truncated completions before advantages are computed; the same on every rank."""

from dataclasses import replace

import numpy as np
import torch

from rayrl.algorithms.token_rewards import overlong_penalty
from rayrl.config.algorithm import ShapingConfig
from rayrl.training.batch import FloatArray, TrainBatch


def shape_rewards(batch: TrainBatch, shaping: ShapingConfig, max_new_tokens: int) -> TrainBatch:
    """Return the batch with its rewards shaped.

        r' = clip(scale * (r - overlong(l) - length_penalty * l / max_new_tokens))

    with l the loss-carrying tokens of the trajectory before any token is masked for its age.
    """
    rewards: FloatArray = batch.rewards
    lengths = batch.loss_counts
    if shaping.overlong_buffer > 0:
        added = overlong_penalty(
            torch.from_numpy(lengths), max_new_tokens, shaping.overlong_buffer, shaping.overlong_penalty
        )
        rewards = rewards + added.numpy()
    if shaping.length_penalty > 0:
        rewards = rewards - (shaping.length_penalty * lengths / max_new_tokens).astype(np.float32)
    if shaping.reward_scale != 1:
        rewards = rewards * shaping.reward_scale
    if shaping.reward_clip is not None:
        rewards = np.clip(rewards, *shaping.reward_clip)
    return batch if rewards is batch.rewards else replace(batch, rewards=rewards.astype(np.float32))


def mask_truncated(batch: TrainBatch) -> tuple[TrainBatch, int]:
    """Take completions that ended by length out of the loss; return how many there were.

    Their rewards stay: they are part of the baseline of their group.
    """
    if batch.truncated is None or not batch.truncated.any():
        return batch, 0
    keep = np.repeat(~batch.truncated, np.diff(batch.offsets))
    return replace(batch, loss_mask=(batch.loss_mask * keep).astype(np.uint8)), int(batch.truncated.sum())
