"""Whitening over a mask: mean 0 and variance 1 of the live values."""

import torch
from torch import Tensor

from rayrl.algorithms.masking import as_bool, live, safe_mean


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps)` [N, T], 0 where the mask is 0.

    Mean and Bessel-corrected variance are over the live values of the whole tensor: give the whole batch. A single
    live value, equal live values and an empty mask give exactly 0.

    Args:
        values: [N, T], or any shape.
        mask: int or bool, the same shape.

    NaN in a live position makes all NaN.
    """
    selected = as_bool(mask)
    known = live(values, selected)
    if known.numel() == 0:
        return known
    deviations = torch.where(selected, known - safe_mean(known, selected), 0.0)
    variance = (deviations**2).sum() / (selected.sum() - 1).clamp(min=1)
    # Compared on the values: the deviations of equal floats can be 1e-8, which sqrt(eps) does not make small.
    differs = known.masked_fill(~selected, torch.inf).min() != known.masked_fill(~selected, -torch.inf).max()
    return torch.where(selected & differs, deviations * torch.rsqrt(variance + eps), 0.0)
