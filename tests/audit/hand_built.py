"""Folders of runs, built by hand: no Ray, no model."""

from contextlib import closing
from pathlib import Path

import yaml

from rayrl.checkpoint.ledger import Ledger, PublishedVersion
from rayrl.checkpoint.ledger_events import RUN_STARTED
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.store import CheckpointStore
from rayrl.config.digest import digest_of
from rayrl.config.run import RunConfig
from rayrl.config.supervised import SFTRunConfig
from rayrl.tracking.run_folder import RunFolder

DATASET = {"length": 9, "frontier": [0, 0], "accounted_ahead": []}


def begin(config: RunConfig | SFTRunConfig) -> Path:
    """Make the folder of a run that came no further, and leave it."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    folder = RunFolder.create(config.run_dir, text, digest_of(text), ["rayrl", "train"], resume=False)
    folder.close()
    return folder.path


def record_steps(run_dir: Path, number: int) -> None:
    """Record a start and some steps without prompts, as a process that was then killed."""
    with closing(Ledger.open(run_dir / "ledger.sqlite")) as ledger:
        ledger.record_event(RUN_STARTED, 0, {"dataset": DATASET})
        ledger.record_publication(_published(0))
        for step in range(1, number + 1):
            ledger.record_step(step, step, [], published=_published(step))


def _published(version: int) -> PublishedVersion:
    return PublishedVersion(version=version, sent=f"{version}", acknowledged={"inference-0": f"{version}"})


def record(run_dir: Path, kind: str, step: int, **detail: object) -> None:
    """Add an event."""
    with closing(Ledger.open(run_dir / "ledger.sqlite")) as ledger:
        ledger.record_event(kind, step, detail)


def save(run_dir: Path, step: int, size: int = 1000) -> None:
    """Write a complete checkpoint with one file of a size."""
    store = CheckpointStore(run_dir / "checkpoints")
    pending = store.begin(step)
    (pending.path / "weights.bin").write_bytes(bytes(size))
    state = RunState(
        step=step,
        version=step,
        dataset_state=DATASET,
        buffered=0,
        ledger_position=step,
        consumed=step,
        config_digest="d",
        run_id="r",
    )
    store.commit(pending, state)
