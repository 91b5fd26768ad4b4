"""From the groups of a training step to the batch that its optimizer steps are made on; the same on every rank.

    rewards shaped -> KL off the reward -> values of a critic -> advantages -> truncated and stale tokens masked
    -> logprobs of other policies

Advantages come before the masks: what carries no loss is still part of the baseline of its group.
"""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from rayrl.config.algorithm import AlgorithmConfig
from rayrl.training.batch import TrainBatch, batch_from_arrow, mask_stale
from rayrl.training.critic import Critic
from rayrl.training.distillation import distillation_metrics
from rayrl.training.engine import TrainEngine
from rayrl.training.kl_reward import penalise_kl
from rayrl.training.losses import assign_advantages
from rayrl.training.settings import TrainWorkerSettings
from rayrl.training.shaping import mask_truncated, reward_parts, shape_rewards
from rayrl.training.step import TrainStepRequest


def prepare_batch(
    engine: TrainEngine,
    batches: Sequence[pa.RecordBatch],
    request: TrainStepRequest,
    algorithm: AlgorithmConfig,
    settings: TrainWorkerSettings,
    critic: Critic | None = None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the whole batch and metrics of it. A collective call: forward passes of both engines may be in it."""
    kl = algorithm.kl
    batch, num_failed = batch_from_arrow(batches)
    parts = reward_parts(batches, tuple(algorithm.shaping.reward_weights))
    batch = shape_rewards(batch, algorithm.shaping, settings.max_new_tokens, parts)
    metrics = {"train/failed_trajectories": float(num_failed)}
    if kl.coef > 0:
        metrics["policy/kl_coef"] = kl.coef if request.kl_coef is None else request.kl_coef
    if kl.coef > 0 and kl.place == "reward":
        batch = replace(batch, ref_logprobs=engine.forward_logprobs(batch, reference=True))
        batch, of_kl = penalise_kl(batch, kl, request.kl_coef)
        metrics |= of_kl
    if critic is not None:
        batch = critic.add_values(batch)
    # How far the student is from its teacher now: samples of an older student would go on correcting what is corrected.
    student = engine.forward_logprobs(batch) if algorithm.advantage == "distillation" else None
    batch = assign_advantages(batch, algorithm, student)
    num_truncated = 0
    if algorithm.shaping.mask_truncated:
        batch, num_truncated = mask_truncated(batch)
    batch, ages = mask_stale(batch, request.version, request.min_version)
    if kl.coef > 0 and kl.place == "loss":
        batch = replace(batch, ref_logprobs=engine.forward_logprobs(batch, reference=True))
    if settings.minibatches > 1 and algorithm.proximal == "recompute":
        # Later optimizer steps of this batch move away from the policy that the clip is centred on.
        batch = replace(batch, proximal_logprobs=engine.forward_logprobs(batch) if student is None else student)
    metrics |= distillation_metrics(batch)
    return batch, metrics | {
        "train/masked_truncated_trajectories": float(num_truncated),
        "staleness/stale_tokens": float(ages.num_stale_tokens),
        "staleness/stale_token_share": ages.num_stale_tokens / max(ages.num_tokens, 1),
        "staleness/trajectory_age_mean": ages.mean_age,
        "staleness/trajectory_age_max": float(ages.max_age),
    }
