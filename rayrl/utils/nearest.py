"""The nearest valid name, for errors about unknown ones."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name most like `name`, or None if none is close."""
    matches = get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` or an empty string."""
    match = nearest(name, valid)
    return f" (did you mean {match!r}?)" if match else ""
