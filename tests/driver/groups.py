"""Groups for driver tests."""

from rayrl.driver.group_buffer import BufferedGroup
from rayrl.types.prompt import PromptId
from rayrl.types.trajectory import FailureRecord, GroupSummary


def summary(
    ordinal: int = 0,
    *,
    oldest: int | None = 0,
    newest: int | None = None,
    rewards: tuple[float, ...] = (1.0, 0.0),
    failures: tuple[FailureRecord, ...] = (),
) -> GroupSummary:
    """Return the summary of a group sampled by versions `oldest` to `newest`."""
    return GroupSummary(
        prompt_id=PromptId(dataset="sums", epoch=0, ordinal=ordinal),
        num_usable=len(rewards),
        failures=failures,
        rewards=rewards,
        reward_parts={},
        num_tokens=(4,) * len(rewards),
        num_sampled_tokens=2 * len(rewards),
        num_truncated=0,
        oldest_version=oldest,
        newest_version=oldest if newest is None else newest,
        max_versions=1,
        seconds=0.5,
    )


def buffered(ticket: int, *, oldest: int = 0, newest: int | None = None) -> BufferedGroup:
    """Return a buffered group whose batch reference is a plain string."""
    return BufferedGroup(ticket=ticket, summary=summary(ticket, oldest=oldest, newest=newest), batch=f"ref-{ticket}")
