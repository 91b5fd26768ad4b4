"""Everything that a training engine must write down to go on bit-equal, through torch's distributed checkpoint.

Weights and moments are stored by name and as a whole, so that another number of ranks can read them. Random state is
stored per rank, and restored only where the rank existed.

A save has two parts: the copy, for which training waits, and the write, which may run in another thread.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rayrl.errors import CheckpointError
from rayrl.training.state_planners import LoadPlanner, SavePlanner

_MOMENTS = ("exp_avg", "exp_avg_sq")
_REFERENCE = "reference."


class StateSaver:
    """Saves of one engine; at most one is under way."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def begin(
        self,
        folder: Path,
        weights: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        steps: int,
        reference: dict[str, nn.Parameter] | None = None,
    ) -> Callable[[], None]:
        """Copy weights, moments, counts and random state to the host, and return what writes the copy to `folder`.

        Every rank calls both. The second may run in a thread, and raises CheckpointError with the cause.

        Args:
            reference: weights of a reference policy that is not the one of the model folder.
        """
        state = _tensors(weights, optimizer) | random_state() | {"optimizer_steps": torch.tensor(steps)}
        return self.begin_tensors(folder, state | _reference_tensors(reference))

    def begin_tensors(self, folder: Path, state: dict[str, Tensor]) -> Callable[[], None]:
        """As `begin`, for tensors that are named already."""
        if dist.is_initialized() and self._group is None:
            # Of its own: collectives of a write that runs beside training must not come between those of a step.
            self._group = dist.new_group(backend="gloo")
        # One copy for each save, let go with it: a kept one would double the memory for the whole run.
        copy: dict[str, Tensor] = StateDictStager().stage(state)
        return lambda: _write(folder, copy, self._group)


def save_state(folder: Path, weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Write weights, moments, counts and random state; every rank calls it with the same folder."""
    StateSaver().begin(folder, weights, optimizer, steps)()


def _write(folder: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _without_hint():
            save(state, checkpoint_id=str(folder), planner=SavePlanner(), process_group=group, no_dist=group is None)
    except (CheckpointException, RuntimeError, OSError) as error:
        text = f"cannot write the training state to {str(folder)!r}: {_cause(error)}"
        raise CheckpointError(text + _shortage(folder, state)) from error


def _shortage(folder: Path, state: dict[str, Tensor]) -> str:
    """Return a remark if the disk looks full: torch's writer tells that as an unexpected position in its file."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if free >= needed:
        return ""
    return (
        f"; the disk may be full: {free / 1e6:.1f} MB are free, the state has {needed / 1e6:.1f} MB; make room, then "
        "go on from the last complete checkpoint with --resume auto"
    )


def _cause(error: BaseException) -> str:
    """Return the first line of what went wrong; of a failure on several ranks, of the first rank that has one."""
    if isinstance(error, CheckpointException):
        failures = sorted(error.failures.items())
        if failures:
            rank, (cause, _) = failures[0]
            return f"rank {rank}: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def load_state(
    folder: Path,
    weights: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    reference: dict[str, nn.Parameter] | None = None,
) -> int:
    """Fill weights, moments and random state in place, and return the count of optimizer steps.

    Those of a reference policy are filled if they are given; then the state must have them (`holds_reference`).
    CheckpointError if the folder is incomplete or belongs to another model.
    """
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{str(folder)!r} holds no complete training state; choose another checkpoint")
    known = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    state = _tensors(weights, optimizer) | {"optimizer_steps": torch.tensor(0)} | _reference_tensors(reference)
    missing = sorted(name for name in state if name not in known)
    foreign = sorted(name for name in known if name not in state and not name.startswith(("random.", _REFERENCE)))
    if missing or foreign:
        raise CheckpointError(
            f"{str(folder)!r} is of another model: it lacks {missing[:3] or 'nothing'} "
            f"and has {foreign[:3] or 'nothing'} besides; set model.path to the model of the run"
        )
    state |= {name: value for name, value in random_state().items() if name in known}
    try:
        with _without_hint():
            load(state, checkpoint_id=str(folder), planner=LoadPlanner(), no_dist=not dist.is_initialized())
    except (CheckpointException, ValueError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {_cause(error)}") from error
    restore_random_state(state)
    return int(state["optimizer_steps"])


def holds_reference(folder: Path) -> bool:
    """Return whether a training state has a reference policy of its own, one that was refreshed."""
    if not (folder / ".metadata").is_file():
        return False
    known = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return any(name.startswith(_REFERENCE) for name in known)


@contextmanager
def _without_hint() -> Iterator[None]:
    """Silence the hint of torch that one process saves on its own: that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reference_tensors(reference: dict[str, nn.Parameter] | None) -> dict[str, Tensor]:
    return {f"{_REFERENCE}{name}": weight.detach() for name, weight in (reference or {}).items()}


def _tensors(weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights and moments by name, as the tensors in use; moments of a fresh optimizer are made here."""
    state: dict[str, Tensor] = {f"weight.{name}": parameter.detach() for name, parameter in weights.items()}
    for name, parameter in weights.items():
        if not parameter.requires_grad:
            continue
        of_parameter: dict[str, Any] = optimizer.state[parameter]
        if not of_parameter:
            of_parameter["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            of_parameter |= {moment: torch.zeros_like(parameter.detach()) for moment in _MOMENTS}
        state[f"step.{name}"] = of_parameter["step"]
        state |= {f"{moment}.{name}": of_parameter[moment] for moment in _MOMENTS}
    return state


def random_state() -> dict[str, Tensor]:
    """Return the state of this rank's generators, by names that hold the rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    """Set the generators of this rank to what `random_state` returned; nothing where the rank is not in it."""
    for name, value in state.items():
        if name.startswith("random.cpu."):
            torch.set_rng_state(value)
        elif name.startswith("random.cuda."):
            torch.cuda.set_rng_state(value)
