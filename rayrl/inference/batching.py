"""Continuous batching: admits, steps, ends and reports sequences. Synchronous; runs in the engine's thread.

queue --admit--> rows --model.step--> one token per row --> chunks, ends
                  ^                                           |
                  +---- the last row fills the gap <----------+
"""

import math
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rayrl.errors import EngineError
from rayrl.inference.engine import NO_VERSION, RequestRefused
from rayrl.inference.scheduler import Scheduler, Sequence
from rayrl.inference.stop_strings import StopStrings
from rayrl.inference.token_model import TokenModel
from rayrl.types.sampling import Chunk, FinishReason, GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor

Event = tuple[str, Chunk | EngineError]
"""Request id, and a chunk or what ended the request."""

_SEED_BITS = 64


class Batcher:
    """The sequences of one engine, the version of its weights, and its counters."""

    def __init__(
        self,
        model: TokenModel,
        *,
        max_batch_size: int,
        prefill_tokens: int,
        stream_interval: int,
        seed: int,
        on_dequeue: Callable[[int], None],
    ) -> None:
        """`seed` gives seeds to requests without one; `on_dequeue` hears how many requests left the queue."""
        self._model = model
        self._scheduler = Scheduler(max_batch_size, prefill_tokens)
        self._max_batch_size = max_batch_size
        self._stream_interval = stream_interval
        self._seeds = random.Random(seed)
        self._on_dequeue = on_dequeue
        self.version = NO_VERSION
        self.total_requests = 0
        self.total_tokens = 0
        self.total_prefill_tokens = 0
        self.total_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would sample anything."""
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        """Rows in use."""
        return len(self._scheduler.running)

    @property
    def kv_use(self) -> float:
        """Tokens of all rows over rows times context."""
        used = sum(sequence.num_context for sequence in self._scheduler.running)
        return used / (self._max_batch_size * self._model.limits.max_context)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request that was checked."""
        params = request.params
        drawn = self._seeds.getrandbits(_SEED_BITS)
        self._scheduler.add(
            Sequence(
                request=request,
                seed=drawn if params.seed is None else params.seed % 2**_SEED_BITS,
                stop_strings=StopStrings(params.stop, self._model.decode) if params.stop else None,
            )
        )

    def abort(self, request_id: str) -> list[Event]:
        """End one request; nothing happens if it is not here any more."""
        row = self._scheduler.row_of(request_id)
        if row is not None:
            sequence = self._scheduler.running[row]
            self._remove_rows([row])
            return [self._end(sequence, "abort")]
        waiting = self._scheduler.remove_waiting(request_id)
        if waiting is None:
            return []
        self._on_dequeue(1)
        return [self._end(waiting, "abort")]

    def abort_all(self) -> list[Event]:
        """End all requests."""
        waiting = self._scheduler.take_all_waiting()
        self._on_dequeue(len(waiting))
        running = list(self._scheduler.running)
        self._remove_rows(list(range(len(running))))
        return [self._end(sequence, "abort") for sequence in (*running, *waiting)]

    def load(
        self, version: int, tensors: "Mapping[str, Tensor]", *, may_keep: bool = False
    ) -> tuple[list[Event], bool]:
        """Replace the weights; what the old ones sampled leaves in a chunk of its own.

        Returns that, and what `TokenModel.load` says of the tensors.
        """
        if version < 0:
            raise EngineError(f"version {version} cannot be loaded: versions start at 0")
        kept = self._model.load(tensors, may_keep=may_keep)
        pending = [sequence for sequence in self._scheduler.running if sequence.num_sent < len(sequence.tokens)]
        events: list[Event] = [(item.request.request_id, item.take_chunk(self.version)) for item in pending]
        self.version = version
        return events, kept

    def step(self) -> list[Event]:
        """Sample one token for every row, new rows included."""
        groups = self._scheduler.admit()
        if groups:
            self._on_dequeue(sum(group.num_members for group in groups))
        rows = self._scheduler.running
        tokens, logprobs = self._model.step(rows, groups)
        self.total_steps += 1
        self.total_tokens += len(rows)
        self.total_prefill_tokens += sum(len(group.prompt_tokens) for group in groups)
        events: list[Event] = []
        ended: list[int] = []
        for row, (sequence, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            if not math.isfinite(logprob):
                events.append(self._fail_row(row))
                ended.append(row)
                continue
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            reason = self._finish_reason(sequence)
            if reason is not None:
                events.append(self._end(sequence, reason))
                ended.append(row)
            elif len(sequence.tokens) - sequence.num_sent >= self._stream_interval:
                events.append((sequence.request.request_id, sequence.take_chunk(self.version)))
        self._remove_rows(ended)
        return events

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        params = sequence.request.params
        num_tokens = len(sequence.tokens)
        # Stop strings look at every token, so that they also know the text of the first `min_new_tokens`.
        has_text = sequence.stop_strings is not None and sequence.stop_strings.found(sequence.tokens)
        has_stop_id = sequence.tokens[-1] in params.stop_token_ids or self._model.ends(sequence)
        if num_tokens > params.min_new_tokens and (has_text or has_stop_id):
            return "stop"
        if num_tokens >= params.max_new_tokens or sequence.num_context >= self._model.limits.max_context:
            return "length"
        return None

    def _end(self, sequence: Sequence, reason: FinishReason) -> Event:
        self.total_requests += 1
        return sequence.request.request_id, sequence.take_chunk(self.version, reason)

    def _fail_row(self, row: int) -> Event:
        self.total_requests += 1
        self._model.clear_row(row)
        request_id = self._scheduler.running[row].request.request_id
        return request_id, RequestRefused(
            f"request {request_id!r}: weights of version {self.version} give logits that are not finite"
        )

    def _remove_rows(self, rows: list[int]) -> None:
        # From the end, so that a row that takes a place is never one that is still to be removed.
        for row in sorted(rows, reverse=True):
            source = self._scheduler.remove_row(row)
            if source is not None:
                # The token that was sampled last is not in the cache yet.
                self._model.move_row(source, row, self._scheduler.running[row].num_context - 1)
