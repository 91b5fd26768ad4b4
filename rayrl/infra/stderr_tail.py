"""The last lines that an actor wrote to its stderr: the place where the root cause of a hang or a death stands.

Best effort by nature: the answer is text in any case, and says why there are no lines.
"""

import os
from collections import deque
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayrl.infra.identity import ActorLabel

_REMOTE_TIMEOUT_S = 10.0
_MARKS = (":job_id:", ":actor_name:", ":task_name:")


def describe_stderr(actor: ActorLabel | str, num_lines: int = 20) -> str:
    """Return the last lines of the actor's stderr under a heading, or one line that says why they are not there."""
    lines, reason = _stderr_lines(actor, num_lines)
    if reason is not None:
        return f"its stderr cannot be shown: {reason}"
    if not lines:
        return "its stderr is empty"
    return "\n".join(["last lines of its stderr:", *(f"  | {line}" for line in lines)])


def locate_actor(actor: ActorLabel) -> ActorLabel:
    """Fill in node and process of an actor that has not answered yet, as far as Ray knows them."""
    if actor.pid is not None or actor.actor_id is None:
        return actor
    # Not public, but the public state API needs the dashboard, which clusters may not run. ray 2.55 to 2.60.
    from ray._private import state

    try:
        record = state.actors(actor_id=actor.actor_id)
    except (RayError, RuntimeError, ValueError, ConnectionError):
        return actor
    address = record.get("Address", {})
    return replace(
        actor,
        pid=record.get("Pid") or None,
        host=address.get("IPAddress") or None,
        node=address.get("NodeID") or None,
    )


def read_worker_stderr(pid: int, num_lines: int) -> list[str] | None:
    """Return the last lines of a worker of this node; None if Ray has no log of such a process."""
    context = ray.get_runtime_context()
    logs = Path(context.get_temp_dir()) / context.get_session_name() / "logs"
    files = sorted(logs.glob(f"worker-*-{pid}.err"), key=os.path.getmtime)
    if not files:
        return None
    with files[-1].open(encoding="utf-8", errors="replace") as file:
        # Ray marks in the file whose lines follow.
        return [line.rstrip() for line in deque(file, maxlen=num_lines) if not line.startswith(_MARKS)]


def _stderr_lines(actor: ActorLabel | str, num_lines: int) -> tuple[list[str], str | None]:
    """Return (lines, reason why there are none)."""
    if isinstance(actor, str):
        return [], "its process is not known here"
    if not ray.is_initialized():
        return [], "this process is not connected to Ray"
    found = locate_actor(actor)
    if found.pid is None:
        return [], "it has no process: Ray has not started it, for example for want of free resources"
    try:
        if found.node in (None, ray.get_runtime_context().get_node_id()):
            lines = read_worker_stderr(found.pid, num_lines)
        else:
            where = NodeAffinitySchedulingStrategy(found.node, soft=False)
            read = ray.remote(read_worker_stderr).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
            lines = ray.get(read.remote(found.pid, num_lines), timeout=_REMOTE_TIMEOUT_S)
    except (RayError, OSError) as error:
        return [], f"reading it failed: {str(error).splitlines()[0]}"
    return lines or [], f"Ray has no log of pid {found.pid}" if lines is None else None
