"""Sharding with FSDP2 (`fully_shard`): per block, and once for all that is outside of the blocks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rayrl.config.training import FsdpEngine
from rayrl.training.expert_parallel import find_experts
from rayrl.training.layout import Layout
from rayrl.training.policy_model import PolicyModel


def shard(model: PolicyModel, layout: Layout, engine: FsdpEngine) -> None:
    """Shard the parameters over the axes `data` and `context` in place; nothing for one rank.

    Blocks are gathered one at a time, in the data type of the products. Gradients are reduced in float32 and added up,
    not averaged: losses are divided by numbers of the whole step already, and experts that are spread over data ranks
    get the gradients of the tokens of all of these anyway.
    """
    if engine.compile:
        for layer in model.layers():
            layer.compile()
    if layout.shard_mesh is None:
        return
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if engine.autocast == "bfloat16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
    }
    if engine.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for layer in model.layers():
        if layout.parallel.expert > 1:
            for experts in find_experts(layer):
                _shard_module(experts, layout.expert_shard_mesh, options)
        _shard_module(layer, layout.shard_mesh, options)
    _shard_module(model, layout.shard_mesh, options)


def _shard_module(module: nn.Module, mesh: DeviceMesh | None, options: dict[str, Any]) -> None:
    sharded: Any = fully_shard(module, mesh=mesh, **options)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(model: PolicyModel) -> dict[str, nn.Parameter]:
    """Return the weights by the names that the model's own files use, tied ones once."""
    return dict(model.lm.named_parameters())
