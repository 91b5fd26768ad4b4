"""The model as training calls it: backbone, selection of the predicting positions, head in chunks; one forward.

It is one module so that, sharded, the parameters outside the layers (embedding, last norm, head, also when embedding
and head are tied) are whole while all of this uses them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rayrl.errors import ModelError
from rayrl.training import attention
from rayrl.training.collate import MicroBatch
from rayrl.training.context_parallel import ContextParallel
from rayrl.training.gradients import local
from rayrl.training.logprobs import HeadSettings, token_logprobs
from rayrl.training.pack import Pack


class PolicyModel(nn.Module):
    """A causal language model of transformers that returns logprobs of given tokens.

    It stays in evaluation mode: dropout would make the logprobs of one and the same weights differ.
    """

    def __init__(self, lm: Any, head: HeadSettings, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.lm = lm.eval()
        self.head = replace(head, multiplier=_multiplier(lm.config), softcap=_softcap(lm.config))
        self.context: ContextParallel | None = None
        if activation_checkpointing:
            for layer in self.layers():
                # Not a wrapper module: that would rename the parameters.
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def layers(self) -> list[nn.Module]:
        """The blocks of the model, in order, as the model itself names them."""
        names = set(self.lm._no_split_modules or ())
        return [module for module in self.lm.modules() if type(module).__name__ in names]

    def forward(self, micro: MicroBatch, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return float32 logprobs [K] of the micro-batch's targets, and entropies [K] if asked for."""
        if self.context is None:
            hidden = self._hidden(micro.input_ids, micro.position_ids, micro.attention_mask)
            return self._predict(hidden.reshape(-1, hidden.shape[-1])[micro.sources], micro.targets, with_entropy)
        part = self.context.shard(micro)
        hidden = self._hidden(part.input_ids, part.position_ids, micro.attention_mask)
        selected = hidden.reshape(-1, hidden.shape[-1])[part.sources]
        output, entropy = self._predict(selected, micro.targets[part.predictions], with_entropy)
        return self.context.join(output, part), None if entropy is None else self.context.join(entropy, part)

    def _predict(self, hidden: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return what the head gives for targets [K], given the hidden states [K, H] that predict them."""
        output = self.lm.get_output_embeddings()
        # Split over the vocabulary, the head is whole over the data ranks here and a part over the tensor ranks.
        group = output.weight.device_mesh.get_group() if isinstance(output.weight, DTensor) else None
        bias = None if output.bias is None else local(output.bias)
        return token_logprobs(hidden, local(output.weight), bias, targets, self.head, with_entropy, group)

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | Pack | None) -> Tensor:
        if isinstance(mask, Pack):
            return self._packed_hidden(input_ids, position_ids, mask)
        if mask is not None and self.lm.config._attn_implementation == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)  # added to the scores there
        # A mask that is already four-dimensional is taken as it is; without one transformers sees contiguous positions.
        hidden: Tensor = self.lm.base_model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return hidden

    def _packed_hidden(self, input_ids: Tensor, position_ids: Tensor, pack: Pack) -> Tensor:
        # Any four-dimensional mask keeps transformers from making one of [L, L]; our attention reads the pack instead.
        unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
        hidden: Tensor = self.lm.base_model(
            input_ids=input_ids, attention_mask=unread, position_ids=position_ids, use_cache=False, pack=pack
        ).last_hidden_state
        return hidden


def can_pack(model: PolicyModel) -> bool:
    """Return whether sequences may stand end to end: only with our attention, and no state that runs along the row.

    Compiled blocks do not: each micro-batch has other lengths, and they would be compiled again for each.
    """
    lm = model.lm
    layer_types = set(lm.config.to_dict().get("layer_types") or ())
    known = layer_types <= {"full_attention", "sliding_attention"}
    is_ours = lm.config._attn_implementation.startswith(attention.NAME)
    is_compiled = any(layer._compiled_call_impl is not None for layer in model.layers())
    return known and not lm._is_stateful and is_ours and not is_compiled


def can_share_prompts(lm: Any) -> bool:
    """Return whether a mask of our own reaches every layer: not with sliding windows, recurrent or linear layers.

    Those build masks per layer from positions, or carry state along the row.
    """
    options = lm.config.to_dict()
    layer_types = options.get("layer_types")
    if layer_types:
        # Some configs name a window and have no layer that uses it.
        return set(layer_types) == {"full_attention"}
    return not options.get("sliding_window") and not lm._is_stateful


def check_head(model: PolicyModel) -> None:
    """ModelError if the model's own logits are not what `HeadSettings` computes from its hidden states.

    Some families scale or bound their logits; those that do it in a way unknown here would train on wrong numbers.
    """
    output = model.lm.get_output_embeddings()
    name = type(model.lm).__name__
    if not isinstance(output, nn.Linear):
        raise ModelError(f"model class {name} has no linear output head; training needs a causal language model")
    ids = torch.arange(1, 5, device=output.weight.device)[None, :] % output.weight.shape[0]
    positions = torch.arange(4, device=ids.device)[None, :]
    head = replace(model.head, temperature=1.0, product_dtype=torch.float32)
    with torch.no_grad():
        hidden = model._hidden(ids, positions, None)[0, :3]
        ours, _ = token_logprobs(hidden, output.weight, output.bias, ids[0, 1:], head)
        logits = model.lm(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :3].float()
        theirs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None]).squeeze(1)
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"model class {name} changes its logits in a way that training does not know: "
            f"logprobs {theirs.tolist()} by the model, {ours.tolist()} from its hidden states"
        )


def _multiplier(config: Any) -> float:
    """Return the constant that the family multiplies its logits with (Cohere), or divides them by (Granite)."""
    options = config.to_dict()
    factor: float = options.get("logit_scale") or 1.0
    divisor: float = options.get("logits_scaling") or 1.0
    return factor / divisor


def _softcap(config: Any) -> float | None:
    """Return the bound on the logits (Gemma 2)."""
    bound: float | None = config.to_dict().get("final_logit_softcapping")
    return bound
