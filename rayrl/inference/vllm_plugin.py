"""The plugin that vLLM loads in each of its processes, by the entry point `vllm.general_plugins`.

- It registers the weight transfer backend `rayrl`.
- In processes that an engine actor started it waits for the actor's death in a thread and then ends the process: vLLM's
  own processes would outlive an actor that was killed.
"""

import os
import select
from threading import Thread

from rayrl.errors import EngineError

BACKEND = "rayrl"
"""Name of the weight transfer backend."""
OWNER = "RAYRL_VLLM_OWNER"
"""Environment variable with the process id of the engine actor; set before vLLM starts its processes."""
REFUSED = "rayrl refused the update"
"""Begins the error of a weight update that changed nothing."""
_ORPHANED = 70


def register() -> None:
    """Called by vLLM in each of its processes; may be called several times."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    # No public way to ask; registering twice raises. vllm 0.32.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rayrl.inference.vllm_transfer", "SharedMemoryTransferEngine"
        )
    owner = int(os.environ.get(OWNER, "0"))
    if owner not in (0, os.getpid()):
        leave_with(owner)


def check_registered() -> None:
    """EngineError if vLLM does not find the plugin: rayrl was installed before it had one."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if BACKEND not in WeightTransferEngineFactory._registry:
        raise EngineError(
            f"vLLM does not find rayrl's plugin {BACKEND!r} (entry point group vllm.general_plugins); install rayrl "
            f"again in this environment, and see that VLLM_PLUGINS is not set or names it"
        )


def leave_with(owner: int) -> None:
    """End this process, at once, when process `owner` has ended."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(_ORPHANED)
    Thread(target=_wait_and_leave, args=(descriptor,), name="leave-with-owner", daemon=True).start()


def _wait_and_leave(descriptor: int) -> None:
    # A process descriptor becomes readable when its process ends; ids may be used again, descriptors are not.
    select.select([descriptor], [], [])
    os._exit(_ORPHANED)
