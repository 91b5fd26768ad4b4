"""Which finished groups are left out of training. Pure; the rollout loop acts on it."""

import traceback
from collections.abc import Callable

from rayrl.config.shaping import ShapingConfig
from rayrl.errors import ConfigError
from rayrl.types.trajectory import GroupSummary
from rayrl.utils.module_path import load_attribute

NO_SIGNAL = "no signal: all rewards of the group are equal"


class GroupFilter:
    """The filters of `algorithm.shaping`."""

    def __init__(self, config: ShapingConfig) -> None:
        """ConfigError if the filter function cannot be imported."""
        self._drops_without_signal = config.drop_groups_without_signal
        self._path = config.filter
        self._function: Callable[[GroupSummary], bool] | None = None
        if config.filter is not None:
            try:
                self._function = load_attribute(config.filter)
            except ValueError as error:
                raise ConfigError(f"algorithm.shaping.filter: {error}") from error

    def reason(self, group: GroupSummary) -> str | None:
        """Return why a group with usable trajectories is filtered, or None to train on it.

        ConfigError if the user's function raises: what it would have filtered is not known.
        """
        # Rewards are compared, not advantages: equal floats can leave 1e-17 there.
        if self._drops_without_signal and len(set(group.rewards)) == 1:
            return NO_SIGNAL
        if self._function is not None and not self._ask(self._function, group):
            return f"algorithm.shaping.filter={self._path} said no"
        return None

    def _ask(self, function: Callable[[GroupSummary], bool], group: GroupSummary) -> bool:
        try:
            return bool(function(group))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"algorithm.shaping.filter={self._path} raised {type(error).__name__}: {error} on group "
                f"{group.prompt_id} ({place.filename}:{place.lineno}); it must return True or False for every group"
            ) from error
