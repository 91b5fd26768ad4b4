"""The nodes of the cluster: what is free on each, and which are being drained."""

from collections.abc import Collection, Mapping, Sequence

import ray

_ASK_S = 10.0


def fits(needs: Mapping[str, float], free: Sequence[Mapping[str, float]]) -> bool:
    """Return whether one of the nodes has what one member needs."""
    return any(all(node.get(name, 0.0) >= amount for name, amount in needs.items()) for node in free)


def free_by_node(avoid: Collection[str] = ()) -> list[dict[str, float]]:
    """Return the free resources of each node that is alive and not to be avoided. Asks the cluster: may block."""
    # Not public; the public call sums over the nodes, which says nothing about one actor. ray 2.55 to 2.60.
    from ray._private.state import available_resources_per_node

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(avoid)
    return [dict(free) for node, free in available_resources_per_node().items() if node in alive]


def is_node_alive(node: str) -> bool:
    """Return whether Ray counts a node as alive. Asks the cluster: may block."""
    return any(item["NodeID"] == node and item["Alive"] for item in ray.nodes())


def draining_nodes() -> frozenset[str]:
    """Return Ray's ids of the nodes that are about to be taken away. Asks the cluster: may block."""
    # Not public; Ray Serve reads it in the same way. ray 2.55 to 2.60.
    from ray._private.worker import global_worker

    return frozenset(node.hex() for node in global_worker.gcs_client.get_draining_nodes(timeout=_ASK_S))
