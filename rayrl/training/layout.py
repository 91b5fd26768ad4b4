"""Where a rank stands in the device mesh, and the groups and meshes that the parts of an engine use.

    rank = ((((replicate * expert_data + ..) * expert + ..) * context + ..) * tensor + ..)      tensor varies fastest

    replicate  expert_data  expert  context  tensor      axes of the root mesh
               └───── data ──────┘                       data = expert_data x expert
    └──────── batch ─────────────┘                       ranks with trajectories of their own
               └────────── shard ────────┘               parameters are sharded over it, copies over `replicate`
               └ expert_shard ┘ + context                the parameters of experts are sharded over it

Ranks that differ in `context` or `tensor` only compute the same micro-batches and the same loss.
"""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rayrl.config.training import ParallelConfig
from rayrl.errors import EngineError

AXES = ("replicate", "expert_data", "expert", "context", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The place of this rank. `root` is None for one rank, which has no process group."""

    parallel: ParallelConfig
    rank: int
    root: DeviceMesh | None = None
    shard_mesh: DeviceMesh | None = None
    """One axis, or two with `replicate` before it: what `fully_shard` takes."""
    expert_shard_mesh: DeviceMesh | None = None
    """The same for the parameters of experts."""
    batch_mesh: DeviceMesh | None = None
    """One axis: the ranks with trajectories of their own."""

    @property
    def batch_rank(self) -> int:
        """Number of this rank's share of the trajectories."""
        return self.rank // (self.parallel.context * self.parallel.tensor)

    def axis(self, name: str) -> DeviceMesh | None:
        """Return the mesh of one axis; None if it has one rank."""
        if self.root is None:
            return None
        mesh = self.root[name]
        return mesh if mesh.size() > 1 else None

    def experts_mesh(self) -> DeviceMesh | None:
        """Return the axes that experts are spread (`expert`) and split (`tensor`) over; None if there are none."""
        degrees = {"expert": self.parallel.expert, "tensor": self.parallel.expert_tensor}
        names = tuple(name for name, degree in degrees.items() if degree > 1)
        return self.root[names] if self.root is not None and names else None

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the process group of an axis; None if it has one rank."""
        mesh = self.axis(name)
        return None if mesh is None else mesh.get_group()

    def sum_over_batch(self, values: Tensor) -> None:
        """Add up a tensor over the ranks with trajectories of their own, in place."""
        if self.batch_mesh is not None and self.batch_mesh.size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.batch_mesh.get_group())

    def max_over_batch(self, values: Tensor) -> None:
        """Take the maximum over the same ranks, in place; nothing for an empty tensor."""
        if values.numel() and self.batch_mesh is not None and self.batch_mesh.size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.batch_mesh.get_group())


def make_layout(device: torch.device, parallel: ParallelConfig, rank: int, world_size: int) -> Layout:
    """Return the layout of a rank, on the default process group. EngineError if the axes do not multiply to its size.

    Collective: every rank calls it.
    """
    if parallel.world_size != world_size:
        raise EngineError(
            f"training.parallel makes {parallel.world_size} workers (replicate {parallel.replicate} x data "
            f"{parallel.data} x context {parallel.context} x tensor {parallel.tensor}), but the training group has "
            f"{world_size}; change one of them"
        )
    if world_size == 1:
        return Layout(parallel=parallel, rank=rank)
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        raise EngineError(f"{world_size} training ranks (training.parallel) need a process group of that size")
    sizes = (
        parallel.replicate,
        parallel.data // parallel.expert,
        parallel.expert,
        parallel.context,
        parallel.tensor,
    )
    root = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    batch = root["replicate", "expert_data", "expert"]._flatten("batch")
    root["expert_data", "expert"]._flatten("data")
    shard = root["expert_data", "expert", "context"]._flatten("shard")
    expert_shard = root["expert_data", "context"]._flatten("expert_shard")
    return Layout(
        parallel=parallel,
        rank=rank,
        root=root,
        shard_mesh=_with_copies(root, shard, "shard"),
        expert_shard_mesh=_with_copies(root, expert_shard, "expert_shard"),
        batch_mesh=batch,
    )


def _with_copies(root: DeviceMesh, mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a flattened axis, behind `replicate` if that has more than one rank."""
    if root["replicate"].size() == 1:
        return mesh
    with warnings.catch_warnings():
        # There is no other public way to put a flattened axis beside another, as of torch 2.13.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return root["replicate", name]
