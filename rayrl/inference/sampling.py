"""Sampling one token per row: pure functions of logits, settings and uniforms.

Each row consumes exactly one uniform per step, a hash of its seed and of the position of the new token, so that what
a request gets depends neither on the other rows nor on the order of arrival. Positions count from the start of the
prompt: a request that goes on elsewhere from the tokens that it has continues the same stream.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return [N] numbers in [0, 1), multiples of 2^-24, each a function of its seed and position only.

    Two rounds of SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195): `mix(mix(seed) + position * golden)`.
    """
    hashed = _mix(_mix(seeds) + positions.astype(np.uint64) * _GOLDEN)
    return (hashed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTable:
    """The settings of N rows as tensors; made again only when the rows change."""

    temperature: Tensor
    """[N, 1] float32, 1 for greedy rows."""
    greedy: Tensor
    """[N] bool."""
    any_greedy: bool
    filtered_rows: Tensor
    """[M] int64, the rows with top-k or top-p."""
    top_k: Tensor
    """[M, 1] int64, 0 keeps all."""
    top_p: Tensor
    """[M, 1] float32."""


def sample(scores: Tensor, table: SamplingTable, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return [N] tokens and the [N] natural logs of the probabilities they were sampled with.

        p = softmax(filter(scores / temperature));  token = first i with cdf_i > u * cdf_V

    The logprob is that of p, after temperature, top-k and top-p, renormalised. Greedy rows take the most likely token
    and report its logprob at temperature 1, after the same filters. A row whose scores are NaN or infinite gets a
    logprob that is not finite; an excluded token (score -inf) is never sampled.

    Args:
        scores: [N, V] float32 logits; overwritten.
        table: settings of the N rows.
        uniform: [N] float32 in [0, 1).
    """
    scores.div_(table.temperature)
    if len(table.filtered_rows):
        kept = keep_likely(scores[table.filtered_rows], table.top_k, table.top_p)
        scores[table.filtered_rows] = kept
    # In place: for large vocabularies each copy of [N, V] costs as much as the arithmetic.
    mass = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    tokens, total = _draw(mass, uniform.unsqueeze(1))
    if table.any_greedy:
        tokens = torch.where(table.greedy.unsqueeze(1), mass.argmax(dim=-1, keepdim=True), tokens)
    logprobs = (mass.gather(1, tokens) / total).log()
    return tokens.squeeze(1), logprobs.squeeze(1)


def _draw(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the [N, 1] tokens that the [N, 1] uniforms fall on, and the total masses; first by block, then within.

    A cumulative sum of the whole vocabulary takes about twenty times as long as sums of blocks.
    """
    vocab_size = mass.shape[-1]
    padded = torch.nn.functional.pad(mass, (0, -vocab_size % _BLOCK)) if vocab_size % _BLOCK else mass
    blocks = padded.unflatten(-1, (-1, _BLOCK))
    block_mass = blocks.sum(dim=-1)
    block_cdf = block_mass.cumsum(dim=-1)
    total = block_cdf[:, -1:]
    target = _below(uniform * total, total)
    block = _first_above(block_cdf, target)
    cdf = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1)
    rest = target - (block_cdf.gather(1, block) - block_mass.gather(1, block))
    tokens = block * _BLOCK + _first_above(cdf, _below(rest.clamp_(min=0), cdf[:, -1:]))
    return tokens.clamp_(max=vocab_size - 1), total


def _below(target: Tensor, total: Tensor) -> Tensor:
    # Rounding must not carry the target up to the total: past the last token that has any probability.
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    # The limit is for rows of NaN only.
    return torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)


def keep_likely(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return [M, V] scores with -inf for all but the most likely tokens.

    Top-k comes first; top-p then takes the smallest set of most likely tokens whose mass, among those that top-k left,
    is at least p. The most likely token always stays. Of equal scores the lower ids stay.

    Args:
        scores: [M, V] float32.
        top_k: [M, 1] int64, 0 keeps all.
        top_p: [M, 1] float32, 1 keeps all.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    drop = (mass_before >= top_p) & (top_p < 1) & (rank > 0)
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)
