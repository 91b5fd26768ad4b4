"""From which checkpoint a run goes on, and whether it may."""

from pathlib import Path
from typing import Literal

import yaml

from rayrl.checkpoint.compatibility import check_compatible, reason_allowed
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


def find_checkpoint(folder: RunFolder, config: AnyRunConfig, resume: Resume) -> Checkpoint | None:
    """Return the checkpoint to go on from, read and proven; None to start at step 0.

    Raises CheckpointError if it is incomplete, damaged, of another run, or of a config that differs in what is learned
    or how; nothing was changed then.
    """
    if resume == "never":
        return None
    store = CheckpointStore(folder.checkpoints)
    if isinstance(resume, Path):
        checkpoint = store.open(resume, run_id=folder.run_id)
    else:
        newest = store.latest()
        path = newest.path if newest is not None else _fetch(store, config, folder.run_id)
        if path is None:
            if folder.has_begun:
                check_config(folder, config)
                _LOGGER.warning("no complete checkpoint in %s: starting at step 0", folder.checkpoints)
            return None
        checkpoint = store.open(path, run_id=folder.run_id)
    check_config(folder, config)
    section = "driver" if isinstance(config, RunConfig) else config.loop_name
    num_steps = config.driver.num_steps if isinstance(config, RunConfig) else config.loop.num_steps
    if checkpoint.step > num_steps:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has {checkpoint.step} steps already, {section}.num_steps={num_steps} asks "
            "for fewer in all; raise it, or give an earlier checkpoint with `--resume PATH`"
        )
    _LOGGER.info("resuming from step %d: %s", checkpoint.step, checkpoint.path)
    return checkpoint


def check_config(folder: RunFolder, config: AnyRunConfig) -> None:
    """CheckpointError if `config` is not that of the run so far, in what it learns from and how."""
    # Resolved by this rayrl: a field that came later has its default on both sides, and is no difference.
    saved = parse_section(type(config), yaml.safe_load(folder.saved_config()), source=str(folder.config_path))
    for item in check_compatible(saved.model_dump(mode="json"), config.model_dump(mode="json")):
        _LOGGER.info("goes on with another %s (allowed: %s)", item, reason_allowed(item.path))


def _fetch(store: CheckpointStore, config: AnyRunConfig, run_id: str) -> Path | None:
    """Return the newest copy of this run that `checkpoint.copy_to` has, fetched; None if it has none."""
    if config.checkpoint.copy_to is None:
        return None
    mirror = CheckpointMirror(config.checkpoint.copy_to)
    names = [name for name, manifest in mirror.complete().items() if manifest.run_id == run_id]
    if not names:
        return None
    _LOGGER.info("fetching %s from %s", names[-1], config.checkpoint.copy_to)
    return store.adopt(names[-1], lambda path: mirror.fetch(names[-1], path))
