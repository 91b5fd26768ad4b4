"""What supervision costs a run: CPU seconds of the driver and of the actors for one heartbeat, and per second of a run.

    python benchmarks/supervision_cost.py [--engines 2] [--workers 2] [--seconds 15]

Starts the actors of a tiny run and lets its supervisor watch them with a heartbeat that is a hundred times too fast, so
that the cost stands out from Ray's own; the CPU time of the same processes in as many seconds without a supervisor is
taken off. Divided by the number of heartbeats and multiplied by those of a run, it is a share of one core, and of the
time of a step, however long that is.
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil

from rayrl.checkpoint.ledger import Ledger
from rayrl.config.loader import parse_section
from rayrl.config.run import RunConfig
from rayrl.config.supervision import SupervisionConfig
from rayrl.driver import pulse
from rayrl.driver.assembly import Assembly, digest_of, resolved_yaml
from rayrl.driver.fleet import start_fleet
from rayrl.driver.stop_signal import StopSignal
from rayrl.infra.cluster import join_cluster, leave_cluster
from rayrl.models.tiny import create_tiny_model
from rayrl.tracking.registry import make_tracker
from rayrl.tracking.run_folder import RunFolder

FAST_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU seconds of one stretch of time."""

    loop: float
    """Of the thread of the event loop."""
    driver: float
    """Of the whole driver process, Ray's threads included."""
    members: float
    """Of all engines and rollout workers."""
    heartbeats: int


def small_config(root: Path, engines: int, workers: int) -> RunConfig:
    model = create_tiny_model(root / "model", alphabet="0123456789+=", hidden_size=32, num_layers=2, num_heads=2)
    return parse_section(
        RunConfig,
        {
            "run": {"name": "supervised", "output_root": str(root)},
            "model": {"path": str(model), "max_context": 24},
            "dataset": {"type": "arithmetic", "num_operands": 2, "max_operand": 4},
            "reward": {"type": "exact_match"},
            "rollout": {
                "workflow": {"type": "single_turn", "prompt_format": "text"},
                "group_size": 4,
                "sampling": {"max_new_tokens": 4},
                "num_workers": workers,
            },
            "driver": {"groups_per_step": 4, "num_steps": 1},
            "training": {"optimizer": {"lr": 1e-3}},
            "inference": {"engine": {"type": "transformers"}, "num_engines": engines},
            "supervision": {"heartbeat_s": FAST_S},
        },
    )


class Counter:
    """Counts the answers that pulses read."""

    def __init__(self) -> None:
        self.count = 0
        self._read = pulse.read_answer
        pulse.read_answer = self._count

    def _count(self, question: "asyncio.Future[object]") -> object:
        self.count += 1
        return self._read(question)


async def stretch(seconds: float, pids: list[int], counter: Counter) -> Cost:
    """Return what the processes use in this time."""

    def cpu(pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    start = (time.thread_time(), time.process_time(), sum(map(cpu, pids)), counter.count)
    await asyncio.sleep(seconds)
    end = (time.thread_time(), time.process_time(), sum(map(cpu, pids)), counter.count)
    loop, driver, members, heartbeats = (after - before for before, after in zip(start, end, strict=True))
    return Cost(loop=loop, driver=driver, members=members, heartbeats=int(heartbeats))


async def measure(config: RunConfig, seconds: float) -> tuple[Cost, Cost]:
    """Return the cost without and with a supervisor."""
    text = resolved_yaml(config)
    folder = RunFolder.create(config.run_dir, text, digest_of(text), ["benchmark"], resume=False)
    tracker = make_tracker(config.tracking, folder, 1)
    fleet = await start_fleet(config)
    counter = Counter()
    try:
        with folder, closing(Ledger.open(folder.ledger_path)) as ledger:
            assembly = Assembly.build(config, fleet, folder, ledger, tracker, StopSignal())
            pids = [member.pid for role in ("inference", "rollout") for member in fleet.starters[role].group.members]
            await asyncio.sleep(3)
            alone = await stretch(seconds, pids, counter)
            watching = asyncio.create_task(assembly.supervisor.run())
            await asyncio.sleep(1)
            watched = await stretch(seconds, pids, counter)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await assembly.supervisor.close()
    finally:
        await fleet.close()
        tracker.close()
    return alone, watched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    cluster = join_cluster(8, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as root:
            config = small_config(Path(root), arguments.engines, arguments.workers)
            alone, watched = asyncio.run(measure(config, arguments.seconds))
    finally:
        leave_cluster(cluster)
    beats = watched.heartbeats
    usual = SupervisionConfig().heartbeat_s
    members = arguments.engines + arguments.workers
    rate = members / usual
    loop, driver, actors = (
        max(0.0, with_ - without) / beats
        for with_, without in (
            (watched.loop, alone.loop),
            (watched.driver, alone.driver),
            (watched.members, alone.members),
        )
    )
    print(f"{beats} heartbeats in {arguments.seconds:g} s; without them {alone.heartbeats}")
    print(
        f"one heartbeat: {loop * 1e6:.0f} us of the event loop, {driver * 1e6:.0f} us of the driver process, "
        f"{actors * 1e6:.0f} us of its member"
    )
    print(
        f"{members} members, supervision.heartbeat_s={usual:g}: {loop * rate:.3%} of the event loop's time, "
        f"{driver * rate:.3%} of a core in the driver, {actors / usual:.3%} of a core in each member"
    )


if __name__ == "__main__":
    main()
