"""Sequences end to end in one row, without padding, and attention that never crosses from one to another.

    row        [ sequence a | sequence b | sequence c | (padding) ]
    blocks       ── sequences of one length, or one with a mask of its own ──

Attention runs block by block over slices of the row, so that it costs the sum of the squares of the lengths and not the
square of the sum, and what stands in one sequence cannot reach another. On a GPU, in half precision and without masks
of their own, all sequences go through one kernel of variable lengths.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Neighbouring sequences of the same length.

    Example, two sequences of 5 tokens from token 12 of the row on: `Block(start=12, count=2, length=5, mask=None)`.
    """

    start: int
    count: int
    length: int
    mask: Tensor | None
    """[length, length] bool, True where the query (first) sees the key; None: plain causal attention. With a mask
    `count` is 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """The blocks of one row, one after another from its first token on; tokens behind the last one are padding."""

    blocks: tuple[Block, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        last = self.blocks[-1]
        return last.start + last.count * last.length

    @property
    def has_masks(self) -> bool:
        return any(block.mask is not None for block in self.blocks)

    @property
    def longest(self) -> int:
        return max(block.length for block in self.blocks)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """[N + 1] first token of each sequence, then the end of the last one."""
        lengths = chain.from_iterable([block.length] * block.count for block in self.blocks)
        return tuple(accumulate(lengths, initial=0))


class BlockAttention(Protocol):
    """Attention of one block."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return [B, L, H, D] for query [B, H, L, D], key and value [B, H_kv, L, D], and mask [1, 1, L, L] or None."""
        ...


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    attend: BlockAttention,
    **options: Any,
) -> Tensor:
    """Return [1, L, H, D] for query [1, H, L, D], key and value [1, H_kv, L, D]; zeros for padding."""
    window = options.get("sliding_window")
    if _has_varlen_kernel(query, pack, options):
        return _varlen(query, key, value, pack, options.get("scaling"), window)
    outputs = []
    for block in pack.blocks:
        of_block = (_sequences(query, block), _sequences(key, block), _sequences(value, block))
        mask = None if block.mask is None else block.mask[None, None]
        if window is not None and window < block.length:
            near = _window_mask(block.length, window, query.device)
            mask = near if mask is None else mask & near
        output, _ = attend(module, *of_block, mask, **options)
        outputs.append(output.reshape(1, block.count * block.length, *output.shape[2:]))
    return _with_padding(torch.cat(outputs, dim=1), query.shape[2])


def _sequences(states: Tensor, block: Block) -> Tensor:
    """Return the [count, H, length, D] of a block in [1, H, L, D]."""
    _, heads, _, width = states.shape
    part = states[0, :, block.start : block.start + block.count * block.length]
    return part.reshape(heads, block.count, block.length, width).transpose(0, 1)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return [1, 1, L, L]: causal, and no further back than the window."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


def _with_padding(output: Tensor, length: int) -> Tensor:
    missing = length - output.shape[1]
    return output if missing == 0 else nn.functional.pad(output, (0, 0, 0, 0, 0, missing))


def _has_varlen_kernel(query: Tensor, pack: Pack, options: dict[str, Any]) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    plain = not pack.has_masks and not options.get("dropout") and options.get("softcap") is None
    return query.device.type == "cuda" and half and plain


def _varlen(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scaling: float | None, window: int | None) -> Tensor:
    """Flash attention of torch over all sequences at once."""
    from torch.nn.attention.varlen import varlen_attn

    bounds = torch.tensor(pack.bounds, dtype=torch.int32, device=query.device)
    output: Any = varlen_attn(
        query[0, :, : pack.num_tokens].transpose(0, 1),
        key[0, :, : pack.num_tokens].transpose(0, 1),
        value[0, :, : pack.num_tokens].transpose(0, 1),
        bounds,
        bounds,
        pack.longest,
        pack.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    return _with_padding(output[None], query.shape[2])
