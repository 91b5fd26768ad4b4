"""Context parallelism by all-to-all over heads (Ulysses; Jacobs et al. 2023, arXiv:2309.14509).

Each of the c context ranks holds L / c neighbouring tokens of every row. Around attention, and only there, tokens and
heads change places:

    [B, H, L / c, D]  ─exchange─>  [B, H / c, L, D]  ─attention over whole rows─>  ─exchange─>  [B, L / c, H, D]

so that the attention of one rank is the attention of a rank that has all tokens and fewer heads; masks are those of
whole rows. A prediction is made where its source token is, by the token that is asked for (no neighbour is needed at
the edge of a part); logprobs are then added up over the context ranks, which compute the same loss. Each rank carries
back the part of its own predictions, and `fully_shard` adds these up as it does for data ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayrl.training import attention
from rayrl.training.collate import MicroBatch
from rayrl.training.collectives import exchange, sum_partials

_numbers = count()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextShard:
    """What one context rank has of a micro-batch whose rows have L tokens."""

    input_ids: Tensor
    """[R, L / c]"""
    position_ids: Tensor
    """[R, L / c]"""
    sources: Tensor
    """[K'] indices into the flattened own part of the tokens that predict."""
    predictions: Tensor
    """[K'] which of the K predictions of the micro-batch these are."""
    num_predictions: int
    """K"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextParallel:
    """The context ranks of an engine."""

    group: dist.ProcessGroup

    def shard(self, micro: MicroBatch) -> ContextShard:
        """Return the part of this rank; the length of the rows must be a multiple of the ranks."""
        length, size = micro.input_ids.shape[1], self.group.size()
        assert length % size == 0, "rows are padded to a multiple of the context ranks"
        width = length // size
        start = self.group.rank() * width
        rows, columns = micro.sources // length, micro.sources % length - start
        mine = torch.nonzero((columns >= 0) & (columns < width)).squeeze(1)
        return ContextShard(
            input_ids=micro.input_ids[:, start : start + width].contiguous(),
            position_ids=micro.position_ids[:, start : start + width].contiguous(),
            sources=(rows * width + columns)[mine],
            predictions=mine,
            num_predictions=micro.sources.numel(),
        )

    def join(self, values: Tensor, shard: ContextShard) -> Tensor:
        """Return [K] the values of all predictions, given [K'] those of this rank."""
        spread = values.new_zeros(shard.num_predictions).index_put((shard.predictions,), values)
        return sum_partials(spread, self.group)

    def register_attention(self, kernel: str) -> str:
        """Make an attention that exchanges heads around `kernel` known to transformers, and return its name."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        # The group is part of it, so each engine has one of its own.
        name = f"{attention.NAME}_context_{next(_numbers)}"
        inner: Any = attention.attention if kernel == attention.NAME else AttentionInterface()[kernel]
        AttentionInterface.register(name, _HeadExchange(self.group, inner))
        AttentionMaskInterface.register(name, sdpa_mask)
        return name


class _HeadExchange:
    """Attention over whole rows with a share of the heads; called by transformers with the tokens of one rank."""

    def __init__(self, group: dist.ProcessGroup, kernel: Callable[..., tuple[Tensor, Any]]) -> None:
        self._group, self._kernel = group, kernel

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        length = query.shape[2] * self._group.size()
        if mask is not None and mask.shape[-1] != length:
            mask = None  # made by transformers for the tokens of this rank alone
        window = options.get("sliding_window")
        if mask is None and window is not None and window < length:
            mask = _window_mask(length, window, query.device)
        whole = [self._to_heads(states) for states in (query, key, value)]
        output, _ = self._kernel(module, *whole, mask, **options)
        return self._to_tokens(output), None

    def _to_heads(self, states: Tensor) -> Tensor:
        """[B, H, L / c, D] to [B, H / c, L, D]."""
        batch, heads, width, size = states.shape
        ranks = self._group.size()
        parts = states.view(batch, ranks, heads // ranks, width, size).transpose(0, 1)
        received = exchange(parts.contiguous(), self._group)  # [c, B, H / c, L / c, D], by the rank of the tokens
        return received.permute(1, 2, 0, 3, 4).reshape(batch, heads // ranks, ranks * width, size)

    def _to_tokens(self, states: Tensor) -> Tensor:
        """[B, L, H / c, D] to [B, L / c, H, D]."""
        batch, length, heads, size = states.shape
        ranks = self._group.size()
        parts = states.reshape(batch, ranks, length // ranks, heads, size).transpose(0, 1)
        received = exchange(parts.contiguous(), self._group)  # [c, B, L / c, H / c, D], by the rank of the heads
        return received.permute(1, 2, 0, 3, 4).reshape(batch, length // ranks, ranks * heads, size)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return [1, 1, L, L]: causal, and no further back than the window."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return ((distance >= 0) & (distance < window))[None, None]
