"""Staleness: age, and what each policy does with a group."""

import dataclasses

import pytest
from groups import buffered, summary

from rayrl.driver.batch import plan_batch
from rayrl.driver.staleness import StaleDecision, decide, group_age, oldest_allowed_version


def test_age_is_counted_from_the_oldest_token_when_a_group_spans_versions() -> None:
    assert group_age(summary(oldest=3, newest=5), version=6) == 3


def test_group_newer_than_the_trained_version_is_an_error() -> None:
    with pytest.raises(AssertionError, match="newer than the trained one 4"):
        group_age(summary(oldest=4, newest=5), version=4)


@pytest.mark.parametrize(
    ("oldest", "newest", "policy", "decision"),
    [
        (3, 3, "mask", StaleDecision.TRAIN),
        (2, 5, "mask", StaleDecision.MASK),
        (2, 2, "mask", StaleDecision.DROP),
        (2, 5, "drop", StaleDecision.DROP),
        (2, 5, "keep", StaleDecision.KEEP),
        (3, 5, "drop", StaleDecision.TRAIN),
    ],
)
def test_decision_follows_the_policy_when_the_bound_is_two_at_version_five(
    oldest: int, newest: int, policy: str, decision: StaleDecision
) -> None:
    assert decide(summary(oldest=oldest, newest=newest), version=5, max_staleness=2, on_stale=policy) is decision  # type: ignore[arg-type]


def test_only_mask_gives_training_a_bound_to_mask_by() -> None:
    assert oldest_allowed_version(version=5, max_staleness=2, on_stale="mask") == 3
    assert oldest_allowed_version(version=5, max_staleness=2, on_stale="drop") is None
    assert oldest_allowed_version(version=5, max_staleness=2, on_stale="keep") is None


def test_batch_takes_groups_in_order_of_admission_when_more_are_ready() -> None:
    plan = plan_batch(
        [buffered(1), buffered(4), buffered(7)], version=0, groups_per_step=2, max_staleness=0, on_stale="mask"
    )
    assert [group.ticket for group in plan.chosen] == [1, 4]
    assert plan.is_complete


def test_batch_is_in_order_of_prompts_when_a_later_one_was_admitted_first() -> None:
    # After a resume buffered groups come first.
    early, late = buffered(1), buffered(0)
    early = dataclasses.replace(early, summary=summary(3))
    late = dataclasses.replace(late, summary=summary(9))
    plan = plan_batch([late, early], version=0, groups_per_step=2, max_staleness=0, on_stale="mask")
    assert [group.summary.prompt_id.ordinal for group in plan.chosen] == [3, 9]


def test_batch_is_incomplete_when_stale_groups_are_dropped() -> None:
    plan = plan_batch(
        [buffered(1, oldest=0), buffered(2, oldest=5)], version=5, groups_per_step=2, max_staleness=1, on_stale="drop"
    )
    assert [group.ticket for group in plan.dropped] == [1]
    assert not plan.is_complete


def test_stale_groups_are_dropped_beyond_the_batch_too() -> None:
    plan = plan_batch(
        [buffered(1, oldest=5), buffered(2, oldest=0)], version=5, groups_per_step=1, max_staleness=1, on_stale="drop"
    )
    assert [group.ticket for group in plan.dropped] == [2]
    assert plan.is_complete


def test_masked_groups_and_ages_are_counted_when_policy_is_mask() -> None:
    plan = plan_batch(
        [buffered(1, oldest=2, newest=5), buffered(2, oldest=4)],
        version=5,
        groups_per_step=2,
        max_staleness=2,
        on_stale="mask",
    )
    assert plan.num_masked == 1
    assert plan.ages == (3, 1)
