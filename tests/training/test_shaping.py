"""Shaping of rewards, truncated completions, and every preset's advantages."""

from dataclasses import replace

import numpy as np
import pytest
from samples import trajectory

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.presets import PRESETS
from rayrl.config.shaping import CosineRewardConfig, ShapingConfig
from rayrl.training.batch import TrainBatch, batch_from_arrow
from rayrl.training.losses import batch_advantages, objective_settings
from rayrl.training.shaping import mask_truncated, shape_rewards
from rayrl.types.arrow import trajectories_to_batch


def batch() -> TrainBatch:
    """Two groups of two: rewards 1, 0 and 1, 1; lengths 4, 2, 3, 1; the first one ended by length."""
    items = [
        replace(trajectory(0, [5, 6], [7, 8, 9, 7], reward=1.0), stop_reason="length"),
        trajectory(0, [5, 6], [7, 1], reward=0.0, sample_index=1),
        trajectory(1, [5, 8], [7, 8, 1], reward=1.0),
        trajectory(1, [5, 8], [1], reward=1.0, sample_index=1),
    ]
    return batch_from_arrow([trajectories_to_batch(items)])[0]


def first_of_each(made: TrainBatch, flat: np.ndarray) -> np.ndarray:
    """Return the value at the first loss-carrying token of each trajectory."""
    bounds = zip(made.offsets[:-1], made.offsets[1:], strict=True)
    return np.asarray([flat[start:end][made.loss_mask[start:end] != 0][0] for start, end in bounds])


def test_rewards_are_left_alone_when_nothing_is_configured() -> None:
    made = batch()
    assert shape_rewards(made, ShapingConfig(), 4) is made


def test_overlong_completions_lose_up_to_the_penalty() -> None:
    shaped = shape_rewards(batch(), ShapingConfig(overlong_buffer=2, overlong_penalty=0.5), 4)
    np.testing.assert_allclose(shaped.rewards, [0.5, 0.0, 0.75, 1.0], rtol=1e-6, atol=0)


def test_length_penalty_scale_and_clip_apply_in_this_order() -> None:
    shaped = shape_rewards(batch(), ShapingConfig(length_penalty=0.4, reward_scale=2.0, reward_clip=(-0.3, 1.5)), 4)
    np.testing.assert_allclose(shaped.rewards, [1.2, -0.3, 1.4, 1.5], rtol=1e-6, atol=0)


def test_length_penalty_by_group_or_by_target_when_it_is_asked_for() -> None:
    by_group = shape_rewards(batch(), ShapingConfig(length_penalty=1.0, length_penalty_form="group"), 4)
    by_target = shape_rewards(
        batch(), ShapingConfig(length_penalty=1.0, length_penalty_form="target", length_target=3), 4
    )

    np.testing.assert_allclose(by_group.rewards, [0.5, 0.0, 0.5, 1.5], rtol=1e-6, atol=0)
    np.testing.assert_allclose(by_target.rewards, [0.75, -0.25, 1.0, 0.5], rtol=1e-6, atol=0)


def test_rewards_by_cosine_replace_the_given_ones_before_penalties() -> None:
    shaped = shape_rewards(batch(), ShapingConfig(cosine_reward=CosineRewardConfig(), overlong_buffer=1), 4)

    np.testing.assert_allclose(shaped.rewards, [-0.5, -0.75, 0.573223, 0.926777], rtol=1e-5, atol=0)


def test_weighted_parts_and_normalisation_apply_before_scale_and_clip() -> None:
    config = ShapingConfig(
        reward_weights={"a": 1.0, "b": 2.0}, reward_normalise="batch", reward_scale=10.0, reward_clip=(-9.0, 5.0)
    )
    parts = {"a": np.float32([1, 0, 1, 0]), "b": np.float32([0, 0, 1, 1])}

    shaped = shape_rewards(batch(), config, 4, parts)

    # Sums 1, 0, 3, 2 have mean 1.5 and deviation 1.291.
    np.testing.assert_allclose(shaped.rewards, [-3.87298, -9.0, 5.0, 3.87298], rtol=1e-5, atol=0)


def test_truncated_completions_carry_no_loss_but_stay_in_the_baseline() -> None:
    made = batch()
    masked, count = mask_truncated(made)
    assert count == 1
    assert masked.loss_counts.tolist() == [0, 2, 3, 1]
    advantages = first_of_each(made, batch_advantages(made, AlgorithmConfig(preset="rloo")))
    np.testing.assert_allclose(advantages, [1.0, -1.0, 0.0, 0.0], rtol=1e-6, atol=0)


# The advantages of distillation are those of a teacher, not of rewards.
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"distillation"}))
def test_every_preset_gives_finite_advantages_that_favour_the_better_sample(preset: str) -> None:
    config = AlgorithmConfig(preset=preset)  # type: ignore[arg-type]
    # A critic that knows nothing yet.
    made = replace(batch(), values=np.zeros(len(batch().tokens), dtype=np.float32))
    advantages = first_of_each(made, batch_advantages(made, config))
    assert np.isfinite(advantages).all()
    assert advantages[0] > advantages[1]
    assert objective_settings(config).objective == config.objective


def test_group_with_equal_rewards_gets_exactly_zero_where_the_baseline_is_the_group() -> None:
    for preset in sorted(set(PRESETS) - {"reinforce_pp", "ppo", "distillation"}):
        config = AlgorithmConfig(preset=preset)  # type: ignore[arg-type]
        advantages = first_of_each(batch(), batch_advantages(batch(), config))
        assert advantages[2:].tolist() == [0.0, 0.0], preset
