"""Expert parallelism: experts are spread over the axis `expert`, and single experts split over the axis `tensor`.

Spread, each rank holds whole experts, and all tokens of the axis come to all of them. Tokens travel by gathering, not
by all-to-all: every rank gathers the tokens of all ranks of the axis, computes what its own experts add to them, and
the sums go back to the owners of the tokens (reduce-scatter). That moves e times a token instead of the k parts that
its k experts need, but no rank has to wait for counts of tokens on the host, and no token is dropped. Micro-batches of
different sizes are padded to the largest, which every rank knows from the plan.

Split (`expert_tensor`), each rank holds a part of the width of every expert that it has: rows of `gate_up_proj`, in
halves (`expert_halves`), and the columns of `down_proj` that belong to them. The ranks of the axis have the same
tokens; what their parts of an expert add is summed over them.

The experts of the families in transformers are modules with all their weights in tensors [experts, ...] and a forward
of hidden states, chosen experts and their weights; an index behind the last expert means none.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from rayrl.errors import EngineError
from rayrl.training.collectives import copy_to_ranks, gather, scatter_sum, sum_partials
from rayrl.training.gradients import local

_FORWARD = ["self", "hidden_states", "top_k_index", "top_k_weights"]
_SPLIT_DIM = 2
"""The dimension of an expert's width in `gate_up_proj` [experts, 2, width, hidden], in halves, and in `down_proj`
[experts, hidden, width]."""


class TokenCapacity:
    """The most tokens that a rank of the axis has in the micro-batch at hand; set before each forward."""

    def __init__(self) -> None:
        self.num_tokens = 0


def find_experts(module: nn.Module) -> list[nn.Module]:
    """Return the modules below (or at) a module that hold the weights of experts."""
    return [child for child in module.modules() if _holds_experts(child)]


def parallelize_experts(lm: Any, mesh: DeviceMesh, capacity: TokenCapacity) -> None:
    """Spread and split the experts of a model in place; weights may be on the meta device.

    Args:
        mesh: the axes `expert` (to spread) or `tensor` (to split), or both.

    EngineError if the model has none, or they cannot be divided.
    """
    modules = find_experts(lm)
    if not modules:
        raise EngineError(
            f"{type(lm).__name__} has no experts to divide; set training.parallel.expert=1 and expert_tensor=1"
        )
    axes = mesh.mesh_dim_names or ()
    for module in modules:
        count = vars(module)["num_experts"]
        if "expert" in axes:
            count = _share("experts", count, "expert", mesh["expert"].size())
        if "tensor" in axes:
            _halve(module, mesh["tensor"].size())
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(0 if axis == "expert" else _SPLIT_DIM) for axis in axes]
            part = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        groups = {axis: mesh[axis].get_group() for axis in axes}
        module.forward = _DividedExperts(module, count, groups.get("expert"), groups.get("tensor"), capacity)


def _halve(module: nn.Module, degree: int) -> None:
    """Give `gate_up_proj` the shape in which it can be split. EngineError if the experts are not such."""
    parameters = dict(module.named_parameters(recurse=False))
    whole, down = parameters.get("gate_up_proj"), parameters.get("down_proj")
    if whole is None or down is None or len(parameters) > 2 or whole.shape[1] != 2 * down.shape[2]:
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        raise EngineError(
            f"{type(module).__name__} has other weights than gate_up_proj [experts, 2 x width, hidden] and down_proj "
            f"[experts, hidden, width]: {shapes}; set training.parallel.expert_tensor=1"
        )
    width = whole.shape[1] // 2
    _share("rows of an expert", width, "expert_tensor", degree)
    halved = nn.Parameter(whole.data.unflatten(1, (2, width)), requires_grad=whole.requires_grad)
    module.register_parameter("gate_up_proj", halved)


def _share(what: str, number: int, axis: str, degree: int) -> int:
    if number % degree:
        raise EngineError(f"{number} {what} cannot be divided over training.parallel.{axis}={degree} ranks")
    return number // degree


class _DividedExperts:
    """The forward of an experts module of which this rank holds `count` experts, or parts of them."""

    def __init__(
        self,
        module: nn.Module,
        count: int,
        spread: dist.ProcessGroup | None,
        split: dist.ProcessGroup | None,
        capacity: TokenCapacity,
    ) -> None:
        self._module, self._count, self._capacity = module, count, capacity
        self._spread, self._split = spread, split
        self._bare = _bare_copy(module, count)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._split is None:
            return self._add(hidden_states, top_k_index, top_k_weights)
        # Each rank computes a part of the gradient of tokens and weights: those of its part of the width.
        tokens, weights = (copy_to_ranks(tensor, self._split) for tensor in (hidden_states, top_k_weights))
        return sum_partials(self._add(tokens, top_k_index, weights), self._split)

    def _add(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return what the experts add to the tokens of this rank, as far as the ranks of `expert` hold them."""
        if self._spread is None:
            return self._compute(tokens, chosen, weights)
        num_tokens = tokens.shape[0]
        missing = self._capacity.num_tokens - num_tokens
        assert missing >= 0, "a micro-batch has at most the tokens of the largest"
        all_tokens = gather(nn.functional.pad(tokens, (0, 0, 0, missing)), self._spread)
        all_weights = gather(nn.functional.pad(weights, (0, 0, 0, missing)), self._spread)
        start = self._spread.rank() * self._count
        inside = gather(nn.functional.pad(chosen, (0, 0, 0, missing), value=-1), self._spread) - start
        foreign = (inside < 0) | (inside >= self._count)
        added = self._compute(
            all_tokens, inside.masked_fill(foreign, self._count), all_weights.masked_fill(foreign, 0.0)
        )
        # Without a token for this rank's experts nothing would lead backward, and the other ranks would wait there.
        for tensor in (all_tokens, all_weights, *self._module.parameters(recurse=False)):
            added = added + local(tensor)[:0].sum().to(added.dtype)
        # An operation in place on a view would lose the hooks that `fully_shard` puts on what a module returns.
        return scatter_sum(added, self._spread)[:num_tokens].clone()

    def _compute(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        parts = {name: local(parameter) for name, parameter in self._module.named_parameters(recurse=False)}
        if self._split is not None:
            parts["gate_up_proj"] = parts["gate_up_proj"].flatten(1, 2)
        added: Tensor = functional_call(self._bare, parts, (tokens, chosen, weights))
        return added


def _bare_copy(module: nn.Module, count: int) -> nn.Module:
    """Return a module with the settings of `module`, without its hooks and weights, for `count` experts."""
    copy: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(copy)
    own = vars(nn.Module()).keys()
    vars(copy).update({name: value for name, value in vars(module).items() if name not in own})
    # Tells the kernels of transformers that an index behind the last expert occurs.
    vars(copy)["_is_expert_parallel"] = count < vars(module)["num_experts"]
    vars(copy)["num_experts"] = count
    for name, child in module.named_children():
        copy.add_module(name, child)
    for name, parameter in module.named_parameters(recurse=False):
        shape = (count, *parameter.shape[1:])
        copy.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
    return copy


def _holds_experts(module: nn.Module) -> bool:
    number = vars(module).get("num_experts")
    parameters = list(module.parameters(recurse=False))
    return (
        bool(parameters)
        and all(parameter.dim() >= 2 and parameter.shape[0] == number for parameter in parameters)
        and list(inspect.signature(type(module).forward).parameters) == _FORWARD
    )
