"""Low-rank adapters by name: how A and B belong to a weight, and what the three make together.

    model.layers.0.self_attn.q_proj.weight      W [out, in]
    model.layers.0.self_attn.q_proj.lora_A.weight   A [r, in]
    model.layers.0.self_attn.q_proj.lora_B.weight   B [out, r]

Trainer and engines merge with the one function here, in float32, so that they come to the same weights.
"""

import torch
from torch import Tensor


def adapter_names(name: str) -> tuple[str, str]:
    """Return the names of A and B of the weight `name`."""
    owner, _, kind = name.rpartition(".")
    return f"{owner}.lora_A.{kind}", f"{owner}.lora_B.{kind}"


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Return `W + scaling B A` in the data type of W: [out, in] from A [r, in] and B [out, r]."""
    return torch.addmm(weight, up, down, alpha=scaling)
