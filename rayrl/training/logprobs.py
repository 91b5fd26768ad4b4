"""Logprobs of given tokens, fused with the output head and computed in chunks of tokens.

The logits of all tokens never exist: forward and backward each compute those of one chunk and let them go. The
backward computes them again and forms its two products by hand; against `torch.utils.checkpoint` around
`log_softmax` this saves three passes over the logits, which cost as much as the products on CPU.

With a head that is split over tensor ranks each rank has the logits of its part of the vocabulary. The parts are
joined once for all tokens, by three numbers a token: with Z the normaliser of part r and Z = sum Z_r,

    w_r = Z_r / Z        log p(t) = z_t - log Z        H = sum_r w_r (H_r - log w_r)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """How logits come from the product of hidden states and head, and how they are chunked.

    z = hidden @ weight.T (+ bias);   logits = multiplier * softcap(z) / temperature
    """

    temperature: float
    """The logits are divided by it."""
    multiplier: float = 1.0
    """A constant of the model."""
    softcap: float | None = None
    """z becomes c tanh(z / c), where the model has such a bound c."""
    chunk_tokens: int = 1024
    """Tokens whose logits exist at once."""
    product_dtype: torch.dtype = torch.float32
    """Of the products in the backward. Those of the forward give float32 logits whatever this is."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: HeadSettings,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return float32 log-probabilities [K] of the targets and, if asked for, entropies [K] of the distributions.

    Args:
        hidden: [K, H] hidden states that predict the targets.
        weight: [V, H] of the output head.
        bias: [V], or None.
        targets: [K] int64.
        group: ranks over which the head is split: then `weight` and `bias` are the part of this rank, all parts of
            one size and in the order of the ranks, and everything else is the same on all of them.
    """
    assert hidden.shape[0] == targets.shape[0] and hidden.shape[1] == weight.shape[1], "hidden, head and targets differ"
    logprobs, entropy = _HeadLogprobs.apply(hidden, weight, bias, targets, settings, with_entropy, group)
    return logprobs, entropy if with_entropy else None


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: HeadSettings,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        num = hidden.shape[0]
        targets, foreign = _own_targets(targets, weight.shape[0], group)
        logprobs, norms = hidden.new_empty(num, dtype=torch.float32), hidden.new_empty(num, dtype=torch.float32)
        entropy = hidden.new_zeros(num if with_entropy else 0, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            project = _forward_projection(hidden, weight, settings)
            for part in _chunks(num, settings.chunk_tokens):
                logits = _finish(project(hidden[part]), bias, settings)
                chosen = logits.gather(1, targets[part, None]).squeeze(1)
                highest = logits.amax(dim=-1)
                shifted = logits.sub_(highest[:, None])
                # In place, unlike `logsumexp`: fresh memory costs more than the arithmetic on CPU.
                weighted = None if not with_entropy else shifted.clone()
                exponentials = shifted.exp_()
                total = exponentials.sum(dim=-1)
                norms[part] = total.log() + highest
                logprobs[part] = chosen - norms[part]
                if weighted is not None:
                    entropy[part] = total.log() - weighted.mul_(exponentials).sum(dim=-1) / total
        if group is not None and foreign is not None:
            logprobs, norms, entropy = _join(logprobs, norms, entropy, foreign, group)
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropy, foreign)
        ctx.settings, ctx.with_entropy, ctx.group = settings, with_entropy, group
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, norms, entropy, foreign = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        dtype = settings.product_dtype
        head, inputs = weight.to(dtype), hidden.to(dtype)
        project = _backward_projection(inputs, head, settings)
        grad_hidden = torch.empty_like(hidden)
        # A rank of a context parallel group may have nothing to predict.
        grad_weight = None if hidden.shape[0] else torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in _chunks(hidden.shape[0], settings.chunk_tokens):
            logits = _finish(project(inputs[part]), bias, settings)
            slope = _slope(logits, settings)
            grad = logits.sub_(norms[part, None])
            scale = grad_logprobs[part, None]
            if ctx.with_entropy:
                grad_h = grad_entropy[part, None]
                factor = (grad + entropy[part, None]).mul_(grad_h).add_(scale).neg_()
                grad = grad.exp_().mul_(factor)
            else:
                grad = grad.exp_().mul_(-scale)
            own = scale if foreign is None else scale.masked_fill(foreign[part, None], 0.0)
            grad.scatter_add_(1, targets[part, None], own)
            grad = grad.mul_(slope) if isinstance(slope, Tensor) else grad
            if grad_bias is not None:
                grad_bias += grad.sum(0) * settings.multiplier / settings.temperature
            grad = grad.to(dtype)
            grad_hidden[part] = grad @ head
            update = grad.t() @ inputs[part]
            # Sums of chunks are kept in float32 whatever the products are.
            grad_weight = update.float() if grad_weight is None else grad_weight.add_(update)
        constant = settings.multiplier / settings.temperature
        if constant != 1.0:
            grad_hidden = grad_hidden * constant
            grad_weight = None if grad_weight is None else grad_weight * constant
        assert grad_weight is not None, "there is a chunk, or the gradient was set to zeros"
        if ctx.group is not None:
            dist.all_reduce(grad_hidden, op=dist.ReduceOp.SUM, group=ctx.group)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _own_targets(targets: Tensor, num_rows: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | None]:
    """Return targets as rows of this rank's part of the head, 0 for those of other ranks, and which those are."""
    if group is None:
        return targets, None
    rows = targets - group.rank() * num_rows
    foreign = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill(foreign, 0), foreign


