"""From per-token losses to one number, with denominators that micro-batches and ranks can share.

Sources: sequence mean of token means is GRPO (arXiv:2402.03300), token mean DAPO (arXiv:2503.14476), the constant
length Dr. GRPO (arXiv:2503.20783).
"""

from typing import Literal

from torch import Tensor

from rayrl.algorithms.masking import as_bool, live, safe_mean

AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def loss_denominator(loss_mask: Tensor, mode: AggregationMode = "token_mean") -> Tensor:
    """Return what `aggregate_loss` divides by: live tokens for `token_mean`, else trajectories with a live token.

    A 0-dim float tensor. The sum of it over all micro-batches and ranks is the `denominator` to give to each call.
    """
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    mask = as_bool(loss_mask)
    return (mask.sum() if mode == "token_mean" else mask.any(-1).sum()).float()


def aggregate_loss(
    token_losses: Tensor,
    loss_mask: Tensor,
    mode: AggregationMode = "token_mean",
    max_tokens: int | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Return a 0-dim loss.

        token_mean               sum over live tokens / number of live tokens
        seq_mean_token_mean      sum over trajectories of their token mean / S
        seq_mean_token_sum       sum over trajectories of their token sum / S
        seq_mean_token_sum_norm  the same, also / max_tokens

    S is the number of trajectories with a live token: one without live tokens counts nowhere. An empty mask gives 0,
    still connected to the graph, so that an empty micro-batch runs its backward.

    Args:
        token_losses: [N, T]; what lies under the mask is ignored.
        loss_mask: [N, T] int or bool.
        max_tokens: the constant length of `seq_mean_token_sum_norm`, which needs it.
        denominator: replaces the number of live tokens, or S, by the one of the whole batch over all micro-batches
            and ranks (see `loss_denominator`); the results of the parts then add up to the loss of the whole.
    """
    mask = as_bool(loss_mask)
    losses = live(token_losses, mask)
    count = loss_denominator(mask, mode) if denominator is None else denominator
    count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    if mode == "seq_mean_token_mean":
        losses = safe_mean(losses, mask, dim=-1)
    elif mode == "seq_mean_token_sum_norm":
        if max_tokens is None or max_tokens < 1:
            raise ValueError(f"max_tokens: {max_tokens} given; mode seq_mean_token_sum_norm needs a positive number")
        losses = losses / max_tokens
    return losses.sum() / count
