"""Pure functions on tensors: advantages, objectives, corrections, losses. `docs/algorithms.md` has the formulas.

Names load on first use, so that importing the package does not load torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "ADVANTAGES": "tables",
    "AdvantageInputs": "advantage",
    "AdvantageSettings": "advantage",
    "LossInputs": "objective",
    "OBJECTIVES": "tables",
    "ObjectiveSettings": "objective",
    "SELECTIONS": "tables",
    "adaptive_kl_coef": "kl_control",
    "add_metrics": "sums",
    "aggregate_loss": "aggregation",
    "bradley_terry_loss": "preference",
    "cispo_loss": "cispo",
    "clip_cov_held_back": "covariance",
    "clip_cov_loss": "covariance",
    "combine_rewards": "reward_scaling",
    "compute_advantages": "advantage",
    "cosine_length_reward": "length_penalty",
    "describe_nonfinite": "nonfinite",
    "discounted_returns": "returns",
    "distillation_advantages": "distillation",
    "dpo_loss": "preference",
    "dppo_loss": "dppo",
    "dr_grpo_advantages": "dr_grpo",
    "gae": "generalized_advantage",
    "gmpo_loss": "gmpo",
    "gpg_advantages": "gpg",
    "group_length_penalty": "length_penalty",
    "groups_with_signal": "group_statistics",
    "grpo_advantages": "grpo",
    "gspo_loss": "gspo",
    "importance_weights": "importance",
    "ipo_loss": "preference",
    "kl_cov_held_back": "covariance",
    "kl_cov_loss": "covariance",
    "kl_estimate": "kl",
    "linear_length_penalty": "length_penalty",
    "loglinear_proximal": "staleness",
    "loss_denominator": "aggregation",
    "m2po_held_back": "m2po",
    "m2po_loss": "m2po",
    "masked_whiten": "whitening",
    "maxrl_advantages": "maxrl",
    "mean_metrics": "sums",
    "mismatch_maxima": "mismatch",
    "mismatch_metrics": "mismatch",
    "mismatch_sums": "mismatch",
    "nonfinite_report": "nonfinite",
    "normalise_rewards": "reward_scaling",
    "opo_advantages": "opo",
    "overlong_penalty": "token_rewards",
    "pass_at_k_advantages": "pass_at_k",
    "policy_loss": "objective",
    "select_tokens": "objective",
    "ppo_clip_loss": "ppo",
    "reinforce_loss": "reinforce",
    "reinforce_pp_advantages": "reinforce_pp",
    "reinforce_pp_baseline_advantages": "reinforce_pp",
    "rewards_to_tokens": "token_rewards",
    "rloo_advantages": "rloo",
    "sapo_loss": "sapo",
    "sequence_logprobs": "preference",
    "sft_loss": "sft",
    "staleness_mask": "staleness",
    "target_length_penalty": "length_penalty",
    "token_covariance": "covariance",
    "token_entropy": "entropy",
    "value_loss": "value",
}
"""Public name -> file. No file has the name of a function: importing it would hide the function."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
