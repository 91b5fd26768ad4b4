"""Finds stop strings in text that grows token by token, without decoding all of it at each step."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
"""What tokenizers write for bytes that are not yet a whole character."""


class StopStrings:
    """Watches the completion of one request.

    Only a tail is decoded: from the token before the last settled one, so that tokenizers that treat the first
    token of a text specially (a leading space) give the same text as when everything is decoded at once.
    """

    def __init__(self, stop: tuple[str, ...], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop = stop
        self._decode = decode
        self._keep = max(len(text) for text in stop) - 1
        self._tail = ""
        self._prefix = 0
        self._read = 0

    def found(self, tokens: list[int]) -> bool:
        """Return whether a stop string has appeared; `tokens` is the completion so far, longer at each call."""
        settled = self._decode(tokens[self._prefix : self._read])
        fresh = self._decode(tokens[self._prefix :])[len(settled) :]
        text = self._tail + fresh
        if any(stop in text for stop in self._stop):
            return True
        if fresh and not fresh.endswith(_INCOMPLETE):
            self._tail = text[-self._keep :] if self._keep else ""
            self._prefix, self._read = self._read, len(tokens)
        return False
