"""Attention for training on short rows: two matrix products and a softmax.

On CPU the backward of torch's flash attention takes several times as long as these (measured: a fifth of a whole
training step of a 135 M model at 76 to 760 tokens a row); in exchange these keep the weights of all pairs for the
backward. So rows up to `MAX_DENSE_LENGTH` on CPU go this way, and models that bound their scores; all others go through
the SDPA of transformers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rayrl.errors import ModelError
from rayrl.training.pack import packed_attention

NAME = "rayrl_sdpa"
"""Name under which transformers knows it."""
MAX_DENSE_LENGTH = 512
"""Tokens; at 512 the kept weights are 0.5 MiB per head and row in bfloat16."""
_UNSUPPORTED = ("s_aux",)
"""Options of transformers' attention that the kernels below would leave out without a word."""


def register() -> str:
    """Make the attention known to transformers, and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return [B, L, H, D], as transformers calls it with query [B, H, L, D] and key, value [B, H_kv, L, D].

    With the option `pack` it is a row of several sequences, and `attention_mask` is not looked at. With `softcap`
    (Gemma 2) scores are bounded, which no kernel of torch does: then rows of all lengths go the dense way. ModelError
    for options that change the weights in a way that is not computed here.
    """
    unknown = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if unknown:
        raise ModelError(
            f"the attention of {type(module).__name__} uses {', '.join(unknown)}, which training with "
            f"training.engine.attention=sdpa does not compute; set it to eager"
        )
    softcap: float | None = options.get("softcap")
    pack = options.pop("pack", None)
    if pack is not None:
        options |= {"dropout": dropout, "scaling": scaling}
        return packed_attention(module, query, key, value, pack, attention, **options), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    short = query.device.type == "cpu" and query.shape[2] == key.shape[2] <= MAX_DENSE_LENGTH
    dense = softcap is not None or (
        short
        and dropout == 0.0
        and options.get("position_bias") is None
        and options.get("is_causal") in (None, True)
        and (attention_mask is None or attention_mask.dtype == torch.bool)
    )
    if not dense:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    return _dense_attention(query, key, value, attention_mask, scaling, softcap), None


def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    # The query heads of one key head go through one product, so that keys and values are not repeated.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * length, width)
    scores = torch.matmul(grouped, key.transpose(2, 3)).view(batch, kv_heads, -1, length, length)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().view(1, 1, length, length)
    hidden = torch.where(mask, 0.0, float("-inf")).unsqueeze(2)
    scores = scores.float() * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores + hidden, dim=-1)
    weights = weights.to(value.dtype).view(batch, kv_heads, -1, length)
    output = torch.matmul(weights, value).view(batch, heads, length, value.shape[-1])
    return output.transpose(1, 2).contiguous()
