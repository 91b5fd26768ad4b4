"""A linear recurrence from the last token to the first, in log2(T) steps on the device instead of T."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def reverse_recurrence(inputs: Tensor, decay: Tensor) -> Tensor:
    """Return y [N, T] with `y_t = inputs_t + decay_t * y_{t+1}` and `y_T = 0`.

    Pairs (decay, input) of neighbouring stretches combine to one pair, so that the stretches double in each round
    (Hillis and Steele 1986); no division, hence stable for any decay in [0, 1].

    Args:
        inputs, decay: [N, T].

    A NaN reaches every earlier token of its row.
    """
    num_tokens = inputs.shape[-1]
    step = 1
    while step < num_tokens:
        inputs = inputs + decay * shift_left(inputs, step)
        decay = decay * shift_left(decay, step)
        step *= 2
    return inputs


def shift_left(values: Tensor, step: int = 1) -> Tensor:
    """Return `values[:, t + step]` at t, 0 past the end."""
    return pad(values[..., step:], (0, min(step, values.shape[-1])))


def skip_masked(factor: float, mask: Tensor, like: Tensor) -> Tensor:
    """Return the decay of a recurrence that passes masked tokens unchanged: `factor` where live, 1 elsewhere."""
    return torch.where(mask, torch.full_like(like, factor), 1.0)
