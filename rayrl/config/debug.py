"""What a run watches of itself: collectives, and steps that do not come."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class DebugConfig(Section):
    """Diagnosis of hangs."""

    collectives: Literal["off", "record", "check"] = "off"
    """`record` keeps the last collectives of each process in a file below the run's `logs/collectives`, for the report
    of a hang; `check` also compares each one with the other ranks before it starts, which costs a round trip."""
    collective_timeout_s: float = Field(default=60.0, gt=0)
    """`check`: until every rank has come to a collective, slow ranks included."""
    stall_s: float = Field(default=3600.0, gt=0)
    """Time without a finished step, evaluation and checkpoint included, after which the run reports what everything
    waits for."""
    on_stall: Literal["report", "stop"] = "report"
    """After the report: go on waiting, until a deadline ends it, or end the run with the cause that was found."""
