"""One gradient norm over parameters that live on different meshes, and clipping by it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

_EPS = 1e-6
"""Added to the norm when scaling, as torch does."""


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(parameters: Iterable[nn.Parameter], world_size: int) -> Tensor:
    """Return the Euclidean norm of the whole gradient, float32 and 0-dim; the same on every rank.

    Each rank adds up the squares of what it holds, divided by the number of ranks that hold the same; one sum over all
    ranks then counts every number once, whatever meshes the parameters live on.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if world_size == 1:
        return torch.nn.utils.get_total_norm(grads).float()
    by_copies: dict[int, list[Tensor]] = {}
    for grad in grads:
        by_copies.setdefault(_copies(grad, world_size), []).append(local(grad))
    squares = [torch.nn.utils.get_total_norm(held).float().square() / copies for copies, held in by_copies.items()]
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total.sqrt()


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients down in place so that their whole norm is at most `max_norm`, given what it is."""
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor.to(grads[0].device))


def _copies(grad: Tensor, world_size: int) -> int:
    """Return how many ranks hold the same part of a gradient."""
    if not isinstance(grad, DTensor):
        return world_size
    mesh = grad.device_mesh
    copies = world_size // mesh.size()
    for axis, placement in enumerate(grad.placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(axis)
    return copies
