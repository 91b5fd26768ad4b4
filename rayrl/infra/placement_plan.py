"""What a run asks of the cluster: which worker sits in which bundle of which placement group. Pure, no Ray.

`disaggregated` has one group for training and one for inference; `colocated` has one group whose bundle i holds
training worker i and engine i. Workers that reserve nothing need no bundle and run anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rayrl.config.frozen import FrozenModelSection
from rayrl.config.reward import reward_models
from rayrl.config.run import RunConfig
from rayrl.config.supervised import SupervisedRunConfig
from rayrl.config.training import TrainingConfig
from rayrl.config.transfer import TransferConfig
from rayrl.errors import PlacementError

SCORER_ROLE = "scorer"
"""Reward models are `scorer-0`, `scorer-1`, ...; each is a role of its own, since they may differ in size."""
TEACHER_ROLE = "teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """The members of one role and where each goes.

    Example: `RolePlan(role="train", count=2, cpus=1.0, gpus=0.0, slots=(("train", 0), ("train", 1)))`.
    """

    role: str
    """`train`, `inference`, `rollout`, `scorer-0` or `teacher`."""
    count: int
    """Members."""
    cpus: float
    """Logical CPUs of one member."""
    gpus: float
    """GPUs of one member; a share when it sits beside another on one GPU."""
    slots: tuple[tuple[str, int], ...]
    """(placement group, bundle index) of each member; empty when the members reserve nothing."""

    @property
    def needs(self) -> dict[str, float]:
        """Resources of one member, without those of which it needs nothing."""
        return _bundle(self.cpus, self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleGroup:
    """One placement group.

    Example: `BundleGroup(name="train", bundles=({"CPU": 1.0},), strategy="PACK")`.
    """

    name: str
    """Name within the plan; Ray sees it with a suffix that is unique to the run."""
    bundles: tuple[Mapping[str, float], ...]
    """Resources of each bundle; a bundle never spans nodes."""
    strategy: str
    """Ray's placement strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """All groups and roles of a run."""

    groups: tuple[BundleGroup, ...]
    """Placement groups to create."""
    roles: tuple[RolePlan, ...]
    """Roles to spawn."""

    @property
    def total(self) -> dict[str, float]:
        """Resources of all bundles together, for example `{"CPU": 4.0}`."""
        return sum_resources([bundle for group in self.groups for bundle in group.bundles])

    def role(self, name: str) -> RolePlan:
        """Return a role by name. KeyError, naming the roles, if there is none."""
        for role in self.roles:
            if role.role == name:
                return role
        raise KeyError(f"no role {name!r} in the placement plan; it has {', '.join(role.role for role in self.roles)}")


def plan_placement(config: RunConfig) -> PlacementPlan:
    """Return the plan of a training run. PlacementError if a colocated pair cannot share its GPUs."""
    strategy = config.placement.strategy
    if config.placement.mode == "colocated":
        groups, roles = _colocated(config)
    else:
        inference = config.inference
        parts = [
            _own_group("train", *_training_shape(config.training), strategy),
            _own_group(
                "inference", inference.num_engines, inference.cpus_per_engine, inference.gpus_per_engine, strategy
            ),
        ]
        groups = [group for group, _ in parts if group is not None]
        roles = [role for _, role in parts]
    others = [_own_group("rollout", config.rollout.num_workers, config.placement.rollout_cpus, 0.0, strategy)]
    others += [_own_group(name, 1, model.cpus, model.gpus, strategy) for name, model in _frozen_models(config).items()]
    return PlacementPlan(
        groups=(*groups, *(group for group, _ in others if group is not None)),
        roles=(*roles, *(role for _, role in others)),
    )


def _frozen_models(config: RunConfig) -> dict[str, FrozenModelSection]:
    """Return reward models and teacher by role."""
    evaluation = None if config.evaluation is None else config.evaluation.reward
    scorers: dict[str, FrozenModelSection] = {
        f"{SCORER_ROLE}-{index}": model for index, model in enumerate(reward_models(config.reward, evaluation))
    }
    return scorers if config.teacher is None else {**scorers, TEACHER_ROLE: config.teacher}


