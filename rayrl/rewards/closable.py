"""A reward that owns something which must be ended, such as a process."""

from typing import Protocol, runtime_checkable

from rayrl.types.protocols import Reward


@runtime_checkable
class ClosableReward(Reward, Protocol):
    """A reward with a second method: whoever made it calls `close` when no episode needs it any more."""

    async def close(self) -> None:
        """End what the reward owns; calls after the first do nothing."""
        ...
