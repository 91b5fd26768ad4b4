"""Turn a placement plan into Ray placement groups, with a deadline, and hand out the spawn options of each member."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayrl.errors import PlacementError
from rayrl.infra.placement_plan import PlacementPlan, sum_resources
from rayrl.infra.shortage import ClusterResources, explain_shortage
from rayrl.utils.logger import get_logger

_LOG = get_logger("placement")
# Waiting in short turns lets signal handlers of the main thread run in between.
_TURN_S = 0.5


class Reservation:
    """Placement groups that a run holds until `release`, or until the job's process ends."""

    def __init__(self, plan: PlacementPlan, groups: Mapping[str, PlacementGroup]) -> None:
        self.plan = plan
        self._groups = dict(groups)

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Return the keyword arguments of Ray's `.options(...)` for one member of a role."""
        planned = self.plan.role(role)
        if not 0 <= index < planned.count:
            raise IndexError(f"role {role!r} has {planned.count} members; there is no member {index}")
        options: dict[str, Any] = {"num_cpus": planned.cpus, "num_gpus": planned.gpus}
        if planned.slots:
            group, bundle = planned.slots[index]
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._groups[group], placement_group_bundle_index=bundle
            )
        return options

    def options_elsewhere(self, role: str) -> dict[str, Any]:
        """Return the keyword arguments of `.options(...)` for a member beyond the plan, outside of all groups."""
        planned = self.plan.role(role)
        return {"num_cpus": planned.cpus, "num_gpus": planned.gpus}

    def release(self) -> None:
        """Give the resources back; Ray kills actors that still sit in them. Calling it again does nothing."""
        while self._groups:
            _, group = self._groups.popitem()
            remove_placement_group(group)


def reserve(plan: PlacementPlan, timeout_s: float) -> Reservation:
    """Create the plan's placement groups and wait until all are there.

    Blocks up to `timeout_s`; call it from a thread where an event loop must go on.

    Raises:
        PlacementError: not there in time; the groups are removed again. The message names what was asked, what the
            cluster has, which resource is missing and which settings to change.
    """
    run_id = uuid.uuid4().hex[:8]
    groups: dict[str, PlacementGroup] = {}
    placed = False
    try:
        for group in plan.groups:
            bundles = [dict(bundle) for bundle in group.bundles]
            groups[group.name] = placement_group(bundles, group.strategy, name=f"rayrl-{group.name}-{run_id}")
        waiting = _wait(groups, timeout_s)
        if waiting:
            raise PlacementError(explain_shortage(plan, _resources(plan, waiting), timeout_s))
        placed = True
    finally:
        if not placed:
            for handle in groups.values():
                remove_placement_group(handle)
    _LOG.info("placed %s", ", ".join(groups) or "nothing: no role reserves resources")
    return Reservation(plan, groups)


def _wait(groups: Mapping[str, PlacementGroup], timeout_s: float) -> list[str]:
    """Return the names of the groups that are not there when the time is up."""
    deadline = time.monotonic() + timeout_s
    waiting = list(groups)
    while waiting:
        left = deadline - time.monotonic()
        if groups[waiting[0]].wait(timeout_seconds=max(0.0, min(_TURN_S, left))):
            waiting.pop(0)
        elif left <= 0:
            # The later ones may be there already: only the first was asked so far.
            return [name for name in waiting if not groups[name].wait(timeout_seconds=0)]
    return []


def _resources(plan: PlacementPlan, waiting: list[str]) -> ClusterResources:
    held = [bundle for group in plan.groups if group.name not in waiting for bundle in group.bundles]
    free = sum_resources([ray.available_resources(), *held])
    nodes = tuple(node["Resources"] for node in ray.nodes() if node["Alive"])
    return ClusterResources(total=ray.cluster_resources(), free=free, nodes=nodes)
