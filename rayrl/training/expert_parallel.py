"""Expert parallelism: each rank of the axis `expert` holds whole experts, all tokens of the axis come to all of them.

Tokens travel by gathering, not by all-to-all: every rank gathers the tokens of all ranks of the axis, computes what its
own experts add to them, and the sums go back to the owners of the tokens (reduce-scatter). That moves e times a token
instead of the k parts that its k experts need, but no rank has to wait for counts of tokens on the host, and no token
is dropped. Micro-batches of different sizes are padded to the largest, which every rank knows from the plan.

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
from rayrl.training.collectives import gather, scatter_sum
from rayrl.training.gradients import local

_FORWARD = ["self", "hidden_states", "top_k_index", "top_k_weights"]


class TokenCapacity:
    """The most tokens that a rank of the axis has in the micro-batch at hand; set before each forward."""

    def __init__(self) -> None:
        self.num_tokens = 0


def find_experts(module: nn.Module) -> list[nn.Module]:
    """Return the modules below (or at) a module that hold the weights of experts."""
    return [child for child in module.modules() if _holds_experts(child)]


def parallelize_experts(lm: Any, mesh: DeviceMesh, capacity: TokenCapacity) -> None:
    """Spread the experts of a model over an axis in place; weights may be on the meta device.

    EngineError if the model has none, or their number cannot be divided.
    """
    modules = find_experts(lm)
    if not modules:
        raise EngineError(f"{type(lm).__name__} has no experts that can be spread; set training.parallel.expert=1")
    for module in modules:
        num_experts = vars(module)["num_experts"]
        if num_experts % mesh.size():
            raise EngineError(
                f"{num_experts} experts cannot be divided over training.parallel.expert={mesh.size()} ranks"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.forward = _SpreadExperts(module, num_experts // mesh.size(), mesh.get_group(), capacity)


class _SpreadExperts:
    """The forward of an experts module of which this rank holds `count` experts."""

    def __init__(self, module: nn.Module, count: int, group: dist.ProcessGroup, capacity: TokenCapacity) -> None:
        self._module, self._count, self._group, self._capacity = module, count, group, capacity
        self._start = group.rank() * count
        self._bare = _bare_copy(module, count)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_tokens = hidden_states.shape[0]
        missing = self._capacity.num_tokens - num_tokens
        assert missing >= 0, "a micro-batch has at most the tokens of the largest"
        tokens = gather(nn.functional.pad(hidden_states, (0, 0, 0, missing)), self._group)
        weights = gather(nn.functional.pad(top_k_weights, (0, 0, 0, missing)), self._group)
        chosen = gather(nn.functional.pad(top_k_index, (0, 0, 0, missing), value=-1), self._group) - self._start
        foreign = (chosen < 0) | (chosen >= self._count)
        parameters = {name: local(parameter) for name, parameter in self._module.named_parameters(recurse=False)}
        added: Tensor = functional_call(
            self._bare,
            parameters,
            (tokens, chosen.masked_fill(foreign, self._count), weights.masked_fill(foreign, 0.0)),
        )
        # Without a token for this rank's experts nothing would lead backward, and the other ranks would wait there.
        for tensor in (tokens, weights, *parameters.values()):
            added = added + tensor[:0].sum().to(added.dtype)
        return scatter_sum(added, self._group)[:num_tokens]


def _bare_copy(module: nn.Module, count: int) -> nn.Module:
    """Return a module with the settings of `module`, without its hooks and weights, for `count` experts."""
    copy: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(copy)
    own = vars(nn.Module()).keys()
    vars(copy).update({name: value for name, value in vars(module).items() if name not in own})
    vars(copy)["num_experts"] = count
    # Tells the kernels of transformers that an index behind the last expert occurs.
    vars(copy)["_is_expert_parallel"] = True
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
