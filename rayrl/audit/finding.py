"""What a check says: proven, refuted with violations, or not provable from what is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["proven", "refuted", "unproven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Example: `Finding(check="ages", claim="no token older than 2 versions was trained on", verdict="refuted",
    violations=("step 7: 12 tokens of versions below 4 ...",))`.
    """

    check: str
    """Short name."""
    claim: str
    """What is proven or refuted, one sentence."""
    verdict: Verdict
    violations: tuple[str, ...] = ()
    """Each names where and what, in the order found; empty unless refuted."""
    missing: str = ""
    """What would be needed to prove it, if it is unproven."""


def judge(check: str, claim: str, violations: Sequence[str], missing: str = "") -> Finding:
    """Return the finding: refuted by any violation, else unproven if something is missing, else proven."""
    verdict: Verdict = "refuted" if violations else "unproven" if missing else "proven"
    return Finding(check=check, claim=claim, verdict=verdict, violations=tuple(violations), missing=missing)
