"""Admission: the capacity formula and what it bounds."""

from hypothesis import given
from hypothesis import strategies as st

from rayrl.driver.admission import admission_capacity, remaining_demand


def test_capacity_is_zero_when_all_slots_are_out() -> None:
    capacity = admission_capacity(max_staleness=1, groups_per_step=2, version=0, consumed=0, outstanding=4)
    assert capacity == 0


def test_capacity_grows_by_one_batch_when_a_step_is_published() -> None:
    capacity = admission_capacity(max_staleness=1, groups_per_step=2, version=1, consumed=2, outstanding=1)
    assert capacity == 3


def test_staleness_zero_admits_nothing_between_the_end_of_a_step_and_its_publication() -> None:
    capacity = admission_capacity(max_staleness=0, groups_per_step=4, version=0, consumed=4, outstanding=0)
    assert capacity == 0


def test_capacity_is_never_negative_when_fewer_slots_are_allowed_than_are_out() -> None:
    assert admission_capacity(max_staleness=0, groups_per_step=1, version=0, consumed=0, outstanding=9) == 0


def test_demand_ends_when_the_last_step_has_its_groups() -> None:
    assert remaining_demand(groups_per_step=4, num_steps=3, consumed=8, outstanding=3) == 1
    assert remaining_demand(groups_per_step=4, num_steps=3, consumed=8, outstanding=4) == 0


@given(
    eta=st.integers(0, 4),
    groups=st.integers(1, 5),
    events=st.lists(st.sampled_from(["admit", "train", "drop"]), max_size=60),
)
def test_at_most_eta_plus_one_batches_are_out_and_consumed_in_order_no_group_is_older_than_eta(
    eta: int, groups: int, events: list[str]
) -> None:
    version = consumed = 0
    out: list[int] = []  # version at admission, in order of admission
    for event in events:
        if event == "admit" and admission_capacity(
            max_staleness=eta, groups_per_step=groups, version=version, consumed=consumed, outstanding=len(out)
        ):
            out.append(version)
        elif event == "drop" and out:
            out.pop(0)
        elif event == "train" and len(out) >= groups:
            trained, out = out[:groups], out[groups:]
            assert max(version - admitted for admitted in trained) <= eta
            version, consumed = version + 1, consumed + groups
        assert len(out) <= (eta + 1) * groups
