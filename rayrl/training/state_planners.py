"""Plans of saves and loads in which the halves of split experts (`expert_halves`) are rows of the whole weight.

The planners of torch write and read one piece of a sharded tensor. A rank has two of a halved one: they are stored as
what they are of `[experts, 2 x width, hidden]`, so that states do not tell in which layout they were written.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rayrl.training.expert_halves import half_regions, is_halved, whole_shape
from rayrl.training.gradients import local
from rayrl.training.sharded_load import own_region


class SavePlanner(DefaultSavePlanner):
    """As that of torch, with the halves of experts one by one."""

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        plan = super().create_local_plan()
        halved = _halved(self.state_dict)
        items = [item for item in plan.items if item.index.fqn not in halved]
        for name, tensor in halved.items():
            items += [_write_item(name, tensor, chunk) for chunk in _chunks(tensor)]
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor of a piece."""
        half = _half_at(self.state_dict, index)
        return super().lookup_object(index) if half is None else half.contiguous()


class LoadPlanner(DefaultLoadPlanner):
    """As that of torch for a state without nesting, with the halves of experts one by one."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads. ValueError if a weight has another shape than the stored one."""
        assert self.metadata is not None, "the planner is set up first"
        halved = _halved(self.state_dict)
        others = {name: value for name, value in self.state_dict.items() if name not in halved}
        items = create_default_local_load_plan(others, self.metadata).items
        for name, tensor in halved.items():
            stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[name])
            if tuple(stored.size) != whole_shape(name, tensor):
                raise ValueError(f"{name} has shape {tuple(stored.size)}, the model {whole_shape(name, tensor)}")
            items += create_read_items_for_chunk_list(name, stored, _chunks(tensor))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the memory that a piece is read into."""
        half = _half_at(self.state_dict, index)
        return super().lookup_tensor(index) if half is None else half


def _halved(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and is_halved(name, value)}


def _chunks(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """Return where the two halves of this rank lie in the whole weight."""
    return [
        ChunkStorageMetadata(
            offsets=torch.Size(part.start for part in region),
            sizes=torch.Size(part.stop - part.start for part in region),
        )
        for region in half_regions(tuple(tensor.shape), own_region(tensor))
    ]


def _write_item(name: str, tensor: Tensor, chunk: ChunkStorageMetadata) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(local(tensor)),
            size=torch.Size(whole_shape(name, tensor)),
        ),
    )


def _half_at(state: dict[str, Any], index: MetadataIndex) -> Tensor | None:
    """Return the half that starts at an offset of the whole weight; None for a weight that is not halved."""
    value = state.get(index.fqn)
    if not isinstance(value, Tensor) or not is_halved(index.fqn, value):
        return None
    assert index.offset is not None, "pieces are found by where they start"
    return local(value)[:, index.offset[1] // value.shape[2]]
