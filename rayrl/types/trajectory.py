"""Trajectories and groups: what training consumes. The Arrow form of the same data is in `types/arrow.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rayrl.types.prompt import PromptId

StopReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `[start, end)` were sampled by weight version `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Why an episode has no usable result. Failures are data: they travel with the trajectory."""

    kind: Literal["workflow", "reward", "infrastructure", "timeout", "prompt"]
    """What failed: the user's workflow, the reward, another process, a deadline, or the prompt itself (too long)."""
    message: str
    """Exception type and message."""
    attempts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The tokens of one episode. All per-token fields have the length T of `tokens`.

    Example: `3+4=` answered `7` by version 5:
    `tokens=(3, 11, 4, 12, 7, 1) loss_mask=(0, 0, 0, 0, 1, 1) logprobs=(0, 0, 0, 0, -0.1, -0.2)
    spans=(VersionSpan(start=4, end=6, version=5),) reward=1.0`
    """

    prompt_id: PromptId
    sample_index: int
    """0 .. G-1 within the group."""
    tokens: tuple[int, ...]
    """[T] prompt, sampled, tool and environment tokens in the order the model saw them."""
    loss_mask: tuple[int, ...]
    """[T] 1 for sampled tokens, 0 for all others."""
    logprobs: tuple[float, ...]
    """[T] sampling logprob where the mask is 1, else 0."""
    spans: tuple[VersionSpan, ...]
    """Cover exactly the tokens whose mask is 1, in trajectory positions; the others have no version."""
    reward: float | None
    """None if and only if `failure` is set: a failed reward is never a 0."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward, for metrics."""
    stop_reason: StopReason
    num_turns: int = 1
    failure: FailureRecord | None = None

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among the loss-carrying tokens; None if there are none."""
        return min((span.version for span in self.spans), default=None)

    @property
    def newest_version(self) -> int | None:
        return max((span.version for span in self.spans), default=None)


def check_trajectory(trajectory: Trajectory) -> None:
    """Assert the invariants between the fields; called where trajectories are made."""
    num_tokens = len(trajectory.tokens)
    assert len(trajectory.loss_mask) == len(trajectory.logprobs) == num_tokens, "per-token fields differ in length"
    assert (trajectory.reward is None) == (trajectory.failure is not None), "reward is None exactly for failures"
    covered = [position for span in trajectory.spans for position in range(span.start, span.end)]
    sampled = [position for position, mask in enumerate(trajectory.loss_mask) if mask]
    assert covered == sampled, "version spans cover exactly the sampled tokens, in order"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What the driver knows of a finished group: counts and ids, never tokens."""

    prompt_id: PromptId
    num_usable: int
    """Trajectories without a failure; 0 means that the group is given up."""
    failures: tuple[FailureRecord, ...]
    rewards: tuple[float, ...]
    """Of the usable trajectories."""
    reward_parts: Mapping[str, float]
    """Mean of each named component over the usable trajectories."""
    num_tokens: tuple[int, ...]
    """Length T of each usable trajectory."""
    num_sampled_tokens: int
    """Loss-carrying tokens of the usable trajectories, all together."""
    num_truncated: int
    """Usable trajectories that ended by length."""
    oldest_version: int | None
    newest_version: int | None
    max_versions: int
    """Largest number of different versions in one trajectory."""
    seconds: float
    """From the start of the first episode to the end of the last."""


def summarize(prompt_id: PromptId, trajectories: list[Trajectory], seconds: float) -> GroupSummary:
    """Return the summary of a group."""
    usable = [item for item in trajectories if item.failure is None]
    names = sorted({name for item in usable for name in item.reward_parts})
    versions = [span.version for item in usable for span in item.spans]
    return GroupSummary(
        prompt_id=prompt_id,
        num_usable=len(usable),
        failures=tuple(item.failure for item in trajectories if item.failure is not None),
        rewards=tuple(item.reward for item in usable if item.reward is not None),
        reward_parts={name: sum(item.reward_parts.get(name, 0.0) for item in usable) / len(usable) for name in names},
        num_tokens=tuple(len(item.tokens) for item in usable),
        num_sampled_tokens=sum(sum(item.loss_mask) for item in usable),
        num_truncated=sum(item.stop_reason == "length" for item in usable),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        max_versions=max((len({span.version for span in item.spans}) for item in usable), default=0),
        seconds=seconds,
    )
