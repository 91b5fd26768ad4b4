"""Properties of plans: nothing lost, nothing twice, within the budget, the same number everywhere."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.training.micro_batches import plan_micro_batches

_LENGTHS = st.lists(st.integers(1, 300), max_size=60)
_RANKS = st.integers(1, 5)
_BUDGET = st.integers(1, 1000)


@given(lengths=_LENGTHS, num_ranks=_RANKS, budget=_BUDGET)
@settings(deadline=None)
def test_every_row_is_in_exactly_one_micro_batch(lengths: list[int], num_ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks, budget)

    rows = sorted(row for rank in plan.ranks for micro in rank for row in micro)
    assert rows == list(range(len(lengths)))


@given(lengths=_LENGTHS, num_ranks=_RANKS, budget=_BUDGET)
@settings(deadline=None)
def test_padded_size_stays_within_the_budget_unless_a_row_alone_exceeds_it(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    plan = plan_micro_batches(lengths, num_ranks, budget)

    for rank in plan.ranks:
        for micro in rank:
            size = len(micro) * max((lengths[row] for row in micro), default=0)
            assert size <= budget or len(micro) == 1


@given(lengths=_LENGTHS, num_ranks=_RANKS, budget=_BUDGET)
@settings(deadline=None)
def test_all_ranks_have_the_same_number_of_micro_batches_and_at_least_one(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    plan = plan_micro_batches(lengths, num_ranks, budget)

    assert len(plan.ranks) == num_ranks
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    assert plan.num_micro_batches >= 1


@given(lengths=_LENGTHS, num_ranks=_RANKS)
@settings(deadline=None)
def test_no_rank_has_more_than_its_share_by_more_than_the_longest_row(lengths: list[int], num_ranks: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks, 1000)

    loads = [sum(lengths[row] for micro in rank for row in micro) for rank in plan.ranks]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths=_LENGTHS, num_ranks=_RANKS, budget=_BUDGET)
@settings(deadline=None)
def test_a_micro_batch_holds_neighbours_in_length(lengths: list[int], num_ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks, budget)

    for rank in plan.ranks:
        sizes = [lengths[row] for micro in rank for row in micro]
        assert sizes == sorted(sizes, reverse=True)


def test_a_rank_without_rows_gets_empty_micro_batches() -> None:
    plan = plan_micro_batches([7, 3], 3, 100)

    assert plan.ranks == (((0,),), ((1,),), ((),))
