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
