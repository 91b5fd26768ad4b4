"""`rayrl check`: everything that can be said about a config without starting anything."""

import os
from typing import TYPE_CHECKING

from rayrl.cli.arguments import ConfigPath, Overrides
from rayrl.cli.config_file import load_any_config
from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.run import RunConfig
from rayrl.config.supervised import SFTRunConfig, SupervisedRunConfig

if TYPE_CHECKING:
    from rayrl.infra.placement_plan import PlacementPlan


def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Parse a config, print its batch arithmetic and placement plan, and look for its files. Starts nothing."""
    parsed = load_any_config(config, overrides or [])
    from rayrl.driver.pairs import pair_encoding
    from rayrl.driver.preflight import check_pair_run, check_run, check_sft_run
    from rayrl.infra.placement_plan import plan_placement, plan_sft_placement
    from rayrl.tracking.run_folder import check_output

    print(f"{config}: parsed, run folder {parsed.run_dir}")
    if not isinstance(parsed, RunConfig):
        _print_section("batch", sft_batch_lines(parsed))
        _print_section("placement", placement_lines(plan_sft_placement(parsed)))
        if isinstance(parsed, SFTRunConfig):
            notes = check_sft_run(parsed)
        else:
            notes = check_pair_run(parsed, pair_encoding(parsed))
    else:
        _print_section("batch", batch_lines(parsed))
        _print_section("algorithm", algorithm_lines(parsed.algorithm))
        _print_section("placement", placement_lines(plan_placement(parsed)))
        notes = check_run(parsed)
    _print_section("files", [*notes, check_output(parsed.run_dir)])


def batch_lines(config: RunConfig) -> list[str]:
    """Return the arithmetic of one step and of the whole run."""
    driver, group_size = config.driver, config.rollout.group_size
    slots = (driver.max_staleness + 1) * driver.groups_per_step
    samples, new_tokens = config.samples_per_step, config.rollout.sampling.max_new_tokens
    lines = [
        f"samples per step = {samples} ({driver.groups_per_step} groups x {group_size})",
        f"slots = {slots} (({driver.max_staleness} + 1) x {driver.groups_per_step} groups), "
        f"at most {slots * group_size} samples at once",
        f"optimizer steps = {driver.num_steps * driver.minibatches} ({driver.num_steps} steps x {driver.minibatches})",
        f"samples per optimizer step = {samples // driver.minibatches}, "
        f"on {config.training.parallel.world_size} training workers",
        f"samples in all = {samples * driver.num_steps}",
        f"sampled tokens per step <= {samples * new_tokens} ({samples} x {new_tokens} for one turn)",
    ]
    context = config.model.max_context
    if context is not None:
        lines.append(f"tokens per step <= {samples * context} ({samples} x model.max_context {context})")
    return lines


def sft_batch_lines(config: SupervisedRunConfig) -> list[str]:
    """Return the arithmetic of a run on given answers."""
    loop, what = config.loop, "examples" if isinstance(config, SFTRunConfig) else "pairs"
    return [
        f"{what} per step = {loop.batch_size}, on {config.training.parallel.world_size} training workers",
        f"optimizer steps = {loop.num_steps}",
        f"{what} in all = {loop.num_steps * loop.batch_size}",
    ]


def placement_lines(plan: "PlacementPlan") -> list[str]:
    """Return the plan, and a note where a local Ray would have to promise more CPUs than there are."""
    from rayrl.infra.placement_plan import describe_plan

    lines = describe_plan(plan).splitlines()
    cpus, cores = plan.total.get("CPU", 0.0), os.cpu_count() or 1
    if cpus > cores:
        from rayrl.infra.cluster import would_join

        if not would_join():
            lines.append(f"note: {cpus:g} logical CPUs on the {cores} cores of this machine: slow, they are shared")
    return lines


def algorithm_lines(algorithm: AlgorithmConfig) -> list[str]:
    """Return every field of the algorithm with its value, presets filled in."""
    return [f"{name} = {value}" for name, value in _flat(algorithm.model_dump())]


def _flat(values: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name, value in values.items():
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return rows


def _print_section(title: str, lines: list[str]) -> None:
    print(f"{title}:")
    for line in lines:
        print(f"  {line}")
