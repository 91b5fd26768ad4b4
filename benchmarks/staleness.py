"""Staleness against objective, AReaL's study in small: `max_staleness` with decoupled and with plain PPO.

    python benchmarks/staleness.py --bounds 0,1,2,4,8 --seeds 1,2,3 --steps 100 --plot docs/staleness.svg

`decoupled` clips around the trainer's policy before the step and weighs by truncated importance weights;
`plain` clips around the policy that sampled. Everything else, the number of samples too, is equal. Prints a markdown
table of all that is measured; a row that is measured already is not run again.
"""

import argparse
from pathlib import Path
from statistics import fmean

from quickstart_study import Row, RowKey, Study
from svg_plot import line_plot

PROXIMAL = {"decoupled": "recompute", "plain": "sampler"}


def key(variant: str, bound: int, seed: int, steps: int, extra: tuple[str, ...]) -> RowKey:
    """Return one row of the study."""
    overrides = (f"algorithm.proximal={PROXIMAL[variant]}", f"driver.max_staleness={bound}", "driver.on_stale=mask")
    return RowKey(name=f"{variant}-{bound}", seed=seed, steps=steps, overrides=(*overrides, *extra))


def table(groups: list[tuple[str, int, list[Row]]]) -> str:
    """Return one line per variant and bound; accuracies of all seeds, means of the rest."""
    lines = [
        "| PPO | max_staleness | accuracy after, by seed | mean | lowest | trained age mean / max | reward mean | "
        "k3 sampler‖proximal | s | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for variant, bound, rows in groups:
        after = [row.after for row in rows]
        mean = {name: fmean(row.means.get(name, 0.0) for row in rows) for name in rows[0].means}
        lines.append(
            f"| {variant} | {bound} | {', '.join(f'{value:.3f}' for value in after)} | {fmean(after):.3f} | "
            f"{min(after):.3f} | {mean['staleness/trajectory_age_mean']:.2f} / "
            f"{max(row.means['staleness/trajectory_age_max'] for row in rows):.0f} | {mean['reward/mean']:.3f} | "
            f"{mean['mismatch/k3']:.4f} | {fmean(row.seconds for row in rows):.0f} | "
            f"{fmean(row.cpu_s for row in rows):.0f} |"
        )
    return "\n".join(lines)


def plot(groups: list[tuple[str, int, list[Row]]], steps: int) -> str:
    """Return the accuracies as SVG."""
    lines: dict[str, dict[float, list[float]]] = {}
    for variant, bound, rows in groups:
        lines.setdefault(f"{variant} PPO", {})[bound] = [row.after for row in rows]
    return line_plot(
        lines,
        title=f"Held-out accuracy after {steps} steps, a dot per seed",
        x_label="max_staleness (versions)",
        y_label="accuracy",
        y_range=(0.6, 1.0),
    )


def main() -> None:
    """Run what is missing, print the table, write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", default="0,1,2,4,8", help="values of driver.max_staleness, by comma")
    parser.add_argument("--seeds", default="1,2,3", help="run.seed of each row, by comma")
    parser.add_argument("--steps", type=int, default=100, help="training steps of a row: the budget")
    parser.add_argument("--set", action="append", default=[], help="a further override, for all rows")
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="warm start and results")
    parser.add_argument("--plot", type=Path, help="write an SVG here")
    parser.add_argument("--table", action="store_true", help="print what is measured and run nothing")
    arguments = parser.parse_args()
    bounds = [int(bound) for bound in arguments.bounds.split(",")]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    extra = tuple(arguments.set)
    study = Study(arguments.folder.resolve(), "staleness.jsonl")
    if not arguments.table:
        # Seeds outermost: a study that is stopped early has all bounds.
        keys = [
            key(variant, bound, seed, arguments.steps, extra)
            for seed in seeds
            for bound in bounds
            for variant in PROXIMAL
        ]
        study.run_missing(keys)
    groups = []
    for variant in PROXIMAL:
        for bound in bounds:
            found = [study.find(key(variant, bound, seed, arguments.steps, extra)) for seed in seeds]
            if rows := [row for row in found if row is not None]:
                groups.append((variant, bound, rows))
    print(table(groups))
    if arguments.plot is not None:
        arguments.plot.write_text(plot(groups, arguments.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
