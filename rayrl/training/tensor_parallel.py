"""Tensor parallelism by the plan that the model's family brings along in transformers.

A plan names linear layers and says how each is split: `colwise` (heads or features, input whole) is followed by
`rowwise` (their sum). Its styles become those of `parallelize_module`; embedding and output head are split over the
vocabulary here, since training never computes whole logits. What a plan does not name is whole on every tensor rank,
and its gradient is the same on all of them, but for norms over single heads: those see the heads of their rank only,
and their gradients are added up after the last backward.

Adapters (`training.lora`) follow the layer that they stand beside: B is split like the rows of a `colwise` layer, A
like the columns of a `rowwise` one. What lies between A and B is whole on every rank, and so is the other one of them.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rayrl.errors import EngineError
from rayrl.training.collectives import sum_partials
from rayrl.training.gradients import local
from rayrl.training.lora import adapter_parts
from rayrl.utils.logger import get_logger

_log = get_logger("train")

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
}
_SUMMED = "replicated_with_grad_allreduce"
_OF_EXPERTS = ("packed_colwise", "packed_rowwise", "moe_tp_experts", "grouped_gemm")


def parallelize_tensors(lm: Any, mesh: DeviceMesh) -> list[str]:
    """Split the weights of a causal language model over the axis `tensor`, in place.

    Returns the names of parameters whose gradients must be added up over the axis (see `sum_gradients`). Weights may
    be on the meta device. EngineError if the family has no plan, or one with an unknown style.
    """
    vocabulary = (lm.get_input_embeddings(), lm.get_output_embeddings())
    names = [name for name, module in lm.named_modules() if module not in vocabulary]
    styles: dict[str, str] = {}
    summed: list[str] = []
    for pattern, style in (lm._tp_plan or {}).items():
        matching = [name for name in names if re.fullmatch(_regex(pattern), name)]
        if style == _SUMMED:
            summed += [f"{name}.{parameter}" for name in matching for parameter, _ in _module(lm, name)]
        elif matching and not _belongs_to_experts(pattern, style):
            _check_style(style, pattern, lm)
            styles |= dict.fromkeys(matching, style)
    if not styles:
        raise EngineError(
            f"{type(lm).__name__} has no tensor parallel plan in transformers; set training.parallel.tensor=1"
        )
    _split_vocabulary(lm, mesh)
    for name, style in styles.items():
        linear, down, up = adapter_parts(lm.get_submodule(name))
        _split(linear, mesh, _STYLES[style]())
        if style == "colwise" and up is not None:
            _split(up, mesh, ColwiseParallel())
        if style == "rowwise" and down is not None:
            _split(down, mesh, RowwiseParallel())
    return summed


def sum_gradients(parameters: dict[str, nn.Parameter], names: list[str], group: dist.ProcessGroup | None) -> None:
    """Add up the gradients of the named parameters over the axis `tensor`, in one message."""
    grads = [local(grad) for name in names if (grad := parameters[name].grad) is not None]
    if group is None or not grads:
        return
    joined = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(joined, op=dist.ReduceOp.SUM, group=group)
    for grad, total in zip(grads, joined.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def is_vocabulary_split(weight: Tensor) -> bool:
    """Return whether the weight of an output head is split over the vocabulary."""
    return isinstance(weight, DTensor) and any(
        isinstance(placement, Shard) and name == "tensor"
        for name, placement in zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True)
    )


def _split_vocabulary(lm: Any, mesh: DeviceMesh) -> None:
    embedding: Any = lm.get_input_embeddings()
    head: Any = lm.get_output_embeddings()
    vocabulary = embedding.weight.shape[0]
    is_plain = type(embedding) is nn.Embedding
    if vocabulary % mesh.size() or not is_plain:
        _log.warning(
            "embedding (%s) and head of %d tokens stay whole on each of the %d tensor ranks: they cannot be divided",
            type(embedding).__name__,
            vocabulary,
            mesh.size(),
        )
        return
    tied = head.weight is embedding.weight if isinstance(head, nn.Linear) else None
    embedding.weight = _distribute(embedding.weight, mesh)
    embedding.forward = _VocabularyEmbedding(embedding, mesh)
    if tied is None:
        return  # a scalar head took the place of the one over the vocabulary
    head.weight = embedding.weight if tied else _distribute(head.weight, mesh)
    if head.bias is not None:
        head.bias = _distribute(head.bias, mesh)


class _VocabularyEmbedding:
    """The forward of an embedding of which this rank has the rows `start` to `start + count`."""

    def __init__(self, module: nn.Embedding, mesh: DeviceMesh) -> None:
        self._module, self._group = module, mesh.get_group()
        self._count = module.weight.shape[0] // mesh.size()
        self._start = mesh.get_local_rank() * self._count

    def __call__(self, ids: Tensor) -> Tensor:
        inside = ids - self._start
        foreign = (inside < 0) | (inside >= self._count)
        padding = self._module.padding_idx
        own_padding = padding is not None and 0 <= padding - self._start < self._count
        rows = nn.functional.embedding(
            inside.masked_fill(foreign, 0),
            local(self._module.weight),
            padding_idx=padding - self._start if own_padding and padding is not None else None,
        )
        return sum_partials(rows.masked_fill(foreign[..., None], 0.0), self._group)


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(
        distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None), requires_grad=parameter.requires_grad
    )


def _split(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    # Every rank has the same weights: nothing has to be sent.
    parallelize_module(module, mesh, style, src_data_rank=None)


def _check_style(style: str, pattern: str, lm: Any) -> None:
    if style not in _STYLES:
        raise EngineError(
            f"the tensor parallel plan of {type(lm).__name__} splits {pattern!r} by {style!r}, which training does not "
            f"know; set training.parallel.tensor=1"
        )


def _belongs_to_experts(pattern: str, style: str) -> bool:
    return style in _OF_EXPERTS or ".experts" in pattern


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"\d+")


def _module(lm: Any, name: str) -> list[tuple[str, nn.Parameter]]:
    return list(lm.get_submodule(name).named_parameters())
