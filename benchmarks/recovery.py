"""How long a run is without one of its engines: SIGKILL to full service, against the engine's bare start.

    python benchmarks/recovery.py [--model DIR] [--rounds 3] [--engine transformers|vllm]

Each round kills one of two engines of a running GRPO run and reads from the ledger when it was missed, when its
successor was ready, and when that had the current weights and got requests. The bare start is that of an engine actor
of the same settings in the same cluster just before, while the run goes on, so that both see the same load.
Aim: bare start + one publication + 2 s.
"""

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray

from rayrl import Run, RunConfig
from rayrl.config.loader import parse_section
from rayrl.driver.fleet import absolute_model, thread_env
from rayrl.inference.engine_actor import EngineActor
from rayrl.inference.settings import EngineSettings
from rayrl.infra.actor_group import ActorGroup
from rayrl.models.tiny import create_tiny_model

_POLL_S = 0.02
_LIMIT_S = 300.0


def run_config(model: Path, root: Path, engine: str, max_new_tokens: int) -> RunConfig:
    """Return a run that goes on until it is stopped."""
    return parse_section(
        RunConfig,
        {
            "run": {"name": "recovery", "output_root": str(root)},
            "model": {"path": str(model), "max_context": 96},
            "dataset": {"type": "arithmetic", "num_operands": 2, "max_operand": 90},
            "reward": {"type": "exact_match"},
            "rollout": {
                "workflow": {"type": "single_turn", "prompt_format": "text"},
                "group_size": 4,
                "sampling": {"max_new_tokens": max_new_tokens},
            },
            "driver": {"groups_per_step": 4, "num_steps": 1_000_000, "max_staleness": 2},
            "training": {"optimizer": {"lr": 1e-5}},
            "inference": {"engine": {"type": engine}, "num_engines": 2, "cpus_per_engine": 1},
            "tracking": {"sinks": ["jsonl"], "rollout_log": False},
            "supervision": {"restarts": 100, "backoff_s": 0.0},
            "checkpoint": {"every": 0, "at_end": False, "export_hf": False},
        },
    )


def bare_start_s(config: RunConfig) -> float:
    """Return the seconds from spawning one engine actor until it is ready."""
    settings = EngineSettings(
        model=absolute_model(config.model), inference=config.inference, transfer=config.transfer, seed=1
    )

    async def start() -> float:
        began = time.monotonic()
        group = await ActorGroup.spawn(
            "bare",
            EngineActor,
            args_per_member=[(0, settings)],
            options_per_member=[{"num_cpus": 0}],
            env=thread_env(1),
            max_concurrency=100,
            start_timeout_s=_LIMIT_S,
        )
        seconds = time.monotonic() - began
        await group.shutdown(10.0)
        return seconds

    return asyncio.run(start())


def event_times(run_dir: Path, kind: str) -> list[tuple[float, dict[str, Any]]]:
    """Return wall-clock time and detail of the events of a kind."""
    connection = sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        rows = connection.execute("SELECT time, detail FROM events WHERE kind = ? ORDER BY id", (kind,)).fetchall()
    finally:
        connection.close()
    return [(moment, json.loads(detail)) for moment, detail in rows]


def publication_s(run_dir: Path) -> float:
    """Return the median seconds of one publication, from transfer to the last resume."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    values = [line["time/transfer_s"] + line["time/commit_s"] for line in lines if "time/transfer_s" in line]
    return statistics.median(values)


class Measurement:
    """A run under way, and one kill at a time."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.handle = Run(config).start()

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            status = self.handle.status()
            if status["phase"] == "failed":
                self.handle.wait()
            if "supervision" in status and condition(status):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {_LIMIT_S} s: {what}; {status}")
            threading.Event().wait(_POLL_S)

    def kill_one(self) -> dict[str, float]:
        """Kill the older engine; return the seconds from then to each stage of the recovery."""
        run_dir = self._config.run_dir
        before = len(event_times(run_dir, "member_serves"))
        members = self.handle.status()["supervision"]["inference"]["members"]
        name, pid = next(iter(members.items()))
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        self.until(lambda _: len(event_times(run_dir, "member_serves")) > before, "the successor serves")
        lost = next(moment for moment, detail in event_times(run_dir, "engine_lost") if detail["engine"] == name)
        started, detail = event_times(run_dir, "member_started")[-1]
        served = event_times(run_dir, "member_serves")[-1][0]
        step = self.handle.status()["step"]
        self.until(lambda status: status["step"] >= step + 2, "two more steps")
        return {
            "noticed_s": lost - killed,
            "ready_s": started - killed,
            "serves_s": served - killed,
            "start_s": float(detail["start_s"]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder; a tiny one is made when empty")
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or create_tiny_model(Path(scratch) / "tiny", alphabet="0123456789+=", max_context=128)
        config = run_config(model, Path(scratch) / "runs", arguments.engine, arguments.max_new_tokens)
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        measurement = Measurement(config)
        try:
            measurement.until(lambda status: status["step"] >= 3, "three steps")
            rounds = []
            for number in range(arguments.rounds):
                bare_s = bare_start_s(config)
                result = measurement.kill_one()
                rounds.append((bare_s, result))
                shown = ", ".join(f"{name} {value:.2f}" for name, value in result.items())
                print(f"round {number + 1}: bare start {bare_s:.2f} s; after the kill: {shown}", flush=True)
            one_publication_s = publication_s(config.run_dir)
        finally:
            measurement.handle.stop()
            measurement.handle.wait(_LIMIT_S)
            ray.shutdown()
    bare = statistics.median(bare_s for bare_s, _ in rounds)
    serves = statistics.median(result["serves_s"] for _, result in rounds)
    limit = bare + one_publication_s + 2.0
    print(
        f"median of {len(rounds)}: full service {serves:.2f} s after the kill; bare start {bare:.2f} s + publication "
        f"{one_publication_s:.2f} s + 2 s = {limit:.2f} s: {'met' if serves <= limit else 'missed'}"
    )
    # The same start takes other times on a loaded machine; this difference does not depend on that.
    beyond = statistics.median(result["serves_s"] - result["start_s"] for _, result in rounds)
    print(f"beyond the successor's own start: {beyond:.2f} s")


if __name__ == "__main__":
    main()
