"""Metrics of the inference engines from their status. Pure."""

from collections.abc import Mapping, Sequence

from rayrl.inference.engine import EngineStatus


def engine_metrics(
    statuses: Sequence[EngineStatus], before: Mapping[str, float] | None = None, seconds: float = 0.0
) -> dict[str, float]:
    """Return load and totals over all engines that answered.

    Args:
        statuses: one per engine; none gives no metrics.
        before: the metrics of the last call, for rates.
        seconds: time since then.
    """
    if not statuses:
        return {}
    metrics = {
        "inference/engines": float(len(statuses)),
        "inference/running_requests": float(sum(status.num_running for status in statuses)),
        "inference/waiting_requests": float(sum(status.num_waiting for status in statuses)),
        "inference/kv_use_max": max(status.kv_use for status in statuses),
        "inference/prefix_hit_share": sum(status.prefix_hit_share for status in statuses) / len(statuses),
        "inference/preemptions": float(sum(status.total_preemptions for status in statuses)),
        "inference/sampled_tokens": float(sum(status.total_tokens for status in statuses)),
        "inference/prefill_tokens": float(sum(status.total_prefill_tokens for status in statuses)),
    }
    if before and seconds > 0:
        # A replaced engine begins to count anew: then there is no rate for once.
        sampled = metrics["inference/sampled_tokens"] - before.get("inference/sampled_tokens", 0.0)
        if sampled >= 0:
            metrics["inference/tokens_per_s"] = sampled / seconds
    return metrics
