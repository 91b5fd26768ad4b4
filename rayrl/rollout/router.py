"""Which engine serves a request: a pure choice from counts, with affinity for sessions."""

from collections import OrderedDict


class Router:
    """Least loaded engine first; requests of one session go back to the engine that has their prefix.

    Affinity gives way when that engine has `max_imbalance` requests more than the least loaded one.
    """

    def __init__(self, engines: list[str], *, max_imbalance: int = 32, max_sessions: int = 65536) -> None:
        self._load: dict[str, int] = dict.fromkeys(engines, 0)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._max_imbalance = max_imbalance
        self._max_sessions = max_sessions

    @property
    def load(self) -> dict[str, int]:
        """Requests in flight per engine."""
        return dict(self._load)

    def acquire(self, session_id: str | None = None, avoid: frozenset[str] = frozenset()) -> str | None:
        """Count one more request on an engine and return its name; None if every engine is to be avoided."""
        candidates = {name: load for name, load in self._load.items() if name not in avoid}
        if not candidates:
            return None
        best = min(candidates, key=lambda name: candidates[name])
        if session_id is not None:
            home = self._sessions.get(session_id)
            if home in candidates and candidates[home] - candidates[best] < self._max_imbalance:
                best = home
            self._remember(session_id, best)
        self._load[best] += 1
        return best

    def release(self, engine: str) -> None:
        """Count one request less. An engine that was removed meanwhile is ignored."""
        if engine in self._load:
            assert self._load[engine] > 0, f"engine {engine} has no request to release"
            self._load[engine] -= 1

    def remove(self, engine: str) -> None:
        """Route nothing more to an engine."""
        self._load.pop(engine, None)

    def add(self, engine: str) -> None:
        """Route to a new engine, too."""
        self._load.setdefault(engine, 0)

    def _remember(self, session_id: str, engine: str) -> None:
        self._sessions[session_id] = engine
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
