"""The order in which prompts are handed out, and which of them are accounted for.

    row --next_prompt--> out --account----> accounted for (the frontier follows)
                          |
                          +---give_back---> returned --next_prompt--> out

A position counts rows over all epochs: epoch * length + ordinal. Everything below the frontier is accounted for;
a set holds what is accounted for beyond it. A saved state is those two and nothing else, so a prompt that was out
when the state was written is handed out again after a restore: the cursor can never run ahead of what was trained.
"""

import hashlib
import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rayrl.datasets.source import PromptSource
from rayrl.errors import CheckpointError, DataExhausted, DatasetError, IllegalTransition
from rayrl.types.prompt import Prompt, PromptId

_SAMPLE_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStreamStatus:
    """What a stream holds at one moment."""

    frontier: PromptId
    """The first prompt that is not accounted for."""
    num_out: int
    """Handed out and not yet accounted for or given back."""
    num_returned: int
    """Given back and waiting to be handed out again."""
    num_ahead: int
    """Accounted for beyond the frontier."""


class PromptStream:
    """Hands out every row once per epoch, for ever or for `max_epochs`. Used from one thread.

    The order of an epoch is a permutation drawn from (seed, epoch), the same in every process and release.
    """

    def __init__(self, source: PromptSource, *, seed: int, shuffle: bool, max_epochs: int | None = None) -> None:
        self._source = source
        self._max_epochs = max_epochs
        self._length = len(source)
        self._seed = seed
        self._shuffle = shuffle
        self._frontier = 0
        self._ahead: set[int] = set()
        self._next = 0
        self._sample_digest: str | None = None
        self._out: set[int] = set()
        self._returned: list[int] = []
        # Two epochs: at the turn of one, prompts of the old epoch still come back.
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @property
    def frontier(self) -> PromptId:
        """The first prompt that is not accounted for; its epoch is the number of finished epochs."""
        return self._id(self._frontier)

    def next_prompt(self) -> Prompt:
        """Return the earliest prompt that was given back, else the next one.

        Raises DatasetError for a bad row, and DataExhausted when all epochs were handed out.
        """
        if self._returned:
            prompt = self._prompt(self._returned[0])
            self._out.add(heapq.heappop(self._returned))
            return prompt
        # A held prompt may be accounted for before the cursor has passed it.
        self._next = max(self._next, self._frontier)
        while self._next in self._ahead or self._next in self._out:
            self._next += 1
        if self._max_epochs is not None and self._next >= self._max_epochs * self._length:
            raise DataExhausted(
                f"dataset {self._source.name} is exhausted: all {self._length} prompts were handed out "
                f"dataset.epochs={self._max_epochs} times; raise it, or ask for fewer steps (driver.num_steps)"
            )
        prompt = self._prompt(self._next)
        self._out.add(self._next)
        self._next += 1
        return prompt

    def give_back(self, prompt_id: PromptId) -> None:
        """Take a prompt that was dropped or lost; it comes again with the same id.

        Raises IllegalTransition if it is not out.
        """
        position = self._take(prompt_id, "given back")
        heapq.heappush(self._returned, position)

    def account(self, prompt_id: PromptId) -> None:
        """The prompt has its outcome and is not handed out again. Raises IllegalTransition if it is not out."""
        self._ahead.add(self._take(prompt_id, "accounted for"))
        while self._frontier in self._ahead:
            self._ahead.remove(self._frontier)
            self._frontier += 1

    def status(self) -> PromptStreamStatus:
        """Return what the stream holds now."""
        return PromptStreamStatus(
            frontier=self.frontier,
            num_out=len(self._out),
            num_returned=len(self._returned),
            num_ahead=len(self._ahead),
        )

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in JSON types only."""
        return {
            **self._fingerprint(),
            "frontier": list(divmod(self._frontier, self._length)),
            "accounted_ahead": [list(divmod(position, self._length)) for position in sorted(self._ahead)],
        }

    def restore(self, state: Mapping[str, Any], *, held: Collection[PromptId] = ()) -> None:
        """Continue from `state`: what was not accounted for then is handed out again in order.

        Args:
            state: of an earlier stream over the same source.
            held: prompts whose groups are kept elsewhere; they count as out and are not handed out again.

        Raises CheckpointError, and changes nothing, if `state` is of another source, seed or order, or if a held
        prompt is accounted for already.
        """
        for key, own in self._fingerprint().items():
            # Checkpoints of earlier releases have no sample.
            if state.get(key, own if key == "sample" else None) != own:
                raise CheckpointError(
                    f"the checkpoint's dataset has {key}={state.get(key)!r}, this run's has {own!r}: resume with the "
                    "dataset and run.seed of the checkpoint, or start a new run"
                )
        frontier = self._position(*state["frontier"])
        ahead = {self._position(epoch, ordinal) for epoch, ordinal in state["accounted_ahead"]}
        out: set[int] = set()
        for prompt_id in held:
            position = self._position(prompt_id.epoch, prompt_id.ordinal)
            if prompt_id.dataset != self._source.name or position < frontier or position in ahead or position in out:
                raise CheckpointError(
                    f"held prompt {prompt_id} is of another dataset, given twice, or accounted for in the checkpoint"
                )
            out.add(position)
        self._frontier = self._next = frontier
        self._ahead, self._out, self._returned = ahead, out, []

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "source": self._source.name,
            "length": self._length,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sample": self._sample(),
        }

    def _sample(self) -> str:
        """Return a digest of a few rows: a source that was edited keeps its name, and often its length."""
        if self._sample_digest is None:
            digest = hashlib.blake2b(digest_size=16)
            for index in sorted({number * (self._length - 1) // _SAMPLE_ROWS for number in range(_SAMPLE_ROWS + 1)}):
                try:
                    row = self._source.row(index)
                    digest.update(repr((row.text, row.answer, row.messages)).encode())
                except DatasetError:
                    # Told when the row is handed out.
                    digest.update(b"bad")
            self._sample_digest = digest.hexdigest()
        return self._sample_digest

    def _take(self, prompt_id: PromptId, action: str) -> int:
        """Return the position of a prompt that is out, which it then is no longer."""
        position = self._position(prompt_id.epoch, prompt_id.ordinal)
        if prompt_id.dataset != self._source.name or position not in self._out:
            if position < self._frontier or position in self._ahead:
                reason = "it is accounted for already"
            elif position in self._returned:
                reason = "it was given back and not handed out again"
            else:
                reason = "it was never handed out"
            raise IllegalTransition(f"prompt {prompt_id} cannot be {action}: {reason}")
        self._out.remove(position)
        return position

    def _position(self, epoch: int, ordinal: int) -> int:
        return epoch * self._length + ordinal

    def _id(self, position: int) -> PromptId:
        epoch, ordinal = divmod(position, self._length)
        return PromptId(dataset=self._source.name, epoch=epoch, ordinal=ordinal)

    def _prompt(self, position: int) -> Prompt:
        prompt_id = self._id(position)
        index = int(self._order(prompt_id.epoch)[prompt_id.ordinal]) if self._shuffle else prompt_id.ordinal
        row = self._source.row(index)
        return Prompt(id=prompt_id, text=row.text, answer=row.answer, messages=row.messages, metadata=row.metadata)

    def _draw_order(self, epoch: int) -> Any:
        # RandomState, whose numbers numpy has promised never to change; those of Generator may.
        bits = np.random.MT19937(np.random.SeedSequence([self._seed, epoch]))
        return np.random.RandomState(bits).permutation(self._length)
