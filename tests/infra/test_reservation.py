"""Placement groups on a real cluster of eight logical CPUs."""

import sys

import pytest
import ray
from ray.util import placement_group_table

from rayrl.errors import PlacementError
from rayrl.infra.placement_plan import BundleGroup, PlacementPlan, RolePlan
from rayrl.infra.reservation import reserve

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def _plan(count: int, cpus: float, strategy: str = "PACK") -> PlacementPlan:
    slots = tuple(("train", index) for index in range(count))
    return PlacementPlan(
        groups=(BundleGroup(name="train", bundles=({"CPU": cpus},) * count, strategy=strategy),),
        roles=(
            RolePlan(role="train", count=count, cpus=cpus, gpus=0.0, slots=slots),
            RolePlan(role="rollout", count=1, cpus=0.0, gpus=0.0, slots=()),
        ),
    )


def _live_groups() -> list[str]:
    return [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]


# Workers cannot import this module: its classes travel by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Where:
    """Says in which placement group it runs."""

    def group(self) -> str | None:
        return ray.get_runtime_context().get_placement_group_id()


def test_error_names_cpus_and_numbers_when_the_cluster_is_too_small() -> None:
    with pytest.raises(PlacementError) as caught:
        reserve(_plan(6, 2.0), 0.5)

    message = str(caught.value)
    assert "asked in total: CPU 12" in message
    assert "group train (PACK): 6 bundle(s) of {CPU 2}" in message
    assert "the cluster has: CPU 8 on 1 node(s)" in message
    assert "missing: 4 CPU: asked 12, the whole cluster has 8" in message
    assert "training.cpus_per_worker" in message
    assert _live_groups() == []


def test_error_says_that_others_hold_the_rest_when_the_cluster_is_busy() -> None:
    first = reserve(_plan(3, 2.0), 30.0)
    try:
        with pytest.raises(PlacementError, match="missing: 2 CPU: asked 4, others hold 6 of 8"):
            reserve(_plan(2, 2.0), 0.5)
    finally:
        first.release()


def test_resources_are_free_again_when_a_reservation_is_released() -> None:
    first = reserve(_plan(4, 2.0), 30.0)
    first.release()
    first.release()

    second = reserve(_plan(4, 2.0), 30.0)
    second.release()

    assert _live_groups() == []


def test_member_runs_in_its_group_only_when_it_has_a_slot() -> None:
    reservation = reserve(_plan(1, 1.0), 30.0)
    actors = []
    try:
        for role in ("train", "rollout"):
            actors.append(ray.remote(Where).options(**reservation.options(role, 0)).remote())
        placed, free = ray.get([actor.group.remote() for actor in actors], timeout=60)
    finally:
        for actor in actors:
            ray.kill(actor)
        reservation.release()

    assert placed is not None
    assert free is None


def test_options_name_the_members_when_the_index_is_outside() -> None:
    reservation = reserve(_plan(1, 1.0), 30.0)
    try:
        with pytest.raises(IndexError, match="'train' has 1 members; there is no member 1"):
            reservation.options("train", 1)
        with pytest.raises(KeyError, match="no role 'critic' in the placement plan; it has train, rollout"):
            reservation.options("critic", 0)
    finally:
        reservation.release()
