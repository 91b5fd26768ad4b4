"""Device mesh and sharding with FSDP2 (`fully_shard`): per block, and once for all that is outside of the blocks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rayrl.errors import EngineError
from rayrl.training.policy_model import PolicyModel


def make_mesh(device: torch.device, world_size: int) -> DeviceMesh | None:
    """Return the mesh with the axis `data` over all ranks, on the default process group; None for one rank."""
    if world_size == 1:
        return None
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        raise EngineError(f"{world_size} training ranks (training.parallel.data) need a process group of that size")
    return init_device_mesh(device.type, (world_size,), mesh_dim_names=("data",))


def shard(model: PolicyModel, mesh: DeviceMesh | None, autocast: str) -> None:
    """Shard the parameters over the axis `data` in place; nothing for one rank.

    Blocks are gathered one at a time, in the data type of the products; gradients are reduced in float32.
    """
    if mesh is None:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if autocast == "bfloat16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in model.layers():
        fully_shard(layer, mesh=mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(model: PolicyModel) -> dict[str, nn.Parameter]:
    """Return the weights by the names that the model's own files use, tied ones once."""
    return dict(model.lm.named_parameters())
