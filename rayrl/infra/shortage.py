"""Say why a placement plan does not fit a cluster. Pure, no Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayrl.infra.placement_plan import PlacementPlan, show_resources

_SETTINGS = {
    "CPU": (
        "training.parallel, training.cpus_per_worker, inference.num_engines, inference.cpus_per_engine, "
        "placement.rollout_cpus"
    ),
    "GPU": "training.parallel, training.gpus_per_worker, inference.num_engines, inference.gpus_per_engine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    """What a cluster has.

    Example: `ClusterResources(total={"CPU": 8.0}, free={"CPU": 6.0}, nodes=({"CPU": 8.0},))`.
    """

    total: Mapping[str, float]
    """All nodes together."""
    free: Mapping[str, float]
    """Not held by anyone but the plan itself."""
    nodes: tuple[Mapping[str, float], ...]
    """Total of each live node."""


def explain_shortage(plan: PlacementPlan, cluster: ClusterResources, waited_s: float) -> str:
    """Return the message for a plan that was not placed in time: asked, existing, missing, and what to change."""
    lines = [
        f"the cluster did not place what the run asks for within {waited_s:g} s "
        f"(the `deadlines.placement_s` of the config)",
        f"  asked in total: {show_resources(plan.total)}",
    ]
    for group in plan.groups:
        bundles = f"{len(group.bundles)} bundle(s) of {{{show_resources(group.bundles[0])}}}"
        lines.append(f"  group {group.name} ({group.strategy}): {bundles}")
    names = list(plan.total)
    lines.append(f"  the cluster has: {_of(cluster.total, names)} on {len(cluster.nodes)} node(s)")
    lines.append(f"  free for this run: {_of(cluster.free, names)}")
    missing = _missing(plan, cluster)
    lines += [f"  missing: {text}" for _, text in missing]
    lines.append(f"  to change: {_advice(plan, [name for name, _ in missing])}")
    return "\n".join(lines)


def _of(resources: Mapping[str, float], names: Sequence[str]) -> str:
    return show_resources({name: resources.get(name, 0.0) for name in names})


def _missing(plan: PlacementPlan, cluster: ClusterResources) -> list[tuple[str, str]]:
    """Return (resource, explanation) for each resource that is short; resource "" for a layout that does not fit."""
    rows = []
    for name, asked in plan.total.items():
        total, free = cluster.total.get(name, 0.0), cluster.free.get(name, 0.0)
        if asked > total:
            rows.append((name, f"{asked - total:g} {name}: asked {asked:g}, the whole cluster has {total:g}"))
        elif asked > free:
            rows.append((name, f"{asked - free:g} {name}: asked {asked:g}, others hold {total - free:g} of {total:g}"))
    if rows:
        return rows
    for group in plan.groups:
        for name, asked in group.bundles[0].items():
            largest = max((node.get(name, 0.0) for node in cluster.nodes), default=0.0)
            if asked > largest:
                rows.append((name, f"a node with {name} {asked:g} for one bundle; the largest has {largest:g}"))
    return rows or [("", "a layout: the sums suffice, but the bundles do not fit on the nodes as they are now")]


def _advice(plan: PlacementPlan, names: Sequence[str]) -> str:
    settings = [_SETTINGS[name] for name in names if name in _SETTINGS]
    if "" in names:
        strategies = ", ".join(sorted({group.strategy for group in plan.groups}))
        settings.append(f"placement.strategy (now {strategies}), or the size of one worker")
    return "lower " + "; ".join(settings) + "; or add nodes to the cluster" if settings else "add nodes to the cluster"
