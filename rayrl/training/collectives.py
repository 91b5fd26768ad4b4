"""Collectives that autograd goes through. Every rank of the group calls them alike, with tensors of one shape.

forward                                         backward
sum_partials     sum over the ranks             identity: all ranks hold the same gradient
exchange         part i to rank i               the same exchange
copy_to_ranks    nothing: all have the same     sum over the ranks
gather           all parts, one after another   sum over the ranks, each its own part
scatter_sum      sum, each its own part         all parts, one after another
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_partials(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks; what follows must be computed alike on all of them."""
    result: Tensor = _SumPartials.apply(part, group)
    return result


def copy_to_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that all ranks have, where each of them goes on with a part of the weights."""
    result: Tensor = _CopyToRanks.apply(tensor, group)
    return result


def exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [n, ...] what the n ranks sent here, given [n, ...] what goes to each of them."""
    result: Tensor = _Exchange.apply(parts, group)
    return result


def gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [n * T, ...] the parts [T, ...] of all ranks."""
    result: Tensor = _Gather.apply(part, group)
    return result


def scatter_sum(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [T, ...] this rank's part of the sum of [n * T, ...] over the ranks."""
    result: Tensor = _ScatterSum.apply(parts, group)
    return result


class _SumPartials(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ctx.group)
        return total, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = part.new_empty((part.shape[0] * group.size(), *part.shape[1:]))
    dist.all_gather(list(parts.chunk(group.size())), part.contiguous(), group=group)
    return parts


def _reduce_scatter(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = parts.new_empty((parts.shape[0] // group.size(), *parts.shape[1:]))
    dist.reduce_scatter(own, list(parts.contiguous().chunk(group.size())), op=dist.ReduceOp.SUM, group=group)
    return own
