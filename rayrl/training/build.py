"""From a model folder to the policy of one rank: load, check the head, split tensors and experts, shard.

With `sharded_load` the weights come last: the model is made without memory, laid out, and each rank then reads only
the parts that it holds.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayrl.config.training import FsdpEngine
from rayrl.errors import ModelError
from rayrl.models.loading import create_unloaded_causal_lm, load_causal_lm
from rayrl.training import attention
from rayrl.training.context_parallel import ContextParallel
from rayrl.training.engine import TrainEngineSettings
from rayrl.training.expert_parallel import TokenCapacity, parallelize_experts
from rayrl.training.layout import Layout
from rayrl.training.logprobs import HeadSettings, token_logprobs
from rayrl.training.lora import attach_lora
from rayrl.training.policy_model import PolicyModel
from rayrl.training.scalar_head import ScalarModel, attach_scalar_head, make_model
from rayrl.training.sharded_load import give_memory, load_parts
from rayrl.training.sharding import shard, weights_of
from rayrl.training.tensor_parallel import parallelize_tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltPolicy:
    """A policy that is ready to compute."""

    model: PolicyModel
    summed_gradients: tuple[str, ...]
    """Weights whose gradients must be added up over the tensor ranks after the last backward."""


def build_policy(
    settings: TrainEngineSettings, layout: Layout, head: HeadSettings, capacity: TokenCapacity
) -> BuiltPolicy:
    """Return the policy in the layout; collective. ModelError if the model cannot be loaded or trained."""
    engine, lora = settings.training.engine, settings.training.lora
    assert isinstance(engine, FsdpEngine), "the registry makes the engine that the config chooses"
    kernel = attention.register() if engine.attention == "sdpa" else engine.attention
    make = _without_weights if engine.sharded_load else _with_weights
    model = make(settings, head, kernel)
    if lora is not None:
        attach_lora(model.lm, lora)
    context_group, tensor_mesh, experts_mesh = layout.group("context"), layout.axis("tensor"), layout.experts_mesh()
    if context_group is not None:
        model.context = ContextParallel(group=context_group)
        model.lm.set_attn_implementation(model.context.register_attention(kernel))
    summed = [] if tensor_mesh is None else parallelize_tensors(model.lm, tensor_mesh)
    if experts_mesh is not None:
        parallelize_experts(model.lm, experts_mesh, capacity)
    shard(model, layout, engine)
    if engine.sharded_load:
        give_memory(model, torch.device("cpu") if engine.cpu_offload else settings.device)
        load_parts(weights_of(model), Path(settings.model.path))
    return BuiltPolicy(model=model, summed_gradients=tuple(summed))


def _with_weights(settings: TrainEngineSettings, head: HeadSettings, kernel: str) -> PolicyModel:
    lm = load_causal_lm(
        settings.model.path,
        dtype=torch.float32,
        attention=kernel,
        trust_remote_code=settings.model.trust_remote_code,
    )
    return make_model(
        lm,
        head,
        settings.head,
        folder=settings.model.path,
        device=settings.device,
        activation_checkpointing=settings.training.engine.activation_checkpointing,
    )


def _without_weights(settings: TrainEngineSettings, head: HeadSettings, kernel: str) -> PolicyModel:
    lm = create_unloaded_causal_lm(
        settings.model.path, attention=kernel, trust_remote_code=settings.model.trust_remote_code
    )
    checkpointing = settings.training.engine.activation_checkpointing
    if settings.head == "scalar":
        attach_scalar_head(lm, settings.model.path)
        return ScalarModel(lm, head, activation_checkpointing=checkpointing)
    model = PolicyModel(lm, head, activation_checkpointing=checkpointing)
    _check_head_formula(model)
    return model


def _check_head_formula(model: PolicyModel) -> None:
    """As `check_head`, without weights: the model's own forward runs on a made-up hidden state and a small head."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    lm: Any = model.lm
    output = lm.get_output_embeddings()
    name = type(lm).__name__
    if not isinstance(output, nn.Linear):
        raise ModelError(f"model class {name} has no linear output head; training needs a causal language model")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = nn.Linear(output.in_features, 8, bias=output.bias is not None)
        hidden = torch.randn(1, 4, output.in_features)
        ids = torch.arange(4)[None, :]
        lm.set_output_embeddings(small)
        lm.base_model.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)
        try:
            logits = lm(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            lm.set_output_embeddings(output)
            del vars(lm.base_model)["forward"]
        settings = replace(model.head, temperature=1.0, product_dtype=torch.float32)
        ours, _ = token_logprobs(hidden[0], small.weight, small.bias, ids[0], settings)
        theirs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, :, None]).squeeze(1)
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"model class {name} changes its logits in a way that training does not know: "
            f"logprobs {theirs.tolist()} by the model, {ours.tolist()} from its hidden states"
        )
