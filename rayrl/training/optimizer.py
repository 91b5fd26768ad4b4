"""AdamW with decay on matrices only."""

from collections.abc import Iterable

import torch
from torch import nn

from rayrl.config.training import OptimizerConfig


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the parameters that are trained, without weight decay on norms and biases (one dimension).

    The fused kernel updates a parameter in one pass over memory, on CPU too.
    """
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
