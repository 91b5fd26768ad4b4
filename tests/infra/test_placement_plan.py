"""Placement plans, and the message when one does not fit."""

from typing import Any

import pytest

from rayrl.config.run import RunConfig, SFTRunConfig
from rayrl.errors import PlacementError
from rayrl.infra.placement_plan import (
    BundleGroup,
    PlacementPlan,
    describe_plan,
    plan_placement,
    plan_sft_placement,
    transfer_backend,
)
from rayrl.infra.shortage import ClusterResources, explain_shortage


def _config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "models/tiny"},
        "dataset": {"type": "jsonl", "path": "data.jsonl"},
        "reward": {"type": "exact_match"},
        "rollout": {"workflow": {"type": "single_turn"}, "group_size": 8, "sampling": {"max_new_tokens": 8}},
        "driver": {"groups_per_step": 4, "num_steps": 1},
        "training": {"optimizer": {"lr": 1e-5}},
        "inference": {"engine": {"type": "transformers"}},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return RunConfig.model_validate(base)


def test_training_and_inference_have_own_groups_when_disaggregated() -> None:
    plan = plan_placement(
        _config(training={"parallel": {"data": 2}}, inference={"num_engines": 3, "cpus_per_engine": 2.0})
    )

    assert [(group.name, group.bundles) for group in plan.groups] == [
        ("train", ({"CPU": 1.0},) * 2),
        ("inference", ({"CPU": 2.0},) * 3),
    ]
    assert plan.role("inference").slots == (("inference", 0), ("inference", 1), ("inference", 2))
    assert plan.total == {"CPU": 8.0}


def test_pairs_share_a_bundle_when_colocated() -> None:
    plan = plan_placement(
        _config(
            placement={"mode": "colocated"},
            training={"parallel": {"data": 2}, "gpus_per_worker": 1.0, "cpus_per_worker": 3.0},
            inference={"num_engines": 2, "gpus_per_engine": 1.0},
        )
    )

    (group,) = plan.groups
    assert group.bundles == ({"CPU": 4.0, "GPU": 1.0},) * 2
    train, inference = plan.role("train"), plan.role("inference")
    assert train.slots == inference.slots == (("colocated", 0), ("colocated", 1))
    assert (train.gpus, inference.gpus) == (0.5, 0.5)
    assert (train.cpus, inference.cpus) == (3.0, 1.0)


def test_a_gpu_is_not_shared_when_only_one_of_the_pair_wants_it() -> None:
    plan = plan_placement(_config(placement={"mode": "colocated"}, training={"gpus_per_worker": 2.0}))

    assert plan.groups[0].bundles == ({"CPU": 2.0, "GPU": 2.0},)
    assert (plan.role("train").gpus, plan.role("inference").gpus) == (2.0, 0.0)


def test_a_pair_is_refused_when_it_would_share_several_gpus() -> None:
    config = _config(
        placement={"mode": "colocated"}, training={"gpus_per_worker": 2.0}, inference={"gpus_per_engine": 1.0}
    )

    with pytest.raises(PlacementError, match=r"training\.gpus_per_worker=2 .*at most 1"):
        plan_placement(config)


def test_rollout_workers_have_no_bundle_when_they_reserve_nothing() -> None:
    assert plan_placement(_config()).role("rollout").slots == ()


def test_rollout_workers_have_bundles_when_they_reserve_cpus() -> None:
    plan = plan_placement(_config(placement={"rollout_cpus": 0.5}, rollout={"num_workers": 2}))

    assert plan.role("rollout").slots == (("rollout", 0), ("rollout", 1))
    assert plan.total == {"CPU": 3.0}


def test_there_are_no_groups_when_nothing_is_reserved() -> None:
    plan = plan_placement(_config(training={"cpus_per_worker": 0.0}, inference={"cpus_per_engine": 0.0}))

    assert plan.groups == ()
    assert plan.total == {}
    assert "total: nothing" in describe_plan(plan)


