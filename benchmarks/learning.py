"""Does each preset learn? Every preset trains the quickstart task from one warm start; held-out accuracy before, after.

    python benchmarks/learning.py --presets grpo,dapo --seeds 1,2 --steps 100

Prints a markdown table of all that is measured. A row that is measured already is not run again.
"""

import argparse
from pathlib import Path

from quickstart_study import TARGET, Row, RowKey, Study

from rayrl.config.presets import PRESETS

ON_POLICY = ("driver.minibatches=1", "driver.max_staleness=0", "training.optimizer.lr=2.0e-4")
WITH_TEACHER = {"distillation"}
"""Presets that learn from a teacher instead of rewards; they need one, and are no part of this study."""
SETTINGS: dict[str, tuple[str, ...]] = {
    # Without a ratio there is nothing that holds a second step on the same samples: one step, on fresh samples.
    "gpg": ON_POLICY,
    "opo": ON_POLICY,
    # The critic is the baseline: it learns from many prompts, not from many samples of a few.
    "ppo": ("rollout.group_size=1", "driver.groups_per_step=256", "algorithm.critic={lr: 5.0e-4, clip: null}"),
    # Its clip bounds the weight of a token, never its gradient: of several steps on the same samples each pushes on
    # where the one before has pushed. One step, with weights that say how stale the samples are.
    "cispo": ("driver.minibatches=1", "algorithm.proximal=sampler"),
    # Their trust regions are around the policy that sampled.
    "dppo": ("algorithm.proximal=sampler",),
    "m2po": ("algorithm.proximal=sampler",),
}
"""What a preset sets beyond the recipe of the quickstart, where the field's practice differs."""
STEPS = {"dapo": 60}
"""Shorter budgets: with groups without signal replaced, a late step samples hundreds of groups to find its 32."""
EVERY = 20


def studied_presets() -> list[str]:
    """Return the presets of the study, in the order of the config."""
    return [name for name in PRESETS if name not in WITH_TEACHER]


def key(preset: str, seed: int, steps: int, extra: tuple[str, ...] = ()) -> RowKey:
    """Return the row of a preset."""
    overrides = (f"algorithm.preset={preset}", f"evaluation.every={EVERY}", *SETTINGS.get(preset, ()), *extra)
    return RowKey(name=preset, seed=seed, steps=min(steps, STEPS.get(preset, steps)), overrides=overrides)


def table(rows: list[Row]) -> str:
    """Return rows as markdown."""
    lines = [
        f"| preset | seed | steps | beyond the recipe | before | after | {TARGET} at step | mean age | s | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        own = ", ".join(f"`{text.removeprefix('algorithm.')}`" for text in row.key.overrides[2:]) or "–"
        age = row.means["staleness/trajectory_age_mean"]
        lines.append(
            f"| `{row.key.name}` | {row.key.seed} | {row.key.steps} | {own} | {row.before:.3f} | {row.after:.3f} | "
            f"{'–' if row.reached is None else row.reached} | {age:.1f} | {row.seconds:.0f} | {row.cpu_s:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(studied_presets()), help="names, by comma; all by default")
    parser.add_argument("--seeds", default="1", help="run.seed of each row, by comma")
    parser.add_argument("--steps", type=int, default=150, help="training steps of a row: the budget")
    parser.add_argument("--set", action="append", default=[], help="a further override, for all rows")
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="warm start and results")
    parser.add_argument("--table", action="store_true", help="print what is measured and run nothing")
    arguments = parser.parse_args()
    presets = arguments.presets.split(",")
    unknown = sorted(set(presets) - set(studied_presets()))
    if unknown:
        parser.error(f"no preset {', '.join(unknown)}; there are {', '.join(studied_presets())}")
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    keys = [key(preset, seed, arguments.steps, tuple(arguments.set)) for seed in seeds for preset in presets]
    study = Study(arguments.folder.resolve(), "learning.jsonl")
    if not arguments.table:
        study.run_missing(keys)
    found = [study.find(wanted) for preset in presets for wanted in keys if wanted.name == preset]
    print(table([row for row in found if row is not None]))


if __name__ == "__main__":
    main()
