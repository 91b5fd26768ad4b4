"""Where a process runs, as actors report it when they are ready."""

import os
import socket
from typing import Any


def process_info() -> dict[str, Any]:
    """Return `{"node": Ray node id or "", "host": address other nodes can reach, "pid": int}`."""
    import ray
    import ray.util

    if not ray.is_initialized():
        return {"node": "", "host": socket.gethostname(), "pid": os.getpid()}
    context = ray.get_runtime_context()
    return {"node": context.get_node_id(), "host": ray.util.get_node_ip_address(), "pid": os.getpid()}
