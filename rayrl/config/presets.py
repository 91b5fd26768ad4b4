"""Presets of the algorithm section: names for plain fields, as published; a given field wins over its preset."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Group-normalised advantages with the decoupled PPO objective; DAPO's wider upper clip; no KL.
    "grpo": {"advantage": "grpo", "objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
    # Liu et al. 2025: no division by the standard deviation, constant length in the denominator.
    "dr_grpo": {
        "advantage": "grpo",
        "advantage_scale": "none",
        "objective": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "seq_mean_token_sum_norm",
    },
    # Yu et al. 2025: wider upper clip, token mean, groups without signal replaced by others.
    "dapo": {
        "advantage": "grpo",
        "objective": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "shaping": {"drop_groups_without_signal": True},
    },
    # Ahmadian et al. 2024: leave-one-out baseline.
    "rloo": {"advantage": "rloo", "objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    # Hu 2025: whitening over the batch, without groups, or with the group mean as baseline.
    "reinforce_pp": {"advantage": "reinforce_pp", "objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "objective": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    # Division by the group mean: the gradient of maximum likelihood, to first order.
    "maxrl": {"advantage": "maxrl", "objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
    # Length-weighted baseline, exactly on-policy in the paper.
    "opo": {"advantage": "opo", "objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    # Chu et al. 2025: plain policy gradient on groups with signal.
    "gpg": {"advantage": "gpg", "objective": "reinforce"},
    # Qwen team 2025: one ratio for the whole sequence, with its very narrow clip.
    "gspo": {
        "advantage": "grpo",
        "objective": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq_mean_token_mean",
    },
    # MiniMax 2025: clipped importance weight without gradient, times the logprob.
    "cispo": {"advantage": "grpo", "objective": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    # Qwen team 2025: a soft gate instead of the clip.
    "sapo": {"advantage": "grpo", "objective": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
    # Zhao et al. 2025: geometric mean of the ratios, wider clip.
    "gmpo": {
        "advantage": "grpo",
        "objective": "gmpo",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "seq_mean_token_mean",
    },
    # Clip and KL penalty on the tokens of highest covariance, against the collapse of entropy.
    "clip_cov": {"advantage": "grpo", "objective": "clip_cov", "clip_low": 0.2, "clip_high": 0.2},
    "kl_cov": {"advantage": "grpo", "objective": "kl_cov"},
    # Schulman et al. 2017: a critic and GAE instead of groups.
    "ppo": {"advantage": "gae", "objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "critic": {}},
    # Agarwal et al. 2023: a token's advantage is how much likelier the teacher finds it; needs the section `teacher`.
    "distillation": {"advantage": "distillation", "objective": "reinforce"},
    # A trust region by divergence mask, and by the second moment of the log ratio: both around the sampling policy.
    "dppo": {"advantage": "grpo", "objective": "dppo", "proximal": "sampler"},
    "m2po": {"advantage": "grpo", "objective": "m2po", "proximal": "sampler"},
}
