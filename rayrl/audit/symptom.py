"""One thing that is wrong with a run, as the doctor tells it."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["failure", "hang", "memory", "records", "wrong results"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One thing that is wrong.

    Example: `Symptom(kind="hang", what="a wait ended by its deadline: ...", evidence=("logs/failure.txt has ...",),
    setting="driver.deadlines.generation_s")`.
    """

    kind: Kind
    what: str
    evidence: tuple[str, ...]
    setting: str
    """What to change, or where to look next."""
