"""The entropy of the next-token distribution."""

import torch
from torch import Tensor


def token_entropy(logits: Tensor) -> Tensor:
    """Return `-sum_v p_v log p_v` in nats [...] of logits [..., V], in float32 or better, with gradient.

    A logit of -inf (a forbidden token) counts 0. A row of NaN gives NaN. Materialises [..., V]: give it a chunk.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=-1)
    # 0 * -inf is NaN, in the value and in the gradient; the selection stands before the product.
    finite = torch.where(logprobs == -torch.inf, 0.0, logprobs)
    return -(logprobs.exp() * finite).sum(-1)
