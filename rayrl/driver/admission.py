"""Admission: how many more groups may start. Pure; the rollout loop acts on it.

With B groups a step and a bound of eta versions, at most (eta + 1) * B groups are out at any moment: admitted and
neither trained, nor dropped. `docs/dataflow.md` proves which ages this allows.
"""


def admission_capacity(
    *, max_staleness: int, groups_per_step: int, version: int, consumed: int, outstanding: int
) -> int:
    """Return how many groups may be admitted now, at least 0.

        capacity = (eta + version + 1) * B - (consumed + outstanding)

    Source: Fu et al. 2025 (AReaL), arXiv:2505.24298, equation 3, in groups instead of samples.

    Args:
        max_staleness: eta, in versions.
        groups_per_step: B.
        version: current published version.
        consumed: groups that finished training steps since version 0; a dropped group is not consumed.
        outstanding: groups that hold a slot: being generated, buffered, or in a training step that has not ended.
    """
    return max(0, (max_staleness + version + 1) * groups_per_step - (consumed + outstanding))


def remaining_demand(*, groups_per_step: int, num_steps: int, consumed: int, outstanding: int) -> int:
    """Return how many more groups the run can still use: nothing is sampled that no step will train on."""
    return max(0, num_steps * groups_per_step - (consumed + outstanding))
