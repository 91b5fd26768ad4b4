"""What happens to rewards and truncated completions before advantages are computed; the same on every rank."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rayrl.algorithms.length_penalty import (
    cosine_length_reward,
    group_length_penalty,
    linear_length_penalty,
    target_length_penalty,
)
from rayrl.algorithms.reward_scaling import combine_rewards, normalise_rewards
from rayrl.algorithms.token_rewards import overlong_penalty
from rayrl.config.shaping import ShapingConfig
from rayrl.training.batch import FloatArray, TrainBatch


def reward_parts(batches: Sequence[pa.RecordBatch], names: Sequence[str]) -> dict[str, FloatArray]:
    """Return [N] of each named part of the reward, for the trajectories that `batch_from_arrow` keeps, in its order.

    ValueError if a trajectory lacks one: a missing part is no 0.
    """
    if not names:
        return {}
    values: dict[str, list[float]] = {name: [] for name in names}
    for batch in batches:
        for text, failure in zip(batch["reward_parts"].to_pylist(), batch["failure"].to_pylist(), strict=True):
            if failure is not None:
                continue
            parts = json.loads(text)
            missing = sorted(set(names) - set(parts))
            if missing:
                raise ValueError(
                    f"algorithm.shaping.reward_weights names {', '.join(missing)}, which the reward of a trajectory "
                    f"does not have; its parts are {', '.join(sorted(parts)) or 'none'}"
                )
            for name in names:
                values[name].append(parts[name])
    return {name: np.asarray(column, dtype=np.float32) for name, column in values.items()}


def shape_rewards(
    batch: TrainBatch, shaping: ShapingConfig, max_new_tokens: int, parts: Mapping[str, FloatArray] | None = None
) -> TrainBatch:
    """Return the batch with its rewards shaped.

        r1 = weighted sum of the parts, if there are weights
        r2 = by correctness and length, if `cosine_reward` is given
        r' = clip(scale * normalise(r2 + overlong(l) + length penalty(l)))

    with l the loss-carrying tokens of the trajectory before any token is masked for its age. What is correct, for
    `cosine_reward` and the penalty by group, is decided on r1.

    Args:
        parts: from `reward_parts`, where `reward_weights` are given.
    """
    if shaping == ShapingConfig() or batch.num_trajectories == 0:
        return batch
    groups = torch.from_numpy(batch.group_ids)
    lengths = torch.from_numpy(batch.loss_counts)
    rewards = torch.from_numpy(batch.rewards.astype(np.float32))
    if shaping.reward_weights:
        columns = {name: torch.from_numpy(column) for name, column in (parts or {}).items()}
        rewards = combine_rewards(columns, shaping.reward_weights, groups, shaping.reward_parts_scale)
    answers = rewards
    if shaping.cosine_reward is not None:
        ends = shaping.cosine_reward
        rewards = cosine_length_reward(
            rewards, lengths, max_new_tokens, shaping.success_threshold, ends.correct, ends.wrong
        )
    if shaping.overlong_buffer > 0:
        rewards = rewards + overlong_penalty(lengths, max_new_tokens, shaping.overlong_buffer, shaping.overlong_penalty)
    if shaping.length_penalty > 0:
        rewards = rewards + _length_penalty(answers, lengths, groups, shaping, max_new_tokens)
    rewards = shaping.reward_scale * normalise_rewards(rewards, groups, shaping.reward_normalise)
    if shaping.reward_clip is not None:
        rewards = rewards.clamp(*shaping.reward_clip)
    return replace(batch, rewards=rewards.numpy().astype(np.float32))


def _length_penalty(
    answers: Tensor, lengths: Tensor, groups: Tensor, shaping: ShapingConfig, max_new_tokens: int
) -> Tensor:
    if shaping.length_penalty_form == "group":
        return group_length_penalty(answers, lengths, groups, shaping.success_threshold, shaping.length_penalty)
    if shaping.length_penalty_form == "target":
        return target_length_penalty(lengths, shaping.length_target, max_new_tokens, shaping.length_penalty)
    return linear_length_penalty(lengths, max_new_tokens, shaping.length_penalty)


def mask_truncated(batch: TrainBatch) -> tuple[TrainBatch, int]:
    """Take completions that ended by length out of the loss; return how many there were.

    Their rewards stay: they are part of the baseline of their group.
    """
    if batch.truncated is None or not batch.truncated.any():
        return batch, 0
    keep = np.repeat(~batch.truncated, np.diff(batch.offsets))
    return replace(batch, loss_mask=(batch.loss_mask * keep).astype(np.uint8)), int(batch.truncated.sum())