def plan_sft_placement(config: SupervisedRunConfig) -> PlacementPlan:
    """Return the plan of a run on given answers: training workers, and one rollout worker that encodes the examples."""
    placement = config.placement
    parts = [
        _own_group("train", *_training_shape(config.training), placement.strategy),
        _own_group("rollout", 1, placement.rollout_cpus, 0.0, placement.strategy),
    ]
    groups = tuple(group for group, _ in parts if group is not None)
    return PlacementPlan(groups=groups, roles=tuple(role for _, role in parts))


def transfer_backend(config: RunConfig) -> Literal["gloo", "nccl", "object_store", "disk", "cuda_ipc"]:
    """Return the backend of the weight transfer, with `auto` decided.

    nccl needs a GPU of its own at each member, so a pair that shares one GPU uses gloo.
    """
    if config.transfer.backend != "auto":
        return config.transfer.backend
    both = config.training.gpus_per_worker > 0 and config.inference.gpus_per_engine > 0
    return "nccl" if both and config.placement.mode == "disaggregated" else "gloo"


def resolved_transfer(config: RunConfig) -> TransferConfig:
    """Return the transfer section with `auto` decided and the folder absolute: actors run elsewhere."""
    folder = Path(config.transfer.folder) if config.transfer.folder is not None else config.run_dir / "weights"
    return config.transfer.model_copy(update={"backend": transfer_backend(config), "folder": str(folder.absolute())})


def describe_plan(plan: PlacementPlan) -> str:
    """Return the plan as a table for people, ending with the total."""
    rows = [("role", "workers", "CPUs each", "GPUs each", "placement")]
    for role in plan.roles:
        where = sorted({group for group, _ in role.slots})
        text = f"group {where[0]}, one bundle each" if where else "anywhere, reserves nothing"
        rows.append((role.role, str(role.count), f"{role.cpus:g}", f"{role.gpus:g}", text))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for group in plan.groups:
        lines.append(
            f"group {group.name}: {len(group.bundles)} x {{{show_resources(group.bundles[0])}}}, "
            f"strategy {group.strategy}"
        )
    lines.append(f"total: {show_resources(plan.total) or 'nothing'}")
    return "\n".join(lines)


def sum_resources(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of several bundles, by resource."""
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def show_resources(resources: Mapping[str, float]) -> str:
    """Return `CPU 4, GPU 0.5`."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _training_shape(training: TrainingConfig) -> tuple[int, float, float]:
    return training.parallel.world_size, training.cpus_per_worker, training.gpus_per_worker


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0}


def _own_group(name: str, count: int, cpus: float, gpus: float, strategy: str) -> tuple[BundleGroup | None, RolePlan]:
    """Return a group with one bundle per member, or none if the members reserve nothing: Ray has no empty bundles."""
    bundle = _bundle(cpus, gpus)
    if not bundle:
        return None, RolePlan(role=name, count=count, cpus=cpus, gpus=gpus, slots=())
    slots = tuple((name, index) for index in range(count))
    role = RolePlan(role=name, count=count, cpus=cpus, gpus=gpus, slots=slots)
    return BundleGroup(name=name, bundles=(bundle,) * count, strategy=strategy), role


def _colocated(config: RunConfig) -> tuple[list[BundleGroup], list[RolePlan]]:
    training, inference = config.training, config.inference
    count = training.parallel.world_size
    train_gpus, engine_gpus = training.gpus_per_worker, inference.gpus_per_engine
    gpus = max(train_gpus, engine_gpus)
    if train_gpus > 0 and engine_gpus > 0:
        if gpus > 1:
            raise PlacementError(
                f"placement.mode=colocated shares one GPU between a training worker and an engine, but "
                f"training.gpus_per_worker={train_gpus:g} and inference.gpus_per_engine={engine_gpus:g}; set both to "
                f"at most 1 or placement.mode=disaggregated"
            )
        # Ray hands one GPU to both only if each asks for a share of it.
        train_gpus, engine_gpus = (gpus * part / (train_gpus + engine_gpus) for part in (train_gpus, engine_gpus))
    bundle = _bundle(training.cpus_per_worker + inference.cpus_per_engine, gpus)
    slots = tuple(("colocated", index) for index in range(count)) if bundle else ()
    group = BundleGroup(name="colocated", bundles=(bundle,) * count, strategy=config.placement.strategy)
    roles = [
        RolePlan(role="train", count=count, cpus=training.cpus_per_worker, gpus=train_gpus, slots=slots),
        RolePlan(role="inference", count=count, cpus=inference.cpus_per_engine, gpus=engine_gpus, slots=slots),
    ]
    return [group] if bundle else [], roles
