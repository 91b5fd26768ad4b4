"""The errors of rayrl: one class per boundary, each with a built-in as second base, all picklable.

A message says who found it, what was given, what is allowed, and which setting to change. `ValueError` is for
users, `assert` for invariants of the code. A broad `except Exception` is allowed only where a failure becomes data:

- `rollout.episode`: a failing workflow or reward becomes an error record on the trajectory;
- `inference.*_actor` and `training.*_actor`: a failure in a background thread is kept and raised to the next caller;
- `driver.run`: the last failure of a run is written to the run folder and raised again;
- `tracking`: a sink that fails is disabled with a warning, it never ends a run;
- `cli`: an error becomes an exit code.
"""


class RayrlError(Exception):
    """Base of every error that rayrl raises on purpose."""

    after_start: bool = False
    """Set on what ends a run that had begun: it is then no longer the input that was wrong, whatever the class."""


class ConfigError(RayrlError, ValueError):
    """A config file, an override or an argument is wrong. The CLI exits with 2."""


class DatasetError(ConfigError):
    """A dataset cannot be read, is empty, or lacks a field. The CLI exits with 2."""


class ModelError(ConfigError):
    """A model folder or tokenizer is missing or cannot be used. The CLI exits with 2."""


class RewardError(RayrlError, RuntimeError):
    """A reward failed on one completion; it becomes an error record, never a 0."""


class WorkflowError(RayrlError, RuntimeError):
    """A workflow failed on one prompt; it becomes an error record."""


class PlacementError(RayrlError, RuntimeError):
    """The cluster lacks what the run asks for. The CLI exits with 2."""


class ActorError(RayrlError, RuntimeError):
    """An actor died, failed to start or failed a call."""


class ActorDied(ActorError):
    """The process of an actor is gone; nothing that is asked of it will ever be answered."""


class ActorUnreachable(ActorError):
    """A call did not reach an actor, which may be back in a moment, or dead with its node and not yet known to be."""


class DeadlineExceeded(RayrlError, TimeoutError):
    """A wait on another process ran out of time; the message names phase, actor, node and since when."""


class TransferError(RayrlError, RuntimeError):
    """Weights did not arrive as sent: digest, shape or membership differ."""


class CollectiveError(RayrlError, RuntimeError):
    """Ranks of a group call different collectives; the message names the first difference."""


class StallError(RayrlError, TimeoutError):
    """No step has finished for longer than `debug.stall_s`; the message names the cause that was found."""


class EngineError(RayrlError, RuntimeError):
    """An inference or training engine cannot do what was asked."""


class CheckpointError(RayrlError, ValueError):
    """A checkpoint is incomplete, foreign or damaged. The CLI exits with 2."""


class RunFolderError(ConfigError):
    """The output folder belongs to another run. The CLI exits with 2."""


class BudgetExhausted(RayrlError, RuntimeError):
    """A failure budget (failed groups, skipped steps) is used up; the run stops."""


class DataExhausted(RayrlError, RuntimeError):
    """The dataset ended before the run had its steps."""


class IllegalTransition(RayrlError, AssertionError):
    """A state machine was asked for a move that it does not have."""
