"""Two areas of host memory for weights: one holds those in use, in the other the next version arrives.

    reserve ──> the free area, filled by whoever transfers ──adopt──> in use; the area before is free from now on

So new weights are in use without a copy, and after two versions no page is made any more.
"""

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor


class StagingMemory:
    """Owns both areas. Not thread-safe: its caller orders `reserve` and `adopt`."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        self._used = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> Tensor:
        """Return the free area, uint8, of at least `num_bytes`; it keeps its bytes until it has to grow."""
        if self._free.numel() < num_bytes:
            self._free = torch.empty(0, dtype=torch.uint8)
            self._free = make_memory(num_bytes)
        return self._free

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all tensors with elements lie in the free area."""
        start = self._free.data_ptr()
        end = start + self._free.numel()
        return all(
            tensor.device.type == "cpu" and start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end
            for tensor in tensors
            if tensor.numel()
        )

    def adopt(self) -> None:
        """The free area is in use from now on, the other one free."""
        self._free, self._used = self._used, self._free


def make_memory(num_bytes: int) -> Tensor:
    """Return that many bytes, uint8, in large pages where the system has them: first touches cost less by far."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes)
    use_large_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def use_large_pages(memory: mmap.mmap) -> None:
    """Ask for large pages; a system without them goes on with small ones."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        return
