"""From a model folder to the sharded policy of one rank: load, check the head, split tensors, shard."""

from dataclasses import dataclass

import torch

from rayrl.config.model import ModelConfig
from rayrl.config.training import TrainingConfig
from rayrl.models.loading import load_causal_lm
from rayrl.training import attention
from rayrl.training.context_parallel import ContextParallel
from rayrl.training.layout import Layout
from rayrl.training.logprobs import HeadSettings
from rayrl.training.policy_model import PolicyModel
from rayrl.training.scalar_head import HeadKind, make_model
from rayrl.training.sharding import shard
from rayrl.training.tensor_parallel import parallelize_tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltPolicy:
    """A policy that is ready to compute."""

    model: PolicyModel
    summed_gradients: tuple[str, ...]
    """Weights whose gradients must be added up over the tensor ranks after the last backward."""


def build_policy(
    config: ModelConfig,
    training: TrainingConfig,
    layout: Layout,
    head: HeadSettings,
    kind: HeadKind,
    device: torch.device,
) -> BuiltPolicy:
    """Return the policy in the layout; collective. ModelError if the model cannot be loaded or trained."""
    engine = training.engine
    kernel = attention.register() if engine.attention == "sdpa" else engine.attention
    lm = load_causal_lm(config.path, dtype=torch.float32, attention=kernel, trust_remote_code=config.trust_remote_code)
    # Before anything is split: its head is compared with the model's own logits.
    model = make_model(
        lm,
        head,
        kind,
        folder=config.path,
        device=device,
        activation_checkpointing=engine.activation_checkpointing,
    )
    context_group, tensor_mesh = layout.group("context"), layout.axis("tensor")
    if context_group is not None:
        model.context = ContextParallel(group=context_group)
        lm.set_attn_implementation(model.context.register_attention(kernel))
    summed = [] if tensor_mesh is None else parallelize_tensors(lm, tensor_mesh)
    shard(model, layout, engine.autocast)
    return BuiltPolicy(model=model, summed_gradients=tuple(summed))
