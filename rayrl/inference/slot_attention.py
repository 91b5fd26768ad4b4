"""Attention of one forward pass over the slots, called by transformers' models in place of their own.

A pass has all its tokens in one flat row: first one token for each running sequence, then the new prompts, one after
the other. Nothing is padded, and linear layers see one matrix:

    tokens   [ a b c | p0 p1 p2 p3 | q0 q1 ]     a, b, c: newest token of rows 0, 1, 2
              decode    prompt        prompt     p: prompt of the group whose first row is 3, ...

Decode tokens attend to their slot; each prompt attends causally to itself only. A layer may bound both how far back
tokens look (sliding windows) and how large scores get.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rayrl.errors import EngineError
from rayrl.inference.slot_cache import SlotCache

ATTENTION_NAME = "rayrl_slots"
"""Name under which the function below is known to transformers."""
_UNSUPPORTED = ("s_aux", "position_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a layer bounds. Score s of a query and a key: scaling * (q . k), then softcap * tanh(s / softcap)."""

    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None: all before it."""
    softcap: float | None = None
    """No score is larger in absolute terms; None: no such bound."""


class Attend(Protocol):
    """What a forward pass does with queries, keys and values of one layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, bounds: Bounds) -> Tensor:
        """Take [1, heads, T, D] and return [1, T, heads, D]."""
        ...


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function in transformers' calling convention; `attend` comes through the model's arguments."""
    used = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if used or attend is None:
        raise EngineError(
            f"the embedded engine cannot run this model: its attention uses {', '.join(used) or 'no extra arguments'}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bounds = Bounds(window=options.get("sliding_window"), softcap=options.get("softcap"))
    return attend(module.layer_idx, query, key, value, scale, bounds), None


def register_slot_attention() -> None:
    """Make `rayrl_slots` known to transformers; again and again if need be."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slot_attention)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, bounds: Bounds) -> Tensor:
    """Attention of one sequence with itself: [1, heads, T, D] to [1, T, heads, D], kv heads shared by query heads."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    has_window = bounds.window is not None and bounds.window < length
    if not has_window and bounds.softcap is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling).transpose(1, 2)
    position = torch.arange(length, device=query.device)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0
    if bounds.window is not None:
        hidden |= distance >= bounds.window
    scores = _capped(torch.matmul(query, key.transpose(2, 3)) * scaling, bounds.softcap)
    weights = scores.masked_fill(hidden, -torch.inf).float().softmax(dim=-1).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


class ShapeProbe:
    """Records what a model asks of its cache, in place of a real pass."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        """kv heads, key dim and value dim by layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, bounds: Bounds) -> Tensor:
        """Attend to the tokens of this pass."""
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return causal_attention(query, key, value, scaling, bounds)


@dataclass(slots=True, kw_only=True)
class SlotPass:
    """Where the tokens of one forward pass are, and how they attend."""

    cache: SlotCache
    slots: Tensor
    """[T] int64 slot that each token's key and value are written to."""
    positions: Tensor
    """[T] int64 position of each token in its sequence."""
    num_decode: int
    """The first tokens, one for each of the slots first_slot .. first_slot + num_decode - 1."""
    first_slot: int = 0
    copies: bool = False
    """Attend to a copy of the slots: their place and stride, which depend on other sequences, can steer kernels."""
    num_positions: int
    """Longest context among the decode tokens, the new one included."""
    mask: Tensor
    """[num_decode * kv heads, 1, num_positions] 0 where a decode token attends, -inf elsewhere."""
    prompts: tuple[tuple[int, int], ...]
    """Start and end of each prompt among the T tokens."""
    _window_masks: dict[int, Tensor] = field(default_factory=dict, init=False)
    """`mask` with what lies before a window, by window."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, bounds: Bounds) -> Tensor:
        """Write the new keys and values, then attend."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots, :, :, self.positions] = key[0].transpose(0, 1)
        values[self.slots, :, self.positions] = value[0].transpose(0, 1)
        parts = []
        if self.num_decode:
            parts.append(self._decode(query[0, :, : self.num_decode], keys, values, scaling, bounds))
        for start, end in self.prompts:
            one = (query[:, :, start:end], key[:, :, start:end], value[:, :, start:end])
            parts.append(causal_attention(*one, scaling, bounds))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, bounds: Bounds) -> Tensor:
        """Attend from [heads, n, D] queries to n slots: the query heads of one kv head form one small matrix."""
        num_heads, num_rows, key_dim = query.shape
        num_kv_heads = keys.shape[1]
        matrices = query.transpose(0, 1).reshape(num_rows * num_kv_heads, num_heads // num_kv_heads, key_dim)
        used = slice(self.first_slot, self.first_slot + num_rows)
        used_keys = keys[used, :, :, : self.num_positions].flatten(0, 1)
        used_values = values[used, :, : self.num_positions].flatten(0, 1)
        if self.copies:
            used_keys, used_values = used_keys.clone(), used_values.clone()
        mask = self._mask_of(bounds.window)
        if bounds.softcap is None:
            scores = torch.baddbmm(mask, matrices, used_keys, alpha=scaling)
        else:
            scores = _capped(torch.bmm(matrices, used_keys).mul_(scaling), bounds.softcap) + mask
        return torch.bmm(scores.softmax(dim=-1), used_values).view(1, num_rows, num_heads, -1)

    def _mask_of(self, window: int | None) -> Tensor:
        """Return the mask of the decode tokens in a layer with a window."""
        if window is None or window >= self.num_positions:
            return self.mask
        if window not in self._window_masks:
            oldest = self.positions[: self.num_decode, None] - window + 1
            before = torch.arange(self.num_positions, device=self.mask.device) < oldest
            num_kv_heads = self.mask.shape[0] // self.num_decode
            hidden = before.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1)
            self._window_masks[window] = self.mask.masked_fill(hidden, -torch.inf)
        return self._window_masks[window]
