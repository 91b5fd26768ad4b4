"""Failure budgets and slots."""

import pytest

from rayrl.driver.failure_budget import FailureBudget
from rayrl.driver.progress import Progress
from rayrl.errors import BudgetExhausted


def test_budget_raises_with_reason_and_setting_when_one_failure_too_many_comes_in_a_row() -> None:
    budget = FailureBudget(what="failed groups", limit=2, setting="driver.max_failed_groups")
    budget.fail("a")
    budget.fail("b")
    with pytest.raises(BudgetExhausted, match=r"3 failed groups in a row, driver.max_failed_groups allows 2.*: c"):
        budget.fail("c")


def test_success_sets_the_row_back_but_not_the_total() -> None:
    budget = FailureBudget(what="failed groups", limit=1, setting="x")
    budget.fail("a")
    budget.succeed()
    budget.fail("b")
    assert budget.total == 2


def test_slots_cannot_be_given_back_twice() -> None:
    progress = Progress()
    progress.admit()
    progress.release(1, consumed=True)
    with pytest.raises(AssertionError, match="more slots given back"):
        progress.release(1, consumed=False)


def test_dropped_groups_free_a_slot_without_counting_as_consumed() -> None:
    progress = Progress()
    progress.admit()
    progress.admit()
    progress.release(1, consumed=False)
    progress.release(1, consumed=True)
    assert (progress.outstanding, progress.consumed) == (0, 1)


def test_versions_only_go_up() -> None:
    progress = Progress(version=3)
    with pytest.raises(AssertionError, match="does not follow"):
        progress.publish(3)


def test_budget_raises_when_failures_are_too_large_a_share_though_never_in_a_row() -> None:
    budget = FailureBudget(what="skipped steps", limit=2, setting="x", share=0.4)
    for _ in range(2):
        budget.fail("a")
        budget.succeed()
    with pytest.raises(BudgetExhausted, match=r"3 of 5 tries were skipped steps.*max_failure_share=0.4; the last.*b"):
        budget.fail("b")


def test_end_of_a_run_that_failed_mostly_is_refused_though_it_was_too_short_for_the_row() -> None:
    budget = FailureBudget(what="skipped steps", limit=5, setting="x", share=0.5)
    budget.succeed()
    budget.fail("a")
    budget.finish()
    budget.fail("a")
    with pytest.raises(BudgetExhausted, match="2 of 3 tries were skipped steps"):
        budget.finish()
