"""What becomes of a finished group when a batch is formed. Pure; the train loop acts on it.

Age = version of the weights that are about to be trained, minus the oldest version among the loss-carrying tokens.
The time that a group spent in queues is in it, since it is taken when the batch is formed.
"""

from enum import Enum
from typing import Literal

from rayrl.types.trajectory import GroupSummary

StalePolicy = Literal["mask", "drop", "keep"]


class StaleDecision(Enum):
    """What to do with one group."""

    TRAIN = "train"
    """No token is older than the bound."""
    MASK = "mask"
    """Some tokens are too old; they leave the loss, the others are trained on."""
    KEEP = "keep"
    """Some tokens are too old and are trained on all the same; the run warns and counts."""
    DROP = "drop"
    """Too old: the prompt goes back to the dataset and is sampled again."""


def group_age(group: GroupSummary, version: int) -> int:
    """Return the age in versions of a group's oldest token at `version`."""
    assert group.oldest_version is not None, "a group with usable trajectories has versions"
    assert group.newest_version is not None
    assert group.newest_version <= version, (
        f"group {group.prompt_id} has tokens of version {group.newest_version}, newer than the trained one {version}"
    )
    return version - group.oldest_version


def decide(group: GroupSummary, *, version: int, max_staleness: int, on_stale: StalePolicy) -> StaleDecision:
    """Return what to do with a group that has usable trajectories.

    Under `mask`, a group without a single token young enough is dropped: it has nothing left to teach.
    """
    if group_age(group, version) <= max_staleness:
        return StaleDecision.TRAIN
    if on_stale == "keep":
        return StaleDecision.KEEP
    assert group.newest_version is not None
    if on_stale == "mask" and version - group.newest_version <= max_staleness:
        return StaleDecision.MASK
    return StaleDecision.DROP


def oldest_allowed_version(*, version: int, max_staleness: int, on_stale: StalePolicy) -> int | None:
    """Return the version below which training masks tokens; None where nothing is masked."""
    return version - max_staleness if on_stale == "mask" else None
