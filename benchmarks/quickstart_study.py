"""Many runs of the quickstart task from one warm start, for the studies beside this file.

    warm start (model + SFT, made once) --export--> run of row 1, row 2, ... --> results.jsonl, one line per row

A row that `results.jsonl` has already is not run again, so a study can be stopped at any time and goes on where it was.
Everything lies below the folder of the study; run folders are removed once they are measured.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayrl import Run, RunConfig, SFTRun, SFTRunConfig
from rayrl.infra.cluster import join_cluster
from rayrl.models.tiny import create_tiny_model
from rayrl.tracking.jsonl_sink import read_series
from rayrl.utils.atomic_file import atomic_writer

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ALPHABET = "0123456789+="
TARGET = 0.85
"""Held-out accuracy that a preset has to reach."""
COMMON = (
    "driver.groups_per_step=32",
    "driver.minibatches=4",
    "driver.deadlines.start_s=1800",
    "checkpoint.at_end=false",
    "checkpoint.export_hf=false",
    "tracking.rollout_log=false",
    "tracking.sinks=[jsonl]",
)
"""Four optimizer steps per training step, of 8 groups each: with a single one the ratio of policy and proximal policy
would be 1 and most objectives the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKey:
    """What is run: equal keys are one measurement."""

    name: str
    seed: int
    steps: int
    overrides: tuple[str, ...]
    """Settings beyond `COMMON`, in the order given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured run."""

    key: RowKey
    before: float = 0.0
    """Held-out accuracy of the warm start."""
    after: float = 0.0
    """Held-out accuracy after the last step."""
    curve: tuple[tuple[int, float], ...] = ()
    """(step, held-out accuracy) where it was measured."""
    seconds: float = 0.0
    """Whole run, start of the actors included."""
    cpu_s: float = 0.0
    """CPU seconds of all its processes; unlike `seconds` hardly changed by what else the machine does."""
    load: float = 0.0
    """Load average of the last minute at the end; beyond the number of cores `seconds` say little."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Mean over the steps of some metrics, and `staleness/trajectory_age_max` as the largest."""
    error: str | None = None
    """What ended the run, if it failed."""

    @property
    def reached(self) -> int | None:
        """First measured step with at least `TARGET`; None if there is none."""
        return next((step for step, accuracy in self.curve if accuracy >= TARGET), None)


MEANS = (
    "staleness/trajectory_age_mean",
    "reward/mean",
    "policy/entropy",
    "mismatch/k3",
    "importance/weight",
    "time/train_s",
    "time/wait_groups_s",
    "time/step_s",
    "rollout/filtered_groups",
)


