"""Metrics of one step that the driver can compute from summaries and clocks."""

import statistics
from dataclasses import dataclass

from rayrl.driver.batch import BatchPlan
from rayrl.driver.publisher import PublicationRecord


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Where the time of one step went, in seconds; filled in as the step goes on."""

    waited_s: float
    train_s: float = 0.0
    evaluation_wait_s: float = 0.0
    publication: PublicationRecord | None = None

    @property
    def total_s(self) -> float:
        """The whole step, from the end of the last one."""
        record = self.publication
        publication_s = 0.0 if record is None else record.transfer_s + record.commit_s
        return self.waited_s + self.train_s + self.evaluation_wait_s + publication_s


def batch_metrics(plan: BatchPlan, *, times: StepTimes, samples_per_step: int) -> dict[str, float]:
    """Return rewards, ages, sizes and times of one step. Names: `section/what`, seconds end in `_s`."""
    summaries = [group.summary for group in plan.chosen]
    rewards = [reward for summary in summaries for reward in summary.rewards]
    num_samples = len(rewards)
    parts = sorted({name for summary in summaries for name in summary.reward_parts})
    groups_without_signal = sum(len(set(summary.rewards)) == 1 for summary in summaries)
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/groups_without_signal_share": groups_without_signal / len(summaries),
        "staleness/age_mean": statistics.fmean(plan.ages),
        "staleness/age_max": float(max(plan.ages)),
        "staleness/masked_groups": float(plan.num_masked),
        "staleness/kept_stale_groups": float(plan.num_kept_stale),
        "rollout/versions_per_trajectory_max": float(max(summary.max_versions for summary in summaries)),
        "rollout/sampled_tokens": float(sum(summary.num_sampled_tokens for summary in summaries)),
        "rollout/tokens": float(sum(sum(summary.num_tokens) for summary in summaries)),
        "rollout/truncated_share": sum(summary.num_truncated for summary in summaries) / num_samples,
        "rollout/failed_samples": float(sum(len(summary.failures) for summary in summaries)),
        "rollout/group_seconds_mean": statistics.fmean(summary.seconds for summary in summaries),
        "time/step_s": times.total_s,
        "time/wait_groups_s": times.waited_s,
        "time/train_s": times.train_s,
        "time/wait_evaluation_s": times.evaluation_wait_s,
        "throughput/samples_per_s": samples_per_step / max(times.total_s, 1e-9),
        "throughput/tokens_per_s": sum(sum(summary.num_tokens) for summary in summaries) / max(times.total_s, 1e-9),
    }
    for name in parts:
        metrics[f"reward/{name}"] = statistics.fmean(summary.reward_parts.get(name, 0.0) for summary in summaries)
    if times.publication is not None:
        metrics["time/transfer_s"] = times.publication.transfer_s
        metrics["time/commit_s"] = times.publication.commit_s
        metrics["transfer/load_s"] = times.publication.load_s
        metrics["transfer/pause_s"] = times.publication.pause_s
        metrics |= {f"transfer/{name}_s": seconds for name, seconds in times.publication.phases.items()}
        metrics["transfer/bytes"] = float(times.publication.num_bytes)
    return metrics
