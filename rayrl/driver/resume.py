"""From which checkpoint a run goes on, and whether it may."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from rayrl.checkpoint.compatibility import check_compatible, reason_allowed
from rayrl.checkpoint.damaged import DamagedCheckpoint
from rayrl.checkpoint.ledger_check import check_ledger
from rayrl.checkpoint.mirror import CheckpointMirror
from rayrl.checkpoint.store import Checkpoint, CheckpointStore
from rayrl.config.loader import parse_section
from rayrl.config.run import RunConfig
from rayrl.config.supervised import SupervisedRunConfig
from rayrl.errors import CheckpointError
from rayrl.tracking.run_folder import RunFolder
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver")

Resume = Literal["never", "auto"] | Path
AnyRunConfig = RunConfig | SupervisedRunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    checkpoint: Checkpoint | None
    """Read and proven; None to start at step 0."""
    damaged: tuple[DamagedCheckpoint, ...] = ()
    """Folders beside it that are no whole checkpoints; `set_damaged_aside` once the run goes on."""


def find_checkpoint(folder: RunFolder, config: AnyRunConfig, resume: Resume) -> ResumePoint:
    """Return the checkpoint to go on from.

    With `auto` that is the newest whole one; damaged ones are told, with the steps that are done again.
    Raises CheckpointError if there are checkpoints and none can be used, if the one to go on from is of another run or
    of a config that differs in what is learned or how, or if the ledger is not the one it was made with; nothing was
    changed then, and nothing was started.
    """
    if resume == "never":
        return ResumePoint(checkpoint=None)
    store = CheckpointStore(folder.checkpoints)
    if isinstance(resume, Path):
        checkpoint: Checkpoint | None = store.open(resume, run_id=folder.run_id)
        damaged = [item for item in store.survey()[1] if not item.is_unreadable]
    else:
        checkpoint, damaged = _newest(store, folder, config)
    if checkpoint is not None or folder.has_begun:
        check_config(folder, config)
    last_step = check_ledger(folder.ledger_path, checkpoint) if isinstance(config, RunConfig) else 0
    if checkpoint is None:
        if folder.has_begun:
            _LOGGER.warning("no complete checkpoint in %s: starting at step 0", folder.checkpoints)
        return ResumePoint(checkpoint=None)
    section = "driver" if isinstance(config, RunConfig) else config.loop_name
    num_steps = config.driver.num_steps if isinstance(config, RunConfig) else config.loop.num_steps
    if checkpoint.step > num_steps:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has {checkpoint.step} steps already, {section}.num_steps={num_steps} asks "
            "for fewer in all; raise it, or give an earlier checkpoint with `--resume PATH`"
        )
    if resume == "auto":
        _tell_damaged(checkpoint, damaged, last_step)
    _LOGGER.info("resuming from step %d: %s", checkpoint.step, checkpoint.path)
    return ResumePoint(checkpoint=checkpoint, damaged=tuple(damaged))


def set_damaged_aside(folder: RunFolder, point: ResumePoint) -> None:
    """Rename the damaged checkpoints beside the one that the run goes on from: no audit is to take them for its own."""
    store = CheckpointStore(folder.checkpoints)
    for item in point.damaged:
        target = store.set_aside(item)
        if target is not None:
            _LOGGER.warning("%s: kept as %s, remove it when you do not need it any more", item, target)


def check_config(folder: RunFolder, config: AnyRunConfig) -> None:
    """CheckpointError if `config` is not that of the run so far, in what it learns from and how."""
    # Resolved by this rayrl: a field that came later has its default on both sides, and is no difference.
    saved = parse_section(type(config), yaml.safe_load(folder.saved_config()), source=str(folder.config_path))
    for item in check_compatible(saved.model_dump(mode="json"), config.model_dump(mode="json")):
        _LOGGER.info("goes on with another %s (allowed: %s)", item, reason_allowed(item.path))


def _newest(
    store: CheckpointStore, folder: RunFolder, config: AnyRunConfig
) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """Return the newest whole checkpoint, from `checkpoint.copy_to` if it is missing or damaged here, and those that
    are not whole. CheckpointError if there are some and none is whole.
    """
    whole, damaged = store.survey()
    found: Checkpoint | None = None
    while whole and found is None:
        candidate = whole.pop()
        try:
            found = store.open(candidate.path, run_id=folder.run_id)
        except CheckpointError as error:
            if candidate.manifest.run_id != folder.run_id:
                raise
            damaged.append(DamagedCheckpoint.from_error(candidate.path, error))
    unreadable = next((item for item in damaged if item.is_unreadable), None)
    if unreadable is not None:
        raise CheckpointError(
            f"checkpoint {unreadable.path}: {unreadable.reason}; it may be whole: make it readable, or move it away to "
            "go on without it"
        )
    if found is None or damaged:
        found = _fetch(store, config, folder.run_id, found) or found
    if found is None and damaged:
        raise CheckpointError(_none_left(folder, config, damaged))
    return found, sorted(damaged, key=lambda item: item.path)


def _fetch(
    store: CheckpointStore, config: AnyRunConfig, run_id: str, instead_of: Checkpoint | None
) -> Checkpoint | None:
    """Return the newest copy of this run that `checkpoint.copy_to` has, fetched; None if it has none that is newer."""
    if config.checkpoint.copy_to is None:
        return None
    oldest = 0 if instead_of is None else instead_of.manifest.serial
    try:
        mirror = CheckpointMirror(config.checkpoint.copy_to)
        names = [
            name
            for name, manifest in mirror.complete().items()
            if manifest.run_id == run_id and manifest.serial > oldest
        ]
        if not names:
            return None
        _LOGGER.info("fetching %s from %s", names[-1], config.checkpoint.copy_to)
        return store.open(store.adopt(names[-1], lambda path: mirror.fetch(names[-1], path)), run_id=run_id)
    except CheckpointError as error:
        if instead_of is None:
            raise
        _LOGGER.warning("no newer copy can be fetched from %s: %s", config.checkpoint.copy_to, error)
        return None


def _none_left(folder: RunFolder, config: AnyRunConfig, damaged: Sequence[DamagedCheckpoint]) -> str:
    copies = config.checkpoint.copy_to
    lines = "".join(f"\n  {item}" for item in damaged)
    where = "a copy" if copies is None else f"a copy ({copies} has none of this run that is whole)"
    return (
        f"no checkpoint in {folder.checkpoints} can be used, and nothing was started or changed:{lines}\n"
        f"put the files back from {where} and resume again; or start a new run under another run.name; or, to start "
        "this one again from step 0, remove the folders named above and give `--resume auto`"
    )


def _tell_damaged(checkpoint: Checkpoint, damaged: Sequence[DamagedCheckpoint], last_step: int) -> None:
    """Say in one line why the run goes on from an older checkpoint, and what that costs."""
    newer = [item for item in damaged if item.step > checkpoint.step]
    if not newer:
        return
    last = max(last_step, *(item.step for item in newer))
    _LOGGER.warning(
        "%s: going on from step %d instead, so %d steps (%d to %d) are done again",
        "; ".join(str(item) for item in newer),
        checkpoint.step,
        last - checkpoint.step,
        checkpoint.step + 1,
        last,
    )
