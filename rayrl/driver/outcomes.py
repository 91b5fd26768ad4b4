"""What became of each prompt: one place that keeps the prompt stream and the ledger in step."""

from collections.abc import Mapping, Sequence
from typing import Any

from rayrl.checkpoint.ledger import Ledger, Outcome, PromptOutcome, PublishedVersion
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.types.prompt import Prompt
from rayrl.types.trajectory import GroupSummary


class OutcomeLog:
    """Every prompt leaves through exactly one of `train`, `filter`, `give_up`; `send_back` is no outcome.

    The ledger is written before the stream forgets a prompt: a crash in between leaves a ledger row of a step that the
    next resume rewinds, never a prompt that neither knows of.
    """

    def __init__(self, *, stream: PromptStream, ledger: Ledger) -> None:
        self._stream = stream
        self._ledger = ledger

    def next_prompt(self) -> Prompt:
        """Return the next prompt to sample; prompts that were sent back come first."""
        return self._stream.next_prompt()

    def train(
        self,
        groups: Sequence[GroupSummary],
        *,
        step: int,
        version: int,
        detail: Mapping[str, Any] | None = None,
        published: PublishedVersion | None = None,
    ) -> None:
        """The groups were trained on in `step`, by weights that became `version` and were `published`; `detail` is for
        the audit."""
        self._ledger.record_step(step, version, [_outcome(group, "trained") for group in groups], detail, published)
        self._account(groups)

    def filter(
        self,
        groups: Sequence[GroupSummary],
        *,
        step: int,
        version: int,
        reason: str,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """The groups were sampled but left out of training, for a reason that holds for all of them."""
        self._ledger.record_step(step, version, [_outcome(group, "filtered", reason) for group in groups], detail)
        self._account(groups)

    def give_up(self, group: GroupSummary, *, step: int, version: int, reason: str) -> None:
        """The group has no usable trajectory."""
        self._ledger.record_outcomes(step, version, [_outcome(group, "given_up", reason)])
        self._account([group])

    def leave_out(self, group: GroupSummary, *, step: int, version: int, reason: str) -> None:
        """The group was filtered before a batch was formed."""
        self._ledger.record_outcomes(step, version, [_outcome(group, "filtered", reason)])
        self._account([group])

    def send_back(self, group: GroupSummary) -> None:
        """The group was dropped as too old: its prompt is sampled again."""
        self._stream.give_back(group.prompt_id)

    def _account(self, groups: Sequence[GroupSummary]) -> None:
        for group in groups:
            self._stream.account(group.prompt_id)


def _outcome(group: GroupSummary, outcome: Outcome, reason: str = "") -> PromptOutcome:
    return PromptOutcome(
        prompt_id=group.prompt_id,
        outcome=outcome,
        reason=reason,
        attempts=max((failure.attempts for failure in group.failures), default=1),
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
    )
