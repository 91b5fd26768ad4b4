"""How the last process of a run failed, and how the run goes on. Pure."""

import re
from collections.abc import Iterable

from rayrl.audit.doctor_record import Patient
from rayrl.audit.run_end import RunEnd
from rayrl.audit.symptom import Symptom

_FULL = re.compile(r"No space left on device|disk is full|disk may be full|Disk quota exceeded", re.IGNORECASE)
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exceeded|Exhausted|Died|Unreachable|Exception): ")
_MODULE = re.compile(r"^(?:[A-Za-z_]\w*\.)+(?=[A-Z]\w*: )")


def failure_of(patient: Patient) -> list[Symptom]:
    """Return the symptom of a process that did not leave in order; an empty list for one that did, or still runs."""
    end = patient.end
    if end in (RunEnd.RUNS, RunEnd.DONE, RunEnd.STOPPED, RunEnd.UNKNOWN):
        return []
    if end is RunEnd.INTERRUPTED:
        what, evidence = "interrupted by a second signal before it could save", (_reached(patient),)
        return [Symptom(kind="failure", what=what, evidence=evidence, setting=f"go on with {how_to_resume(patient)}")]
    if end in (RunEnd.VANISHED, RunEnd.VANISHED_AT_START):
        return [_vanished(patient)]
    lines = error_lines(patient)
    if _is_full(patient):
        return [Symptom(kind="failure", what="the disk was full", evidence=lines, setting=_space(patient))]
    if end is RunEnd.FAILED:
        setting = f"{_whereabouts(patient)}; once the cause is gone, {how_to_resume(patient)}"
        return [Symptom(kind="failure", what="the run failed", evidence=lines, setting=setting)]
    what = f"failed while it started: {_plain(lines[0])}" if lines else "failed while it started"
    setting = f"what the error names, then start it again with {how_to_resume(patient)}"
    return [Symptom(kind="failure", what=what, evidence=(_whereabouts(patient),), setting=setting)]


def error_lines(patient: Patient) -> tuple[str, ...]:
    """Return the errors that the last process ended with, each once: as the ledger has it, as the traceback ends."""
    lines = (patient.failure or "").strip().splitlines()
    last = [line for line in lines if _ERROR_LINE.match(line)][-1:] or lines[-1:]
    return distinct([*patient.error.splitlines()[:1], *last])


def distinct(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the lines without those that an earlier one says already, with the class named in full or not."""
    kept: list[str] = []
    for line in lines:
        if line and not any(_plain(line) in earlier for earlier in kept):
            kept.append(line)
    return tuple(kept)


def how_to_resume(patient: Patient) -> str:
    """Return the option that goes on with the run, and what it starts from."""
    if patient.checkpoint is None and patient.damaged:
        return f"`--resume auto`, once a checkpoint is put back from a copy: {patient.damaged[-1]}"
    if patient.checkpoint is None:
        return "`--resume auto`" + (": from the first step, no checkpoint is complete" if patient.last_step else "")
    step, name = patient.checkpoint.step, patient.checkpoint.path.name
    lost = patient.last_step - step
    again = f"; what came since is done again, {lost} {'step' if lost == 1 else 'steps'}" if lost > 0 else ""
    return f"`--resume auto`: from step {step} (checkpoints/{name}, the last complete one){again}"


def _vanished(patient: Patient) -> Symptom:
    started = " while it started" if patient.end is RunEnd.VANISHED_AT_START else ""
    return Symptom(
        kind="failure",
        what=f"its process ended{started} without a word: it was killed, its machine was lost, or its disk was full",
        evidence=(
            _reached(patient),
            f"neither an end in the ledger nor a logs/failure.txt; {_size(patient.free_bytes)} are free on the disk",
        ),
        setting="the log of the kernel (out of memory) or of the scheduler says who ended it; then go on with "
        + how_to_resume(patient),
    )


def _reached(patient: Patient) -> str:
    if patient.last_step == 0:
        return "no step was recorded"
    return f"the last step in the ledger is {patient.last_step}"


def _is_full(patient: Patient) -> bool:
    """An empty file could be made and not be filled."""
    return patient.failure == "" or any(_FULL.search(line) for line in error_lines(patient))


def _space(patient: Patient) -> str:
    """A checkpoint is written beside those that are there, so that it needs room of its own."""
    facts = [f"{_size(patient.free_bytes)} are free now"]
    if patient.checkpoint is not None:
        needed = sum(item.size for item in patient.checkpoint.manifest.files.values())
        facts.insert(0, f"a checkpoint takes {_size(needed)}")
    where = "" if patient.failure else f". {_whereabouts(patient)}"
    return f"free space ({', '.join(facts)}), then go on with {how_to_resume(patient)}{where}"


def _whereabouts(patient: Patient) -> str:
    if patient.failure:
        return "logs/failure.txt has the whole traceback"
    return "logs/failure.txt could not be written; the output of the command has the traceback"


def _plain(line: str) -> str:
    """Return an error line without the module of its class."""
    return _MODULE.sub("", line)


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
