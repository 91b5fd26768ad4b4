"""Which command a config file belongs to, told by its sections."""

from pathlib import Path

import pytest

from rayrl.cli.config_file import (
    config_kind,
    load_any_config,
    load_preference_config,
    load_reward_model_config,
    load_run_config,
)
from rayrl.config.run import PreferenceRunConfig, RewardModelRunConfig, RunConfig, SFTRunConfig
from rayrl.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "kind", "parsed"),
    [
        ("quickstart_grpo", "run", RunConfig),
        ("quickstart_ppo", "run", RunConfig),
        ("quickstart_sft", "sft", SFTRunConfig),
        ("quickstart_dpo", "preference", PreferenceRunConfig),
        ("quickstart_reward_model", "reward_model", RewardModelRunConfig),
    ],
)
def test_shipped_configs_are_of_the_kind_that_their_sections_say(name: str, kind: str, parsed: type) -> None:
    path = CONFIGS / f"{name}.yaml"

    assert config_kind(path) == kind
    assert type(load_any_config(path, [])) is parsed


def test_a_config_of_another_kind_is_refused_with_the_command_that_takes_it() -> None:
    with pytest.raises(ConfigError, match="a config of `rayrl preference`"):
        load_run_config(CONFIGS / "quickstart_dpo.yaml", [])
    with pytest.raises(ConfigError, match="a config of `rayrl reward-model`"):
        load_preference_config(CONFIGS / "quickstart_reward_model.yaml", [])
    with pytest.raises(ConfigError, match="a config of `rayrl sft`"):
        load_reward_model_config(CONFIGS / "quickstart_sft.yaml", [])


def test_all_kinds_have_the_loop_under_one_name() -> None:
    for name in ("sft", "dpo", "reward_model"):
        config = load_any_config(CONFIGS / f"quickstart_{name}.yaml", [])
        assert not isinstance(config, RunConfig)
        assert config.loop.num_steps > 0
