"""Presets, and combinations of the algorithm section that contradict each other."""

import pytest
from pydantic import ValidationError

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.kl import AdaptiveKLConfig, KLConfig
from rayrl.config.shaping import ShapingConfig


def test_given_fields_win_over_the_preset_when_both_name_them() -> None:
    config = AlgorithmConfig(preset="dapo", clip_high=0.5, shaping=ShapingConfig(mask_truncated=True))

    assert config.clip_high == 0.5
    assert AlgorithmConfig.model_validate({"preset": "dapo", "shaping": {"mask_truncated": True}}).shaping == (
        ShapingConfig(mask_truncated=True, drop_groups_without_signal=True)
    )


@pytest.mark.parametrize("preset", ["m2po", "dppo"])
def test_trust_regions_around_the_sampling_policy_have_it_as_their_centre(preset: str) -> None:
    assert AlgorithmConfig(preset=preset).proximal == "sampler"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kl": KLConfig(coef=0.1, place="reward", level="token")}, "kl.level='token'.*reinforce_pp"),
        ({"kl": KLConfig(adaptive=AdaptiveKLConfig(target=0.1))}, "kl.adaptive needs a kl.coef above 0"),
        ({"kl": KLConfig(refresh_every=3)}, "kl.refresh_every=3 has no reference"),
    ],
)
def test_kl_settings_that_contradict_each_other_are_refused(section: dict[str, KLConfig], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**section)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward_parts_scale": "group"}, "reward_weights names, which is empty"),
        ({"length_penalty": 0.1, "length_penalty_form": "target"}, "needs length_target"),
        ({"reward_clip": (1.0, -1.0)}, "bounds in the wrong order"),
    ],
)
def test_shaping_that_contradicts_itself_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ShapingConfig.model_validate(values)
