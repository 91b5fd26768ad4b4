"""What lies under a mask contributes to nothing: the two selections that every algorithm starts with."""

import torch
from torch import Tensor


def as_bool(mask: Tensor) -> Tensor:
    """Return the mask as bool; any number but 0 counts as 1."""
    return mask if mask.dtype == torch.bool else mask != 0


def live(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where the mask is set and 0 elsewhere, in float32 or better.

    Selecting before any arithmetic (not multiplying after it) keeps NaN and inf under the mask out of the result
    and out of the gradient: the derivative of `0 * exp(nan)` is NaN, the one of `exp(where(mask, nan, 0))` is 0.

    Args:
        values: any shape that broadcasts against the mask; integers and half floats become float32.
        mask: bool, from `as_bool`.
    """
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    return torch.where(mask, values, 0.0)


def live_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages as [N, T] without gradient, 0 where the mask is 0.

    Args:
        advantages: [N, T], or [N, 1] for one advantage per trajectory.
        mask: [N, T] bool.

    Raises:
        ValueError: the shape is neither; [N] is refused because it would broadcast along T when N equals T.
    """
    if advantages.dim() != 2 or advantages.shape[0] != mask.shape[0] or advantages.shape[1] not in (1, mask.shape[1]):
        raise ValueError(
            f"advantages: shape {tuple(advantages.shape)} does not fit a loss mask of shape {tuple(mask.shape)}; "
            "give [N, T], or [N, 1] for one advantage per trajectory (advantages.unsqueeze(1))"
        )
    return live(advantages.detach(), mask)


def safe_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of `values` over the mask, and 0 where the mask is empty.

    Args:
        values: as returned by `live`: 0 where the mask is 0.
        mask: bool, the same shape.
        dim: reduce over this dimension and keep it with size 1; None reduces all to a scalar.
    """
    if dim is None:
        return values.sum() / mask.sum().clamp(min=1)
    return values.sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)
