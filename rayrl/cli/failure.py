"""How a failure is shown: one block on stderr, with a traceback only where the error is not one of ours."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayrl.cli.exit_code import ExitCode, exit_code_of
from rayrl.errors import RayrlError


@contextmanager
def naming_run_folder(run_dir: Path) -> Iterator[None]:
    """Add the run's folder, where logs and the last checkpoint are, to a failure of the body.

    Not to bad input: whatever lies in the folder then is of an earlier run.
    """
    try:
        yield
    except Exception as error:
        if exit_code_of(error) is not ExitCode.BAD_INPUT and run_dir.is_dir():
            error.add_note(f"run folder: {run_dir}")
        raise


def root_error(error: BaseException) -> BaseException:
    """Return the error that a remote call failed with, where it is one of ours, else the error itself."""
    exceptions = sys.modules.get("ray.exceptions")
    if exceptions is not None and isinstance(error, exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, RayrlError):
            return cause
    return error


def failure_text(error: BaseException) -> str:
    """Return what is printed for an error: `error: ...`, its notes, and for unexpected ones the traceback first."""
    notes = [str(note) for note in error.__notes__] if hasattr(error, "__notes__") else []
    if isinstance(error, RayrlError):
        return "\n  ".join([f"error: {error}", *notes])
    if exit_code_of(error) is ExitCode.INTERRUPTED:
        return "error: interrupted"
    stack = "".join(traceback.format_exception(error)).rstrip()
    return "\n  ".join([f"{stack}\nerror: unexpected {type(error).__name__}: {error}", *notes])
