"""Which tensor holds NaN or inf where it counts: cheap on the device, named when it is read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool


def nonfinite_report(loss_mask: Tensor | None = None, **tensors: Tensor | None) -> dict[str, Tensor]:
    """Return for each named tensor the number of its NaN and inf entries, as a 0-dim int64 tensor on its device.

    Nothing is transferred: add the counts up over micro-batches, and read them once per step.

    Args:
        loss_mask: [N, T] int or bool: entries of [N, T] and [N, 1] tensors count only where it is set (for [N, 1]:
            where the row has a live token). None, and tensors of other shapes: every entry counts.
        tensors: by the name to report; None is left out.
    """
    counts = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        bad = ~torch.isfinite(tensor.detach())
        if loss_mask is not None and bad.dim() == 2 and bad.shape[0] == loss_mask.shape[0]:
            mask = as_bool(loss_mask)
            if bad.shape == mask.shape:
                bad = bad & mask
            elif bad.shape[1] == 1:
                bad = bad & mask.any(-1, keepdim=True)
        counts[name] = bad.sum()
    return counts


def describe_nonfinite(counts: Mapping[str, Tensor | int]) -> str:
    """Return `advantages: 3 non-finite, logprobs: 1 non-finite`, or the empty string. Waits for the device."""
    found = {name: int(count) for name, count in counts.items()}
    return ", ".join(f"{name}: {count} non-finite" for name, count in found.items() if count)
