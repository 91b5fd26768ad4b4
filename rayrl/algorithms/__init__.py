"""Pure functions on tensors: advantages, objectives, corrections, losses. `docs/algorithms.md` has the formulas.

Names load on first use, so that importing the package does not load torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "ADVANTAGES": "tables",
    "OBJECTIVES": "tables",
    "LossInputs": "objective",
    "ObjectiveSettings": "objective",
    "aggregate_loss": "aggregation",
    "cispo_loss": "cispo",
    "grpo_advantages": "grpo",
    "gspo_loss": "gspo",
    "importance_weights": "importance",
    "kl_estimate": "kl",
    "loss_denominator": "aggregation",
    "maxrl_advantages": "maxrl",
    "mean_metrics": "objective",
    "mismatch_metrics": "mismatch",
    "mismatch_sums": "mismatch",
    "policy_loss": "objective",
    "ppo_clip_loss": "ppo",
    "reinforce_loss": "reinforce",
    "rloo_advantages": "rloo",
    "sapo_loss": "sapo",
    "sft_loss": "sft",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
