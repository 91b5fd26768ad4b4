"""Small runs whose processes are killed, and what must hold afterwards. Importable through this folder's conftest."""

import contextlib
import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_runs import small_run

from rayrl import Run, RunConfig
from rayrl.audit.report import AUDIT_FILE
from rayrl.driver.result import RunResult
from rayrl.inference.engine_actor import EngineActor
from rayrl.training.worker import TrainWorker

ENDLESS = 100_000
KEPT = "model.norm.weight"
"""The tensor that engine 1 of `faulty` does not change."""


def run_config(model: Path, root: Path, **changes: Any) -> RunConfig:
    """Return a small run with two engines; `changes` are dotted paths with `__` for the dot."""
    deadlines = {"publication_s": 30, "start_s": 120, "generation_s": 120, "shutdown_s": 10}
    return small_run(
        model,
        root,
        **{
            "dataset__max_operand": 60,
            "rollout__group_size": 2,
            "rollout__episode_timeout_s": 60,
            "driver": {"groups_per_step": 2, "num_steps": ENDLESS, "max_staleness": 2, "deadlines": deadlines},
            "inference__num_engines": 2,
            "supervision": {"backoff_s": 0.1, "heartbeat_s": 0.5, "silence_s": 20},
            "checkpoint": {"every": 0, "at_end": False, "export_hf": False},
            **changes,
        },
    )


class LiveRun:
    """A run in a thread, with a way to wait for a state of it and to kill what belongs to it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.handle = Run(config).start()
        self.pids: set[int] = set()

    def members(self, role: str) -> dict[str, int]:
        """Return name and process id of the members of a role."""
        members: dict[str, int] = self.status()["supervision"][role]["members"]
        self.pids |= set(members.values())
        return members

    def status(self) -> dict[str, Any]:
        status = self.handle.status()
        if status["phase"] == "failed":
            self.handle.wait()
        return status

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 120.0) -> None:
        """Return once `condition` holds for the status. AssertionError with the last status if it does not."""
        deadline = time.monotonic() + timeout_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            status = self.status()
            if "supervision" in status:
                for role in ("inference", "rollout"):
                    self.members(role)
                if condition(status):
                    return
            threading.Event().wait(0.05)
        raise AssertionError(f"not within {timeout_s} s: {what}; last status: {status}")

    def until_step(self, step: int) -> None:
        self.until(lambda status: status["step"] >= step, f"step {step}")

    def more_steps(self, count: int) -> None:
        """Return once the run has made `count` more steps."""
        self.until_step(self.status()["step"] + count)

    def until_replaced(self, role: str, count: int) -> None:
        self.until(lambda status: status["supervision"][role]["replaced"] >= count, f"{count} of {role} replaced")

    def let_pass(self, seconds: float) -> None:
        """Do nothing for a while: the moment of the next kill."""
        threading.Event().wait(seconds)

    def kill(self, pid: int) -> None:
        """Kill a process; one that is gone already counts as killed before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    def finish(self) -> RunResult:
        """Stop the run and return its result, having checked what holds after every run."""
        self.handle.stop()
        result = self.handle.wait(timeout_s=120)
        check_ledger(result.run_dir)
        audit = json.loads((result.run_dir / AUDIT_FILE).read_text())
        assert audit["passed"], audit
        wait_gone(self.pids)
        return result


def wait_gone(pids: set[int], timeout_s: float = 20.0) -> None:
    """Return once none of the processes runs; Ray ends them a moment after it was asked to. AssertionError if not."""
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes of the run are left: {left}"
        threading.Event().wait(0.05)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that waits for its parent to notice its end does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def rows(run_dir: Path, sql: str) -> list[Any]:
    """Return the rows of a query on the ledger of a run."""
    connection = sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def events(run_dir: Path, kind: str) -> list[str]:
    """Return the details of the events of a kind, as JSON text."""
    return [row[0] for row in rows(run_dir, f"SELECT detail FROM events WHERE kind = '{kind}' ORDER BY id")]


