"""Back-pressure: an engine's queue has a length, and what does not fit is refused at once."""

from threading import Lock

from rayrl.inference.engine import EngineBusy


class QueueLimit:
    """Counts the waiting requests of one engine; callers enter on the event loop, the engine's thread lets them out."""

    def __init__(self, name: str, max_queued_requests: int) -> None:
        self._name = name
        self._max = max_queued_requests
        self._num_waiting = 0
        self._lock = Lock()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._num_waiting

    def enter(self) -> None:
        """Count one more. EngineBusy if the queue is full."""
        with self._lock:
            if self._num_waiting >= self._max:
                raise EngineBusy(
                    f"engine {self._name} has {self._num_waiting} waiting requests, as many as "
                    f"inference.max_queued_requests={self._max} allows; try again later or elsewhere"
                )
            self._num_waiting += 1

    def leave(self, count: int) -> None:
        """Count `count` fewer: they run now, or ended without running."""
        with self._lock:
            self._num_waiting -= count
            assert self._num_waiting >= 0, "more requests left the queue than entered it"
