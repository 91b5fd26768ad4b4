"""Samples per second of the whole loop: `rayrl train` against TRL's GRPOTrainer, alternating, one block at a time.

    train_vs_trl.py --> rayrl train CONFIG ...   (a process)  --> metrics.jsonl --+
          |                                                                       +--> table, --output FILE
          +-----------> trl_side.py CONFIG ...   (a process)  --> result.json   --+

Both sides run in the interpreter that runs this file; benchmarks/README.md says how to make one with both, and what
is the same on both sides. Every block starts from the weights of the model folder.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayrl.config.run import RunConfig
from rayrl.tracking.jsonl_sink import read_rows

ROOT = Path(__file__).resolve().parent.parent
# What is compared: 8 prompts x 8 samples in an optimizer step, at most 32 new tokens.
SAME_ON_BOTH_SIDES = ("driver.groups_per_step=8", "rollout.group_size=8", "rollout.sampling.max_new_tokens=32")
# TRL evaluates and saves nothing either.
RAYRL_ONLY_TRAINS = ("evaluation=null", "checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.export_hf=false")
PROGRESS = re.compile(r"\bstep \d+/\d+")
PACKAGES = ("torch", "transformers", "trl", "ray", "accelerate", "reasoning-gym")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step. `phases` are seconds; on the rayrl side they overlap with generation."""

    seconds: float
    """From the end of the last step to the end of this one."""
    sampled_tokens: float
    reward_mean: float
    phases: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One run of one side."""

    side: str
    load_average: float
    """Of the last minute, before the block; above about 0.5 somebody else used the cores."""
    wall_s: float
    """The whole process, start-up included."""
    loop_s: float
    """From the start of the loop to the end of the last step, warm-up and cool-down included."""
    num_steps: int
    """Steps of the loop, counted or not."""
    counted: list[Step]


def wait_for(command: Sequence[str], *, name: str, timeout_s: float, env: dict[str, str], log: Path) -> None:
    """Run a command to its end, its output in `log` and its lines about steps here; stop it and leave if it fails."""
    deadline = time.monotonic() + timeout_s
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
        )
    shown = 0
    try:
        while process.poll() is None:
            time.sleep(0.5)
            shown = show_progress(log, shown)
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} is not done after --block-timeout={timeout_s:.0f} s; log: {log}")
    finally:
        stop(process)
    show_progress(log, shown)
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{name} ended with exit code {process.returncode}:\n{tail}")


def show_progress(log: Path, shown: int) -> int:
    """Print the complete lines after byte `shown` that speak of a step; return where the next call goes on."""
    data = log.read_bytes()[shown:]
    complete = data[: data.rfind(b"\n") + 1]
    for line in complete.decode(errors="replace").splitlines():
        if PROGRESS.search(line):
            print("   ", line.strip(), flush=True)
    return shown + len(complete)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs: in order first, so that rayrl takes its actors down, then with its group."""
    if process.poll() is not None:
        return
    for number, patience_s in ((signal.SIGINT, 60.0), (signal.SIGTERM, 30.0)):
        process.send_signal(number)
        try:
            process.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            continue
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_rayrl(args: argparse.Namespace, folder: Path) -> Block:
    """Run `rayrl train` for warm-up, counted and cool-down steps.

    A loop that may run ahead has generated a part of its next batches by the end of any step. The window is honest
    only if that part is as large at its end as at its start: max_staleness further steps follow, so that groups are
    still admitted throughout the window.
    """
    overrides = [*SAME_ON_BOTH_SIDES, *args.overrides, *args.rayrl_override]
    max_staleness = RunConfig.load(args.config, overrides).driver.max_staleness
    num_steps = args.warmup + args.steps + max_staleness
    overrides += [*RAYRL_ONLY_TRAINS, f"driver.num_steps={num_steps}", f"run.output_root={folder}", "run.name=rayrl"]
    config = RunConfig.load(args.config, overrides)
    began, load = time.monotonic(), os.getloadavg()[0]
    wait_for(
        [sys.executable, "-m", "rayrl.cli.main", "train", str(args.config), *overrides],
        name="rayrl",
        timeout_s=args.block_timeout,
        env=dict(os.environ),
        log=folder / "rayrl.log",
    )
    wall_s = time.monotonic() - began
    rows = [row for row in read_rows(config.run_dir / "metrics.jsonl") if "time/step_s" in row]
    check_complete("rayrl", len(rows), num_steps)
    started = rows[0]["time"] - rows[0]["time/step_s"]
    ended = [float(row["time"]) for row in rows]
    steps = [
        Step(
            seconds=end - begin,
            sampled_tokens=row["rollout/sampled_tokens"],
            reward_mean=row["reward/mean"],
            phases={name.removeprefix("time/"): row[name] for name in row if name.startswith("time/")},
        )
        for row, begin, end in zip(rows, [started, *ended], ended, strict=False)
    ]
    return Block(
        side="rayrl",
        load_average=load,
        wall_s=wall_s,
        loop_s=ended[-1] - started,
        num_steps=num_steps,
        counted=steps[args.warmup : args.warmup + args.steps],
    )


