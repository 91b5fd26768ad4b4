"""The KL penalty as a part of the reward: how far the policy that sampled was from the reference."""

from dataclasses import replace

import numpy as np
import torch

from rayrl.algorithms.kl import kl_estimate
from rayrl.config.kl import KLConfig
from rayrl.training.batch import FloatArray, TrainBatch
from rayrl.training.token_columns import columns_mask, to_columns, to_flat


def penalise_kl(
    batch: TrainBatch, config: KLConfig, adapted_coef: float | None = None
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with `coef * KL(sampler || reference)` taken off its rewards, and metrics.

        level sequence   r_i - coef * sum over the loss-carrying tokens of the estimate
        level token      the penalty of each token in `token_penalties`; rewards stay

    The estimate is between the logprobs that the engine reported and the reference's: the tokens are samples of that
    policy, however old, and no forward pass of the trained policy is needed. To be called before stale tokens lose
    their loss, as the penalty is for the whole trajectory.

    Args:
        batch: with `ref_logprobs`.
        adapted_coef: replaces the coefficient of the config, where it adapts.
    """
    coef = config.coef if adapted_coef is None else adapted_coef
    assert batch.ref_logprobs is not None, "a penalty on the KL needs the reference's logprobs"
    mask = columns_mask(batch)
    kl = kl_estimate(
        to_columns(batch, batch.logprobs),
        to_columns(batch, batch.ref_logprobs),
        config.form,
        mask,
        config.clamp_log_ratio,
        config.clamp_value,
    )
    sums = kl.sum(-1)
    metrics = {
        "policy/ref_kl": float(sums.sum() / mask.sum().clamp(min=1)),
        "reward/kl_penalty": coef * float(sums.mean()) if len(sums) else 0.0,
    }
    if config.level == "token":
        return replace(batch, token_penalties=to_flat(batch, coef * kl)), metrics
    rewards: FloatArray = (torch.from_numpy(batch.rewards.astype(np.float32)) - coef * sums).numpy()
    return replace(batch, rewards=rewards), metrics
