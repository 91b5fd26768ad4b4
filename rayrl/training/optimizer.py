"""AdamW with decay on matrices only."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rayrl.config.training import OptimizerConfig


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the parameters that are trained, without weight decay on norms and biases (one dimension).

    The fused kernel updates a parameter in one pass over memory, on CPU too; it takes parameters of one mesh at a
    time, so each mesh has groups of its own.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for _, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        decay = config.weight_decay if parameter.dim() > 1 else 0.0
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, parameter.dim() > 1), {"params": [], "weight_decay": decay})["params"].append(
            parameter
        )
    return torch.optim.AdamW(list(groups.values()), lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
