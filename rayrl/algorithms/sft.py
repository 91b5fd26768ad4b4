"""Supervised fine-tuning: the negative log-likelihood of the tokens that carry loss."""

from torch import Tensor

from rayrl.algorithms.masking import as_bool, live


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return `-log pi(token)` per token [N, T], 0 where the mask is 0.

    Args:
        logprobs: [N, T] of the target tokens.
        loss_mask: [N, T] int or bool: 1 for the tokens to learn.
    """
    return -live(logprobs, as_bool(loss_mask))
