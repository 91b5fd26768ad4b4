"""The exit codes of `rayrl`: what a script or a scheduler can rely on."""

from asyncio import CancelledError
from enum import IntEnum

from rayrl.errors import CheckpointError, ConfigError, PlacementError


class ExitCode(IntEnum):
    """How a command ended."""

    DONE = 0
    """The command did all that was asked."""
    FAILED = 1
    """It started and failed, by an error of ours or an unexpected one."""
    BAD_INPUT = 2
    """Usage, config, files, checkpoint or resources are wrong; the fix is the caller's."""
    STOPPED = 3
    """SIGTERM or Ctrl-C came, the step was finished and saved; `--resume auto` goes on from there."""
    INTERRUPTED = 130
    """A second signal: left at once, nothing more was saved."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code that an error ends the process with."""
    if isinstance(error, (KeyboardInterrupt, CancelledError)):
        return ExitCode.INTERRUPTED
    if isinstance(error, (ConfigError, PlacementError, CheckpointError)) and not error.after_start:
        return ExitCode.BAD_INPUT
    return ExitCode.FAILED