def test_sft_places_training_and_one_worker_that_encodes() -> None:
    config = SFTRunConfig.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "models/tiny"},
            "dataset": {"type": "jsonl", "path": "data.jsonl"},
            "sft": {"num_steps": 1, "batch_size": 4},
            "training": {"optimizer": {"lr": 1e-3}, "parallel": {"data": 2}},
        }
    )

    plan = plan_sft_placement(config)

    assert [(role.role, role.count) for role in plan.roles] == [("train", 2), ("rollout", 1)]
    assert plan.total == {"CPU": 2.0}


@pytest.mark.parametrize(
    ("mode", "train_gpus", "engine_gpus", "backend"),
    [
        ("disaggregated", 1.0, 1.0, "nccl"),
        ("disaggregated", 1.0, 0.0, "gloo"),
        ("disaggregated", 0.0, 0.0, "gloo"),
        ("colocated", 1.0, 1.0, "gloo"),
    ],
)
def test_transfer_uses_nccl_only_when_each_side_has_gpus_of_its_own(
    mode: str, train_gpus: float, engine_gpus: float, backend: str
) -> None:
    config = _config(
        placement={"mode": mode},
        training={"gpus_per_worker": train_gpus},
        inference={"gpus_per_engine": engine_gpus},
    )

    assert transfer_backend(config) == backend


def test_plan_is_described_as_a_table_with_the_total() -> None:
    text = describe_plan(plan_placement(_config(training={"parallel": {"data": 2}})))

    assert text.splitlines()[1].split() == ["train", "2", "1", "0", "group", "train,", "one", "bundle", "each"]
    assert text.splitlines()[-1] == "total: CPU 3"


def _plan(bundle: dict[str, float], count: int, strategy: str = "PACK") -> PlacementPlan:
    return PlacementPlan(groups=(BundleGroup(name="train", bundles=(bundle,) * count, strategy=strategy),), roles=())


@pytest.mark.parametrize(
    ("plan", "cluster", "expected"),
    [
        (
            _plan({"CPU": 2.0}, 6),
            ClusterResources(total={"CPU": 8.0}, free={"CPU": 8.0}, nodes=({"CPU": 8.0},)),
            ["missing: 4 CPU: asked 12, the whole cluster has 8", "training.cpus_per_worker"],
        ),
        (
            _plan({"CPU": 2.0}, 3),
            ClusterResources(total={"CPU": 8.0}, free={"CPU": 5.0}, nodes=({"CPU": 8.0},)),
            ["missing: 1 CPU: asked 6, others hold 3 of 8"],
        ),
        (
            _plan({"CPU": 1.0, "GPU": 1.0}, 1),
            ClusterResources(total={"CPU": 8.0}, free={"CPU": 8.0}, nodes=({"CPU": 8.0},)),
            ["missing: 1 GPU: asked 1, the whole cluster has 0", "training.gpus_per_worker"],
        ),
        (
            _plan({"CPU": 6.0}, 1),
            ClusterResources(total={"CPU": 8.0}, free={"CPU": 8.0}, nodes=({"CPU": 4.0}, {"CPU": 4.0})),
            ["missing: a node with CPU 6 for one bundle; the largest has 4"],
        ),
        (
            _plan({"CPU": 3.0}, 2, "STRICT_PACK"),
            ClusterResources(total={"CPU": 8.0}, free={"CPU": 8.0}, nodes=({"CPU": 4.0}, {"CPU": 4.0})),
            ["the bundles do not fit on the nodes", "placement.strategy (now STRICT_PACK)"],
        ),
    ],
)
def test_shortage_names_what_is_missing_and_what_to_change(
    plan: PlacementPlan, cluster: ClusterResources, expected: list[str]
) -> None:
    text = explain_shortage(plan, cluster, 120.0)

    for part in expected:
        assert part in text
