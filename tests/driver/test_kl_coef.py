"""The coefficient of the KL penalty over a run."""

import pytest

from rayrl.config.kl import AdaptiveKLConfig, KLConfig
from rayrl.driver.kl_coef import first_kl_coef, next_kl_coef, restored_kl_coef
from rayrl.errors import CheckpointError

ADAPTIVE = KLConfig(coef=0.1, adaptive=AdaptiveKLConfig(target=0.02, horizon=100))


def test_coefficient_grows_when_the_kl_is_above_its_target_and_falls_below() -> None:
    coef = first_kl_coef(ADAPTIVE)

    assert next_kl_coef(ADAPTIVE, coef, {"policy/ref_kl": 1.0}, 50) == pytest.approx(0.1 * 1.1, rel=1e-9)
    assert next_kl_coef(ADAPTIVE, coef, {"policy/ref_kl": 0.0}, 50) == pytest.approx(0.1 * 0.9, rel=1e-9)
    assert next_kl_coef(ADAPTIVE, coef, {"policy/ref_kl": 0.021}, 50) == pytest.approx(0.1 * 1.025, rel=1e-9)
    assert next_kl_coef(ADAPTIVE, coef, {}, 50) == coef


def test_coefficient_is_that_of_the_config_when_it_is_fixed() -> None:
    fixed = KLConfig(coef=0.1)

    assert first_kl_coef(fixed) is None
    assert next_kl_coef(fixed, None, {"policy/ref_kl": 1.0}, 50) is None
    assert restored_kl_coef(fixed, {"kl_coef": 0.7}) is None


def test_coefficient_of_a_checkpoint_is_gone_on_with_and_nonsense_is_refused() -> None:
    assert restored_kl_coef(ADAPTIVE, {"kl_coef": 0.7}) == 0.7
    assert restored_kl_coef(ADAPTIVE, {"kl_coef": None}) == 0.1
    assert restored_kl_coef(ADAPTIVE, {}) == 0.1
    with pytest.raises(CheckpointError, match="kl_coef=-1"):
        restored_kl_coef(ADAPTIVE, {"kl_coef": -1})