def check_ledger(run_dir: Path) -> None:
    """Every prompt once, steps without a gap, one digest per version, no age beyond the bound."""
    live = "superseded_by IS NULL"
    prompts = rows(run_dir, f"SELECT dataset, epoch, ordinal, outcome FROM prompts WHERE {live}")
    assert len({row[:3] for row in prompts}) == len(prompts) > 0
    assert {row[3] for row in prompts} == {"trained"}
    steps = [row[0] for row in rows(run_dir, f"SELECT step FROM steps WHERE {live} ORDER BY step")]
    assert steps == list(range(1, len(steps) + 1))
    for version, count in rows(
        run_dir, f"SELECT version, count(DISTINCT digest) FROM publications WHERE {live} GROUP BY version"
    ):
        assert count == 1, f"version {version} has {count} digests"
    ages = rows(run_dir, f"SELECT max(version - 1 - oldest_version) FROM prompts WHERE {live} AND outcome = 'trained'")
    assert ages[0][0] <= 2


class DoomedEngine(EngineActor):
    """An engine that kills its own process at the start of a call that its index, in `fates`, is doomed to."""

    fates: dict[int, tuple[str, int]] = {}
    """Index to method, and how many calls of it the engine survives."""

    def _meet_fate(self, method: str) -> None:
        index = int(self.name.rsplit("-", 1)[1])
        fated, survived = self.fates.get(index, ("", 0))
        if method != fated:
            return
        seen = self.__dict__.setdefault("seen", 0)
        self.__dict__["seen"] = seen + 1
        if seen >= survived:
            os.kill(os.getpid(), signal.SIGKILL)

    async def generate(self, requests: Any) -> Any:
        """One list of chunks counts as one call: the process dies with requests half done."""
        async for batch in super().generate(requests):
            self._meet_fate("generate")
            yield batch

    async def join_transfer(self, *args: Any) -> None:
        self._meet_fate("join_transfer")
        await super().join_transfer(*args)

    async def prepare(self, *args: Any) -> None:
        self._meet_fate("prepare")
        await super().prepare(*args)

    async def receive(self, *args: Any) -> Any:
        self._meet_fate("receive")
        return await super().receive(*args)

    async def commit(self, *args: Any) -> Any:
        self._meet_fate("commit")
        return await super().commit(*args)

    async def discard(self, *args: Any) -> None:
        self._meet_fate("discard")
        await super().discard(*args)


def doomed(fates: dict[int, tuple[str, int]]) -> type[DoomedEngine]:
    """Return an engine class with these fates; it travels to the workers by value."""
    return type("Doomed", (DoomedEngine,), {"fates": fates, "__module__": __name__})


class DoomedTrainer(TrainWorker):
    """A training worker that kills its own process when it is to send weights once too often."""

    survives = 0
    num_sent = 0

    def send_weights(self, version: int) -> Any:
        self.num_sent += 1
        if self.num_sent > self.survives:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send_weights(version)


def doomed_trainer(survives: int) -> type[DoomedTrainer]:
    """Return a class of training workers that die in the transfer after `survives` good ones."""
    return type("Doomed", (DoomedTrainer,), {"survives": survives, "__module__": __name__})


class FaultyEngine(EngineActor):
    """Engine 0 gets a wrong byte with its second version; engine 1 silently keeps one tensor of the first."""

    async def receive(self, manifest: Any, *args: Any) -> Any:
        if self.name == "inference-0" and manifest.version == 1:
            group = self._route._group
            start_broadcast = group.start_broadcast

            def corrupt(tensor: Any, source: int) -> Any:
                pending = start_broadcast(tensor, source)
                pending.wait()
                tensor.view(-1)[0] ^= 1
                return pending

            group.start_broadcast = corrupt
        return await super().receive(manifest, *args)

    async def commit(self, version: int) -> Any:
        if self.name == "inference-1":
            tensor = self._staging.staged(version)[KEPT]
            if version == 0:
                self.__dict__["old"] = tensor.clone()
            else:
                tensor.copy_(self.__dict__["old"])
        return await super().commit(version)


def faulty() -> type[FaultyEngine]:
    """Return the class above; it travels to the workers by value."""
    return type("Faulty", (FaultyEngine,), {"__module__": __name__})
