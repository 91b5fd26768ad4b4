"""What a failed run leaves in its folder: the last failure, or nothing at all where nothing had begun."""

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rayrl.errors import CheckpointError, ConfigError, PlacementError, RayrlError
from rayrl.tracking.run_folder import FAILURE_FILE, RunFolder
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver")


@contextmanager
def keeping_failure(folder: RunFolder) -> Iterator[None]:
    """Write what the body fails with to `logs/failure.txt`, and raise it again.

    Bad input that shows before the run has begun, or a signal then, removes a new folder instead: nothing must be in
    the way of the next try.
    """
    try:
        yield
    except (ConfigError, CheckpointError, PlacementError) as error:
        if error.after_start:
            _write(folder)
        elif not folder.resumed:
            folder.discard()
        raise
    except asyncio.CancelledError:
        # A signal while the run started, which has left nothing to go on from.
        if not folder.resumed and not folder.has_begun:
            folder.discard()
        raise
    except Exception:  # the boundary where the last failure of a run is kept
        _write(folder)
        raise


@contextmanager
def marking_start() -> Iterator[None]:
    """Mark errors of the body as those of a run that had begun."""
    try:
        yield
    except RayrlError as error:
        error.after_start = True
        raise


def _write(folder: RunFolder) -> None:
    path = folder.logs / FAILURE_FILE
    try:
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError as error:
        # On a full disk this must not hide the failure itself.
        _LOGGER.warning("cannot write %s: %s", path, error.strerror)
