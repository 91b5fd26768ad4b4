"""One warning for all groups that a fault has hit, instead of one for each."""

import asyncio
from collections.abc import Callable

_GATHER_S = 0.5
_NUM_NAMED = 3


class ResampleLog:
    """Gathers what is sampled again for a moment after the first, by reason, and says it once."""

    def __init__(self, warn: Callable[[str], None], gather_s: float = _GATHER_S) -> None:
        self._warn = warn
        self._gather_s = gather_s
        self._groups: dict[str, list[str]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, prompt_id: str, retry: int, reason: str) -> None:
        """Note that a group is sampled again for the `retry`-th time. Only in an event loop."""
        group = prompt_id if retry == 1 else f"{prompt_id} (for the {retry}. time)"
        self._groups.setdefault(reason.splitlines()[0], []).append(group)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._gather_s, self.flush)

    def flush(self) -> None:
        """Say what was gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._groups = self._groups, {}
        for reason, groups in gathered.items():
            more = len(groups) - _NUM_NAMED
            names = ", ".join(groups[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
            noun = "group is" if len(groups) == 1 else "groups are"
            self._warn(f"{len(groups)} {noun} sampled again ({names}): {reason}")