def run_trl(args: argparse.Namespace, folder: Path) -> Block:
    """Run TRL for warm-up and counted steps; its loop is synchronous and needs no cool-down."""
    num_steps = args.warmup + args.steps
    result_path = folder / "trl.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "trl_side.py"), str(args.config)]
    command += [*SAME_ON_BOTH_SIDES, *args.overrides, "--steps", str(num_steps), "--result", str(result_path)]
    command += ["--precision", args.trl_precision, "--micro-batch", str(args.trl_micro_batch)]
    command += ["--threads", str(args.threads)]
    began, load = time.monotonic(), os.getloadavg()[0]
    wait_for(
        command,
        name="trl",
        timeout_s=args.block_timeout,
        env={**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"},
        log=folder / "trl.log",
    )
    wall_s = time.monotonic() - began
    result = json.loads(result_path.read_text())
    check_complete("trl", len(result["steps"]), num_steps)
    steps = [trl_step(row) for row in result["steps"]]
    return Block(
        side="trl",
        load_average=load,
        wall_s=wall_s,
        loop_s=result["steps"][-1]["ended"] - result["started"],
        num_steps=num_steps,
        counted=steps[args.warmup :],
    )


def trl_step(row: dict[str, float]) -> Step:
    """Return a step of TRL, its seconds divided into phases that add up."""
    prepare_s = row["rollout_s"] - row["generate_s"] - row["reward_s"]
    other_s = row["step_s"] - row["rollout_s"] - row["forward_backward_s"] - row["optimizer_s"]
    names = ("generate_s", "reward_s", "forward_backward_s", "optimizer_s")
    return Step(
        seconds=row["step_s"],
        sampled_tokens=row["sampled_tokens"],
        reward_mean=row["reward_mean"],
        phases={**{name: row[name] for name in names}, "prepare_s": prepare_s, "other_s": other_s},
    )


def check_complete(side: str, found: int, expected: int) -> None:
    if found != expected:
        raise SystemExit(f"{side}: {found} steps in its metrics, {expected} expected (a step that was skipped?)")


def summarize(blocks: Sequence[Block], samples_per_step: int) -> dict[str, Any]:
    """Return the figures of one side."""
    steps = [step for block in blocks for step in block.counted]
    rates = sorted(samples_per_step / step.seconds for step in steps)
    names = {name for step in steps for name in step.phases}
    return {
        "samples_per_s": {"min": rates[0], "median": statistics.median(rates), "max": rates[-1]},
        "counted_steps": len(steps),
        # All of the work over all of the time: nothing that ran ahead or was left over can hide here.
        "whole_loop_samples_per_s": samples_per_step
        * sum(block.num_steps for block in blocks)
        / sum(block.loop_s for block in blocks),
        "sampled_tokens_per_sample": statistics.fmean(step.sampled_tokens for step in steps) / samples_per_step,
        "reward_mean": statistics.fmean(step.reward_mean for step in steps),
        "seconds_per_step": {
            name: statistics.fmean(step.phases.get(name, 0.0) for step in steps) for name in sorted(names)
        },
    }


def print_report(report: dict[str, Any]) -> None:
    print(f"\n{'samples/s':<12}{'min':>8}{'median':>8}{'max':>8}{'whole loop':>12}{'tokens/sample':>15}{'steps':>7}")
    for side, figures in report["sides"].items():
        rate = figures["samples_per_s"]
        print(
            f"{side:<12}{rate['min']:>8.2f}{rate['median']:>8.2f}{rate['max']:>8.2f}"
            f"{figures['whole_loop_samples_per_s']:>12.2f}{figures['sampled_tokens_per_sample']:>15.1f}"
            f"{figures['counted_steps']:>7}"
        )
    for side, figures in report["sides"].items():
        parts = sorted(figures["seconds_per_step"].items(), key=lambda item: -item[1])
        print(f"{side}, mean seconds in a step: " + ", ".join(f"{name} {value:.2f}" for name, value in parts))
    for name, value in report["ratios"].items():
        print(f"rayrl / trl, {name}: {value:.2f}")


def make_report(args: argparse.Namespace, blocks: Sequence[Block]) -> dict[str, Any]:
    config = RunConfig.load(args.config, [*SAME_ON_BOTH_SIDES, *args.overrides])
    names = list(dict.fromkeys(block.side for block in blocks))
    sides = {
        name: summarize([block for block in blocks if block.side == name], config.samples_per_step) for name in names
    }
    ratios = {}
    if {"rayrl", "trl"} <= sides.keys():
        ours, theirs = sides["rayrl"], sides["trl"]
        ratios["medians"] = ours["samples_per_s"]["median"] / theirs["samples_per_s"]["median"]
        ratios["whole loop"] = ours["whole_loop_samples_per_s"] / theirs["whole_loop_samples_per_s"]
    return {
        "ratios": ratios,
        "sides": sides,
        "blocks": [asdict(block) for block in blocks],
        "settings": {**vars(args), "config": str(args.config), "output": None},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "cpus": os.cpu_count(),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value for both sides")
    parser.add_argument(
        "--config", type=Path, default=Path("configs/smollm2_chain_sum.yaml"), help="from the root of the repository"
    )
    parser.add_argument("--pairs", type=int, default=2, help="blocks of each side")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a block")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--only", choices=("rayrl", "trl"), help="run one side, for tuning")
    parser.add_argument("--rayrl-override", action="append", default=[], help="section.key=value for rayrl alone")
    parser.add_argument("--trl-precision", default="bf16", choices=("bf16", "fp32", "pure_bf16"))
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="samples in one forward and backward pass")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of TRL")
    parser.add_argument("--block-timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.output:
        args.output = args.output.absolute()
    os.chdir(ROOT)
    # SIGTERM ends as Ctrl-C does: the block that runs is taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    try:
        importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("this environment has no trl; benchmarks/README.md says how to make one") from None
    runners: dict[str, Callable[[argparse.Namespace, Path], Block]] = {"rayrl": run_rayrl, "trl": run_trl}
    order = [side for _ in range(args.pairs) for side in runners if args.only in (None, side)]
    blocks = []
    # Not a context manager: the logs of a block that failed must outlive it.
    folder = Path(tempfile.mkdtemp(prefix="train_vs_trl_"))
    print(f"logs and runs: {folder}")
    for number, side in enumerate(order, start=1):
        print(f"block {number}/{len(order)}: {side}, load average {os.getloadavg()[0]:.1f}", flush=True)
        block_folder = folder / f"{number}_{side}"
        block_folder.mkdir()
        block = runners[side](args, block_folder)
        blocks.append(block)
        seconds = ", ".join(f"{step.seconds:.1f}" for step in block.counted)
        print(f"    counted steps: {seconds} s; whole process {block.wall_s:.0f} s", flush=True)
    report = make_report(args, blocks)
    print_report(report)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
