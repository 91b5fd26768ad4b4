"""Turn what Ray raises into the errors of rayrl, with the actor's name and the root cause in the message."""

import re

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

import rayrl.errors
from rayrl.errors import ActorDied, ActorError, ActorUnreachable, RayrlError
from rayrl.infra.identity import ActorLabel
from rayrl.infra.stderr_tail import describe_stderr, locate_actor

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK_LINES = 12


def is_death(error: BaseException) -> bool:
    """Return True if the actor itself is gone, which explains failures that its peers report."""
    return isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)


def explain_failure(error: RayError, *, phase: str, actor: ActorLabel | str) -> RayrlError:
    """Return the error to raise, from `error`, for a call that failed.

    An error of rayrl that was raised in the actor comes back as it was, with a note on where. Anything else
    becomes an ActorError: the death of the actor an ActorDied, a lost connection to it an ActorUnreachable. Reads
    the actor's log: may block for some seconds.
    """
    own = _own_error(error)
    if own is not None:
        note = f"raised in {actor} during {phase}"
        if note not in vars(own).get("__notes__", ()):
            own.add_note(note)
        return own
    found = locate_actor(actor) if isinstance(actor, ActorLabel) else actor
    text = _COLOURS.sub("", str(error)).strip()
    if isinstance(error, RayTaskError):
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-_TRACEBACK_LINES:])
        return ActorError(f"{phase}: {found} failed:\n{tail}")
    if is_death(error):
        return ActorDied(f"{phase}: {found} died: {_cause_of_death(text)}\n{describe_stderr(found)}")
    kind = ActorUnreachable if isinstance(error, ActorUnavailableError) else ActorError
    return kind(f"{phase}: {found} could not be called: {text}\n{describe_stderr(found)}")


def _cause_of_death(text: str) -> str:
    """Return what Ray says of the cause, without its list of names and ids: those are in the actor's label."""
    head, found, rest = text.partition("\n\tclass_name:")
    if not found:
        return text
    lines = [line for line in rest.splitlines()[1:] if not line.startswith("\t")]
    cause, has_guesses, _ = " ".join(lines).partition(" Some common causes include")
    guess = " It was killed, by the kernel for want of memory for example, or it crashed." if has_guesses else ""
    return (cause.strip() or head) + guess


def _own_error(error: RayError) -> RayrlError | None:
    """Return the error of rayrl that is the root cause, if there is one."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        return cause if isinstance(cause, RayrlError) else None
    if isinstance(error, RayActorError):
        # Of an error in `__init__` Ray keeps only the text; its last part names class and message.
        _, found, tail = _COLOURS.sub("", str(error)).rpartition("\nrayrl.errors.")
        name, _, message = tail.partition(": ")
        kind = vars(rayrl.errors).get(name) if found else None
        if isinstance(kind, type) and issubclass(kind, RayrlError):
            return kind(message.strip())
    return None
