"""Tokens and the versions that sampled them, as an engine reports both, to chunks of one version each."""

from collections.abc import Sequence
from typing import get_args

from rayrl.errors import EngineError
from rayrl.types.sampling import Chunk, FinishReason


class ChunkBuilder:
    """Chunks of one request: `interval` tokens each, fewer where the version changes and at the end."""

    def __init__(self, request_id: str, interval: int, version: int) -> None:
        """`version` is that of a last chunk without tokens, where none was ever sampled."""
        self._id = request_id
        self._interval = interval
        self._version = version
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._start = 0

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        starts: Sequence[tuple[int, int]] | None,
        finish_reason: str | None,
    ) -> list[Chunk]:
        """Return the chunks that are complete now.

        `starts` are (version, first token) of all spans since the beginning of the completion; None holds the tokens
        back until they are known. EngineError if a request ends without them, or with an unknown reason.
        """
        self._tokens += tokens
        self._logprobs += logprobs
        reason = _finish_reason(self._id, finish_reason)
        if self._tokens and not starts:
            if reason is not None:
                raise EngineError(f"request {self._id!r} ended with {len(self._tokens)} tokens of unknown version")
            return []
        chunks: list[Chunk] = []
        while self._tokens:
            version, until = self._span(starts or ())
            count = min(self._interval, len(self._tokens), len(self._tokens) if until is None else until - self._start)
            if count < self._interval and count == len(self._tokens) and reason is None:
                break
            chunks.append(self._take(count, version))
        if reason is not None:
            last = chunks.pop() if chunks else self._take(0, self._version)
            chunks.append(
                Chunk(
                    request_id=self._id,
                    tokens=last.tokens,
                    logprobs=last.logprobs,
                    version=last.version,
                    finish_reason=reason,
                )
            )
        return chunks

    def _span(self, starts: Sequence[tuple[int, int]]) -> tuple[int, int | None]:
        """Return the version of the next token, and where its span ends."""
        until = None
        for version, first in reversed(starts):
            if first <= self._start:
                return version, until
            until = first
        raise EngineError(f"request {self._id!r}: no version for token {self._start}; known are {list(starts)}")

    def _take(self, count: int, version: int) -> Chunk:
        chunk = Chunk(
            request_id=self._id,
            tokens=tuple(self._tokens[:count]),
            logprobs=tuple(self._logprobs[:count]),
            version=version,
        )
        del self._tokens[:count], self._logprobs[:count]
        self._start += count
        self._version = version
        return chunk


def _finish_reason(request_id: str, reason: str | None) -> FinishReason | None:
    for known in get_args(FinishReason):
        if reason == known:
            return known
    if reason is not None:
        raise EngineError(f"request {request_id!r} ended in the engine with {reason!r}")
    return None
