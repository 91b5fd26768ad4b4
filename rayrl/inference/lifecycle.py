"""The states of an inference engine, and the moves between them."""

from enum import Enum

from rayrl.errors import EngineError, IllegalTransition


class EngineState(Enum):
    """What an engine is doing."""

    STARTING = "the model is being loaded; nothing is served yet"
    RUNNING = "requests are served as soon as the weights of a version have been pushed"
    PAUSED = "requests are accepted and kept, and no token is sampled until resume"
    CLOSED = "the engine has been closed; every request ends with an error"
    FAILED = "the engine's loop raised; every request ends with that cause, and only a new engine helps"


_MOVES: dict[EngineState, tuple[EngineState, ...]] = {
    EngineState.STARTING: (EngineState.RUNNING, EngineState.FAILED, EngineState.CLOSED),
    EngineState.RUNNING: (EngineState.PAUSED, EngineState.FAILED, EngineState.CLOSED),
    EngineState.PAUSED: (EngineState.RUNNING, EngineState.FAILED, EngineState.CLOSED),
    EngineState.FAILED: (EngineState.CLOSED,),
    EngineState.CLOSED: (),
}


class Lifecycle:
    """The current state of one engine, with the cause where it failed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = EngineState.STARTING
        self._cause: BaseException | None = None

    @property
    def state(self) -> EngineState:
        """The current state."""
        return self._state

    @property
    def cause(self) -> BaseException | None:
        """What made the engine fail; None unless it failed."""
        return self._cause

    def move(self, target: EngineState) -> None:
        """Go to `target`. Staying is no move and is allowed. IllegalTransition if the table has no such move."""
        if target is self._state:
            return
        if target not in _MOVES[self._state]:
            allowed = ", ".join(state.name for state in _MOVES[self._state]) or "none"
            raise IllegalTransition(
                f"engine {self._name} is {self._state.name} ({self._state.value}) and cannot become {target.name}; "
                f"allowed: {allowed}"
            )
        self._state = target

    def fail(self, cause: BaseException) -> None:
        """Become FAILED and keep the first cause; an engine that has ended stays as it is."""
        if self._state not in (EngineState.FAILED, EngineState.CLOSED):
            self._cause = cause
            self._state = EngineState.FAILED

    def unavailable(self) -> EngineError | None:
        """Return why the engine serves nothing, as a new error for one caller; None if it can serve."""
        if self._state is EngineState.FAILED:
            error = EngineError(f"engine {self._name} failed: {type(self._cause).__name__}: {self._cause}")
            error.__cause__ = self._cause
            return error
        if self._state in (EngineState.STARTING, EngineState.CLOSED):
            return EngineError(f"engine {self._name} is {self._state.name}: {self._state.value}")
        return None
