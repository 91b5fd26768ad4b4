"""Filters between generation and training."""

import pytest
from groups import summary

from rayrl.config.shaping import ShapingConfig
from rayrl.driver.group_filter import NO_SIGNAL, GroupFilter
from rayrl.errors import ConfigError


def test_group_of_equal_rewards_is_filtered_only_when_dynamic_sampling_is_on() -> None:
    group = summary(rewards=(1.0, 1.0, 1.0))
    assert GroupFilter(ShapingConfig(drop_groups_without_signal=True)).reason(group) == NO_SIGNAL
    assert GroupFilter(ShapingConfig()).reason(group) is None


def test_group_with_two_rewards_is_kept() -> None:
    config = ShapingConfig(drop_groups_without_signal=True)
    assert GroupFilter(config).reason(summary(rewards=(1.0, 0.0))) is None


def test_filter_function_decides_from_the_summary() -> None:
    reason = GroupFilter(ShapingConfig(filter="operator:not_")).reason(summary())
    assert reason == "algorithm.shaping.filter=operator:not_ said no"


def test_filter_that_cannot_be_imported_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.shaping\.filter: cannot import"):
        GroupFilter(ShapingConfig(filter="no_such_module:keep"))


def test_filter_that_raises_is_an_error_that_names_function_group_and_place() -> None:
    words = r"filter=operator:index raised TypeError.*on group sums/0/0 \(.*group_filter\.py:\d+\)"
    with pytest.raises(ConfigError, match=words):
        GroupFilter(ShapingConfig(filter="operator:index")).reason(summary())
