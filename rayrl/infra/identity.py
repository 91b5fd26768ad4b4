"""Who an actor is, in error messages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLabel:
    """An actor as messages name it. Fields that are not known yet are empty.

    Example: `ActorLabel(name="inference-1", node="c9be6f59", host="10.0.0.4", pid=4711, actor_id="0c5d94")`.
    """

    name: str
    """Group and index."""
    node: str | None = None
    """Ray's id of its node."""
    host: str | None = None
    """IP address of its node."""
    pid: int | None = None
    """Process id on that node."""
    actor_id: str | None = None
    """Ray's id of the actor."""

    def __str__(self) -> str:
        node = self.host or "unknown"
        process = "not started yet" if self.pid is None else f"pid {self.pid}"
        return f"{self.name} (node {node}, {process})"
