"""Sharding with FSDP2 (`fully_shard`): per block, and once for all that is outside of the blocks."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rayrl.training.layout import Layout
from rayrl.training.policy_model import PolicyModel


def shard(model: PolicyModel, layout: Layout, autocast: str) -> None:
    """Shard the parameters over the axes `data` and `context` in place; nothing for one rank.

    Blocks are gathered one at a time, in the data type of the products; gradients are reduced in float32.
    """
    if layout.shard_mesh is None:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if autocast == "bfloat16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in model.layers():
        fully_shard(layer, mesh=layout.shard_mesh, mp_policy=policy)
    fully_shard(model, mesh=layout.shard_mesh, mp_policy=policy)


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(model: PolicyModel) -> dict[str, nn.Parameter]:
    """Return the weights by the names that the model's own files use, tied ones once."""
    return dict(model.lm.named_parameters())
