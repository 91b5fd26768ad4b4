"""The coefficient of a KL penalty that follows a target; plain numbers, without torch."""


def adaptive_kl_coef(coef: float, observed_kl: float, target: float, num_samples: int, horizon: int) -> float:
    """Return the next KL coefficient: larger when the observed KL is above the target, smaller when below.

        coef * (1 + clip(observed / target - 1, -0.2, 0.2) * num_samples / horizon)

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    Args:
        num_samples: trajectories since the last change.
        horizon: trajectories over which the coefficient may change by 20 %.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target and horizon: {target} and {horizon} must be positive")
    return coef * (1 + min(max(observed_kl / target - 1, -0.2), 0.2) * num_samples / horizon)