class Study:
    """A folder with a warm start and the rows that were measured from it."""

    def __init__(self, folder: Path, results_name: str) -> None:
        """Read the rows that are there; nothing is started."""
        self.folder = folder
        self.results = folder / results_name
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.results.read_text(encoding="utf-8").splitlines() if self.results.exists() else []
        self.rows = [_row(json.loads(line)) for line in lines]

    def find(self, key: RowKey) -> Row | None:
        """Return the row that was measured for `key`; failed rows count as not measured."""
        return next((row for row in self.rows if row.key == key and row.error is None), None)

    def run_missing(self, keys: Sequence[RowKey]) -> None:
        """Run what is not measured yet, in order."""
        missing = [key for key in keys if self.find(key) is None]
        print(f"{len(keys) - len(missing)} of {len(keys)} rows are measured already", flush=True)
        if not missing:
            return
        # One cluster for all: its start would be a large part of a short run.
        join_cluster(2, log_to_driver=False)
        model = self._warm_start()
        for number, key in enumerate(missing, 1):
            row = self._run(key, model)
            self._append(row)
            print(f"[{number}/{len(missing)}] {describe(row)}", flush=True)

    def _warm_start(self) -> Path:
        """Return the model folder that all rows start from; the two parts of the quickstart before GRPO."""
        folder = self.folder / "warm"
        if not folder.exists():
            work = self.folder / "warm-work"
            shutil.rmtree(work, ignore_errors=True)
            create_tiny_model(work / "model", alphabet=ALPHABET)
            overrides = [f"run.output_root={work}", "run.name=sft", f"model.path={work / 'model'}"]
            result = SFTRun(SFTRunConfig.load(CONFIGS / "quickstart_sft.yaml", overrides)).train()
            (result.run_dir / "export").rename(folder)
            shutil.rmtree(work)
        return folder

    def _run(self, key: RowKey, model: Path) -> Row:
        name = "row"
        shutil.rmtree(self.folder / name, ignore_errors=True)
        config = RunConfig.load(CONFIGS / "quickstart_grpo.yaml", row_overrides(key, self.folder, name, model))
        start = time.monotonic()
        with CpuClock() as clock:
            try:
                result = Run(config).train()
            except Exception as error:  # noqa: BLE001 - a row that fails is a result; the others go on
                return Row(key=key, seconds=time.monotonic() - start, error=f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - start
        if result.status == "stopped":
            raise SystemExit("stopped; the rows so far are kept")
        path = config.run_dir / "metrics.jsonl"
        curve = tuple(read_series(path, "eval/accuracy"))
        series = {metric: [value for _, value in read_series(path, metric)] for metric in MEANS}
        means = {metric: sum(values) / len(values) for metric, values in series.items() if values}
        ages = [value for _, value in read_series(path, "staleness/trajectory_age_max")]
        return Row(
            key=key,
            before=result.metrics["eval/accuracy_before"],
            after=result.metrics["eval/accuracy"],
            curve=curve,
            seconds=seconds,
            cpu_s=clock.seconds,
            load=os.getloadavg()[0],
            means=means | {"staleness/trajectory_age_max": max(ages)},
        )

    def _append(self, row: Row) -> None:
        self.rows.append(row)
        with atomic_writer(self.results) as file:
            file.write("".join(json.dumps(asdict(row)) + "\n" for row in self.rows).encode())


def row_overrides(key: RowKey, folder: Path, name: str, model: Path) -> list[str]:
    """Return the overrides of the quickstart's config for a row."""
    return [
        *COMMON,
        f"run.output_root={folder}",
        f"run.name={name}",
        f"run.seed={key.seed}",
        f"model.path={model}",
        f"driver.num_steps={key.steps}",
        *key.overrides,
    ]


def describe(row: Row) -> str:
    """Return one line about a row."""
    head = f"{row.key.name} seed {row.key.seed}: "
    if row.error is not None:
        return head + row.error.splitlines()[0]
    age = row.means.get("staleness/trajectory_age_mean", 0.0)
    return (
        f"{head}{row.before:.3f} -> {row.after:.3f}, {TARGET} reached at step {row.reached}, mean age {age:.2f}, "
        f"{row.seconds:.0f} s, {row.cpu_s:.0f} CPU s, load {row.load:.1f}"
    )


def _row(data: dict[str, Any]) -> Row:
    key = data.pop("key")
    key["overrides"] = tuple(key["overrides"])
    data["curve"] = tuple((int(step), float(value)) for step, value in data["curve"])
    return Row(key=RowKey(**key), **data)


class CpuClock:
    """CPU seconds that all processes below this one used while it was open, sampled from `/proc` twice a second.

    What a process uses between the last sample and its end is missed.
    """

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def seconds(self) -> float:
        """CPU seconds so far."""
        return sum(value - self._first[pid] for pid, value in self._last.items())

    def __enter__(self) -> "CpuClock":
        self._first = _descendants()
        self._last = dict(self._first)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.5):
            for pid, value in _descendants().items():
                self._first.setdefault(pid, 0.0)
                self._last[pid] = value


def _descendants() -> dict[int, float]:
    """Return CPU seconds by process id, of this process and all below it; empty where there is no `/proc`."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may contain spaces.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / tick
    below = {os.getpid()}
    while True:
        added = {pid for pid, parent in parents.items() if parent in below} - below
        if not added:
            return {pid: seconds[pid] for pid in below if pid in seconds}
        below |= added