def _join(
    logprobs: Tensor, norms: Tensor, entropy: Tensor, foreign: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs, normalisers and entropies over the whole vocabulary, from those over the parts of the ranks."""
    chosen = (logprobs + norms).masked_fill(foreign, 0.0)
    own = torch.stack([norms, chosen, *([entropy] if entropy.numel() else [])])
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    all_parts = torch.stack(parts)
    total = torch.logsumexp(all_parts[:, 0], dim=0)
    if entropy.numel():
        log_shares = all_parts[:, 0] - total
        entropy = (log_shares.exp() * (all_parts[:, 2] - log_shares)).sum(dim=0)
    return all_parts[:, 1].sum(dim=0) - total, total, entropy


def _chunks(num: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def _forward_projection(hidden: Tensor, weight: Tensor, settings: HeadSettings) -> Callable[[Tensor], Tensor]:
    """Return the product with the head in float32: logits of 20 in bfloat16 would be off by up to 0.06.

    Each product overwrites the one before.
    """
    num = min(hidden.shape[0], settings.chunk_tokens)
    buffer = hidden.new_empty(num, weight.shape[0], dtype=torch.float32)
    if settings.product_dtype == torch.float32 or hidden.device.type == "cpu":
        head = weight.float().t()
        return lambda states: torch.mm(states.float(), head, out=buffer[: states.shape[0]])
    head = weight.to(settings.product_dtype).t()
    return lambda states: torch.mm(
        states.to(settings.product_dtype), head, out_dtype=torch.float32, out=buffer[: states.shape[0]]
    )


def _backward_projection(inputs: Tensor, head: Tensor, settings: HeadSettings) -> Callable[[Tensor], Tensor]:
    """Return the product with the head in its data type, cast to float32; each overwrites the one before."""
    num = min(inputs.shape[0], settings.chunk_tokens)
    product = inputs.new_empty(num, head.shape[0])
    buffer = product if product.dtype == torch.float32 else torch.empty_like(product, dtype=torch.float32)

    def project(states: Tensor) -> Tensor:
        torch.mm(states, head.t(), out=product[: states.shape[0]])
        logits = buffer[: states.shape[0]]
        return logits if buffer is product else logits.copy_(product[: states.shape[0]])

    return project


def _finish(product: Tensor, bias: Tensor | None, settings: HeadSettings) -> Tensor:
    """Return float32 logits; the product is used up."""
    if bias is not None:
        product.add_(bias.float())
    if settings.softcap is not None:
        product.div_(settings.softcap).tanh_().mul_(settings.softcap)
    constant = settings.multiplier / settings.temperature
    return product if constant == 1.0 else product.mul_(constant)


def _slope(logits: Tensor, settings: HeadSettings) -> Tensor | None:
    """Return the derivative of the bound on the logits; None if there is none."""
    if settings.softcap is None:
        return None
    constant = settings.multiplier / settings.temperature
    return 1 - (logits / (constant * settings.softcap)) ** 2
