"""Process groups of torch that note every collective before they start it.

`install` registers a backend of torch; groups that are made of it, by `init_process_group`, a device mesh or
`new_group`, are ordinary groups behind a thin one that records. So all calls are seen, those of FSDP and of DTensor
included, which do not go through the functions of `torch.distributed`. Without `install` torch is as it was.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Backend, ProcessGroup, ProcessGroupGloo, ReduceOp

from rayrl.infra.collective_recorder import CollectiveRecorder

BACKEND = "rayrl_recorded"

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
}
"""Methods of torch's groups, and the collective that each one is. Methods that a version of torch lacks are left out;
point-to-point calls, which need not match in number, are passed on unseen."""

_PASSED_ON = ("send", "recv", "recv_anysource")
_INPUTS_SECOND = ("all_gather", "gather")
_MAY_DIFFER = ("all_to_all", "scatter", "gather", "barrier")


def install(recorder: CollectiveRecorder, device_type: str, name_rank: Callable[[int], str]) -> str:
    """Register the backend for groups of this process and return its name for `init_process_group`.

    Args:
        device_type: `cpu` makes groups of gloo, `cuda` of nccl.
        name_rank: how messages name a rank of the whole group.
    """

    def create(options: Any, _: Any) -> ProcessGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return RecordedProcessGroup(options, recorder, device_type, [name_rank(rank) for rank in ranks])

    Backend.register_backend(BACKEND, create, extended_api=True, devices=[device_type])
    return BACKEND


class RecordedProcessGroup(ProcessGroup):
    """A group of gloo or nccl whose calls are noted; made by torch."""

    def __init__(self, options: Any, recorder: CollectiveRecorder, device_type: str, members: Sequence[str]) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor for groups written in Python
        self._recorder = recorder
        self._members = tuple(members)
        self._place_in_group = rank
        self._group_name = str(options.group_id)
        self._shown = "train" if len(members) == size and self._group_name in ("0", "default_pg") else self._group_name
        self._description = ""
        self._device = torch.device(device_type)
        kind = ProcessGroup.BackendType.GLOO if device_type == "cpu" else ProcessGroup.BackendType.NCCL
        self._inner = ProcessGroup(options.store, rank, size)
        self._inner._set_default_backend(kind)
        self._backend: Any = _make_backend(options, device_type)
        self._inner._register_backend(self._device, kind, self._backend)

    def note(self, operation: str, arguments: Sequence[Any]) -> None:
        """Record a call of this group."""
        tensors = _tensors(operation, arguments)
        self._recorder.note(
            operation,
            group=self._shown,
            rank=self._place_in_group,
            members=self._members,
            shape="" if operation in _MAY_DIFFER else " ".join(str(list(tensor.shape)) for tensor in tensors[:3]),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            reduction=_reduction(operation, arguments),
        )

    def getBackendName(self) -> str:  # noqa: N802  # the name that torch calls
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend

    def _set_group_name(self, name: Any) -> None:
        self._group_name = str(name)
        self._inner._set_group_name(name)

    @property
    def group_name(self) -> Any:
        return self._group_name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc
        if desc.startswith("mesh_"):
            self._shown = f"{desc.removeprefix('mesh_')}/{self._group_name}"

    @property
    def group_desc(self) -> str:
        return self._description

    def set_timeout(self, timeout: Any) -> None:
        self._inner.set_timeout(timeout)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()


def _make_backend(options: Any, device_type: str) -> Any:
    if device_type == "cpu":
        return ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    from torch.distributed import ProcessGroupNCCL  # only in builds with CUDA

    settings = ProcessGroupNCCL.Options()
    settings._timeout = options.timeout
    return ProcessGroupNCCL(options.store, options.group_rank, options.group_size, settings)


def _noted(method: str, operation: str) -> Callable[..., Any]:
    def call(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Any:
        self.note(operation, (*arguments, *options.values()))
        return getattr(self._inner, method)(*arguments, **options)

    call.__name__ = method
    return call


def _passed_on(method: str) -> Callable[..., Any]:
    def call(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Any:
        return getattr(self._inner, method)(*arguments, **options)

    call.__name__ = method
    return call


for _method, _operation in _NAMES.items():
    if hasattr(ProcessGroup, _method):
        setattr(RecordedProcessGroup, _method, _noted(_method, _operation))
for _method in _PASSED_ON:
    setattr(RecordedProcessGroup, _method, _passed_on(_method))


def _tensors(operation: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of a call that must be alike on all ranks: inputs of gathers, outputs of scatters."""
    given = [argument for argument in arguments[:2] if isinstance(argument, Tensor | list | tuple)]
    if not given:
        return []
    chosen = given[-1] if operation in _INPUTS_SECOND else given[0]
    return _flat(chosen)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)]


def _reduction(operation: str, arguments: Sequence[Any]) -> str:
    """Return the reduction, or the source rank, of a call; from its options, or given directly."""
    for argument in arguments:
        if hasattr(argument, "reduceOp"):
            return _reduction_name(argument.reduceOp)
        if isinstance(argument, ReduceOp):
            return _reduction_name(argument)
        if hasattr(argument, "rootRank"):
            return f"from {argument.rootRank}"
    return ""


def _reduction_name(operation: Any) -> str:
    """Return `sum`, `avg`, ... of a reduction, which torch gives as an enum or as an object around one."""
    kind = operation.op if hasattr(operation, "op") else operation
    return str(kind).rpartition(".")[2].lower()
