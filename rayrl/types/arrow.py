"""The one Arrow schema of trajectories: on the wire, in the rollout log (Parquet) and in checkpoints."""

import json
from typing import Any

import pyarrow as pa

from rayrl.types.prompt import PromptId
from rayrl.types.trajectory import FailureRecord, Trajectory, VersionSpan

TRAJECTORY_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        # Version of each token, -1 where it was not sampled: redundant to spans, and what training masks by.
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        pa.field("reward", pa.float32()),
        pa.field("reward_parts", pa.string(), nullable=False),
        pa.field("stop_reason", pa.string(), nullable=False),
        pa.field("num_turns", pa.int32(), nullable=False),
        pa.field("failure", pa.string()),
    ],
    metadata={"rayrl.schema_version": "1"},
)


def trajectories_to_batch(trajectories: list[Trajectory]) -> pa.RecordBatch:
    """Return one row per trajectory, in order."""
    return pa.RecordBatch.from_pylist([_to_row(item) for item in trajectories], schema=TRAJECTORY_SCHEMA)


def batch_to_trajectories(batch: pa.RecordBatch | pa.Table) -> list[Trajectory]:
    """Return the trajectories of a record batch or table, in order."""
    return [_from_row(row) for row in batch.to_pylist()]


def _to_row(item: Trajectory) -> dict[str, Any]:
    versions = [-1] * len(item.tokens)
    for span in item.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    failure = item.failure
    return {
        "prompt_id": str(item.prompt_id),
        "sample_index": item.sample_index,
        "tokens": item.tokens,
        "loss_mask": item.loss_mask,
        "logprobs": item.logprobs,
        "versions": versions,
        "reward": item.reward,
        "reward_parts": json.dumps(dict(item.reward_parts)),
        "stop_reason": item.stop_reason,
        "num_turns": item.num_turns,
        "failure": None
        if failure is None
        else json.dumps({"kind": failure.kind, "message": failure.message, "attempts": failure.attempts}),
    }


def _from_row(row: dict[str, Any]) -> Trajectory:
    return Trajectory(
        prompt_id=PromptId.parse(row["prompt_id"]),
        sample_index=row["sample_index"],
        tokens=tuple(row["tokens"]),
        loss_mask=tuple(row["loss_mask"]),
        logprobs=tuple(row["logprobs"]),
        spans=spans_from_versions(row["versions"]),
        reward=row["reward"],
        reward_parts=json.loads(row["reward_parts"]),
        stop_reason=row["stop_reason"],
        num_turns=row["num_turns"],
        failure=None if row["failure"] is None else FailureRecord(**json.loads(row["failure"])),
    )


def spans_from_versions(versions: list[int]) -> tuple[VersionSpan, ...]:
    """Return the runs of equal versions, without those of -1."""
    spans: list[VersionSpan] = []
    start = 0
    for position in range(1, len(versions) + 1):
        if position == len(versions) or versions[position] != versions[start]:
            if versions[start] >= 0:
                spans.append(VersionSpan(start=start, end=position, version=versions[start]))
            start = position
    return tuple(spans)
