"""Learning rate factors."""

import pytest

from rayrl.config.training import ScheduleConfig
from rayrl.training.schedule import lr_factor


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_grows_linearly_to_the_peak(kind: str) -> None:
    config = ScheduleConfig(type=kind, warmup_steps=4)

    assert [lr_factor(step, config, 20) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0], rel=1e-9)


def test_constant_stays_at_the_peak() -> None:
    assert [lr_factor(step, ScheduleConfig(), 5) for step in (0, 3, 50)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_ends_at_the_minimum_on_the_last_step_and_stays_there(kind: str, middle: float) -> None:
    config = ScheduleConfig(type=kind, min_ratio=0.1)

    factors = [lr_factor(step, config, 11) for step in (0, 5, 10, 30)]

    assert factors == pytest.approx([1.0, middle, 0.1, 0.1], rel=1e-9)


def test_cosine_is_above_linear_in_the_first_half() -> None:
    linear, cosine = (lr_factor(2, ScheduleConfig(type=kind), 11) for kind in ("linear", "cosine"))

    assert cosine > linear


def test_a_run_of_warm_up_only_does_not_divide_by_zero() -> None:
    config = ScheduleConfig(type="cosine", warmup_steps=3)

    assert lr_factor(3, config, 3) == pytest.approx(1.0, rel=1e-9)
