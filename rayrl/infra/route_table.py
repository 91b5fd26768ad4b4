"""From the config to a stored route."""

from pathlib import Path

from rayrl.config.transfer import TransferConfig
from rayrl.errors import TransferError
from rayrl.infra.weight_route import WeightRoute


def make_stored_route(transfer: TransferConfig, model_folder: Path) -> WeightRoute:
    """Return one side of the route that `transfer` names, with its backend and folder decided.

    TransferError if it is a collective one: that is made of the group which both sides joined.
    """
    if transfer.backend == "object_store":
        from rayrl.infra.object_store_route import ObjectStoreRoute

        return ObjectStoreRoute()
    if transfer.backend == "disk":
        from rayrl.infra.disk_route import DiskRoute

        assert transfer.folder is not None, "decided by placement_plan.resolved_transfer"
        return DiskRoute(Path(transfer.folder), keep_versions=transfer.keep_versions, model_folder=model_folder)
    if transfer.backend == "cuda_ipc":
        from rayrl.infra.cuda_ipc_route import CudaIpcRoute

        return CudaIpcRoute()
    raise TransferError(f"transfer.backend={transfer.backend} moves weights over a group, and none was joined")
