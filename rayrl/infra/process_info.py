"""Where a process runs, as actors report it when they are ready."""

import os
import socket
from typing import Any


def process_info() -> dict[str, Any]:
    """Return `{"node": Ray node id or "", "host": address other nodes can reach, "pid": int}`.

    From now on the process answers stack dumps, too.
    """
    import ray
    import ray.util

    from rayrl.infra.stack_dump import answer_stack_dumps

    answer_stack_dumps()

    if not ray.is_initialized():
        return {"node": "", "host": socket.gethostname(), "pid": os.getpid()}
    context = ray.get_runtime_context()
    return {"node": context.get_node_id(), "host": ray.util.get_node_ip_address(), "pid": os.getpid()}
