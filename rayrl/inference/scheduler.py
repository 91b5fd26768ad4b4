"""Which requests run: a queue grouped by prompt, and the rows of the batch. Pure bookkeeping, no tensors.

The running sequences are always rows 0 .. n-1, so that the model works on views of its cache: when a row ends, the
last one takes its place.
"""

from collections import deque
from dataclasses import dataclass, field

from rayrl.inference.stop_strings import StopStrings
from rayrl.types.sampling import Chunk, FinishReason, GenerationRequest


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request on its way."""

    request: GenerationRequest
    seed: int
    """64 bits; the request's own seed, or one that the engine drew."""
    stop_strings: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    """Sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    num_sent: int = 0
    """Sampled tokens that the caller already has."""

    @property
    def num_context(self) -> int:
        """Prompt and sampled tokens; the cache holds all but the last sampled one."""
        return len(self.request.prompt_tokens) + len(self.tokens)

    def take_chunk(self, version: int, finish_reason: FinishReason | None = None) -> Chunk:
        """Return what the caller does not have yet, and count it as sent."""
        start, self.num_sent = self.num_sent, len(self.tokens)
        return Chunk(
            request_id=self.request.request_id,
            tokens=tuple(self.tokens[start:]),
            logprobs=tuple(self.logprobs[start:]),
            version=version,
            finish_reason=finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """Sequences that were admitted together and share a prompt, which goes through the model once."""

    prompt_tokens: tuple[int, ...]
    num_members: int


class Scheduler:
    """The queue and the rows of one engine."""

    def __init__(self, max_batch_size: int, prefill_tokens: int) -> None:
        self._max_batch_size = max_batch_size
        self._prefill_tokens = prefill_tokens
        self._waiting: dict[tuple[int, ...], deque[Sequence]] = {}
        self.running: list[Sequence] = []
        """Row by row; the model's cache has the same order."""

    @property
    def has_work(self) -> bool:
        """Whether a step would sample anything."""
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the queue, behind those with the same prompt."""
        self._waiting.setdefault(sequence.request.prompt_tokens, deque()).append(sequence)

    def admit(self) -> list[PromptGroup]:
        """Move sequences from the queue to new rows at the end, first come first served by prompt.

        Takes prompts while there are rows and the prompt tokens of this step fit the budget; the first prompt is
        taken whatever its length. The members of a group occupy consecutive rows.
        """
        groups: list[PromptGroup] = []
        budget = self._prefill_tokens
        while self._waiting and len(self.running) < self._max_batch_size:
            prompt_tokens, queue = next(iter(self._waiting.items()))
            if groups and len(prompt_tokens) > budget:
                break
            budget -= len(prompt_tokens)
            count = min(len(queue), self._max_batch_size - len(self.running))
            self.running.extend(queue.popleft() for _ in range(count))
            if not queue:
                del self._waiting[prompt_tokens]
            groups.append(PromptGroup(prompt_tokens=prompt_tokens, num_members=count))
        return groups

    def remove_waiting(self, request_id: str) -> Sequence | None:
        """Take a sequence out of the queue; None if it is not there."""
        for prompt_tokens, queue in self._waiting.items():
            for sequence in queue:
                if sequence.request.request_id == request_id:
                    queue.remove(sequence)
                    if not queue:
                        del self._waiting[prompt_tokens]
                    return sequence
        return None

    def take_all_waiting(self) -> list[Sequence]:
        """Empty the queue."""
        sequences = [sequence for queue in self._waiting.values() for sequence in queue]
        self._waiting.clear()
        return sequences

    def row_of(self, request_id: str) -> int | None:
        """Return the row of a running sequence; None if it does not run."""
        rows = (row for row, sequence in enumerate(self.running) if sequence.request.request_id == request_id)
        return next(rows, None)

    def remove_row(self, row: int) -> int | None:
        """End a row. Returns the row whose sequence now has number `row`, or None if it was the last one."""
        last = self.running.pop()
        if row == len(self.running):
            return None
        self.running[row] = last
        return len(self.running)
