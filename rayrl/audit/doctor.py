"""What is wrong with a run: hangs, wrong results and memory, each with evidence and the setting to change. Pure."""

import math
import re
from collections.abc import Callable

from rayrl.audit.doctor_record import Patient
from rayrl.audit.failure import distinct, failure_of
from rayrl.audit.run_end import RunEnd
from rayrl.audit.symptom import Symptom
from rayrl.checkpoint.ledger_events import ENGINE_LOST, RUN_ENDED, STALLED, WORKER_LOST

_LOSSES = (ENGINE_LOST, WORKER_LOST)
_LOGPROB_GAP = 0.05
_MEMORY = re.compile(
    r"[^\n]*(?:out of memory|OutOfMemory|bad_alloc|MemoryError|oom[- ]kill|No available memory)[^\n]*", re.IGNORECASE
)
_HANG = re.compile(r"^(?:rayrl\.errors\.)?(?:DeadlineExceeded|StallError|CollectiveError): [^\n]*", re.MULTILINE)
_SETTING = re.compile(r"\b(?:driver|debug|reward|rollout|inference|transfer|supervision|deadlines)\.[a-z_.]+\b")


def diagnose(patient: Patient) -> list[Symptom]:
    """Return all that is found, first what ended the run; an empty list for a run with nothing wrong."""
    found = [symptom for rule in _RULES for symptom in rule(patient)]
    # A deadline, a lack of memory or a collective is what the failure is about, and told with its setting.
    is_told = patient.end is RunEnd.FAILED and (
        _diverged(patient) or _HANG.search(patient.reason) or _MEMORY.search(patient.reason)
    )
    return found if is_told else [*failure_of(patient), *found]


def _diverged(patient: Patient) -> list[Symptom]:
    if patient.collectives is None or patient.collectives.divergence is None:
        return []
    divergence = patient.collectives.divergence
    if None in divergence.odd.values() and not (_hangs(patient) or patient.reason):
        return []  # ranks are read one after the other: of a run that goes on, one may be a call behind
    last = tuple(f"{name}: last {call}" for name, call in patient.collectives.last.items())
    return [
        Symptom(
            kind="hang",
            what=f"collectives diverge: {divergence}",
            evidence=last,
            setting="the Python line above; `debug.collectives: check` stops every rank before such a call",
        )
    ]


def _stalled(patient: Patient) -> list[Symptom]:
    found = []
    for event in [event for event in patient.events if event.kind == STALLED][-1:]:
        found.append(
            Symptom(
                kind="hang",
                what=f"no step finished for debug.stall_s: {event.detail['cause']}",
                evidence=(f"logs/{event.detail['report']} has every state and all stacks",),
                setting="`debug.on_stall: stop` ends such a run; the deadline of what hangs may be too long",
            )
        )
    if _hangs(patient):
        found.append(_live_hang(patient))
    match = _HANG.search(patient.reason)
    if match is not None:
        settings = sorted(set(_SETTING.findall(match.group())))
        found.append(
            Symptom(
                kind="hang",
                what=f"a wait ended by its deadline: {match.group()}",
                evidence=("logs/failure.txt has the last lines of that actor's stderr",) if patient.failure else (),
                setting=", ".join(settings) or "driver.deadlines, if it was only slow",
            )
        )
    return found


def _hangs(patient: Patient) -> bool:
    status = patient.status
    if not patient.is_alive or status is None:
        return False
    stall_s = math.inf if patient.config is None else patient.config.debug.stall_s
    return patient.status_age_s > 60 or status.step_s + patient.status_age_s > stall_s


def _live_hang(patient: Patient) -> Symptom:
    status = patient.status
    assert status is not None, "only for a run with a status"
    if patient.status_age_s > 60:
        return Symptom(
            kind="hang",
            what=f"the driver (pid {status.pid} on {status.host}) has told nothing for {patient.status_age_s:.0f} s",
            evidence=(f"its last phase was {status.phase}",),
            setting="`py-spy dump` of the driver; a filter or callback of yours may block its event loop",
        )
    places = tuple(f"{name} is in {_innermost(stack)}" for name, stack in patient.stacks.items())
    return Symptom(
        kind="hang",
        what=f"no step for {status.step_s:.0f} s: the train loop is {status.phase} for {status.phase_s:.0f} s, with "
        f"{status.buffered} of {status.needed} groups",
        evidence=(f"rollout loop: {dict(status.rollout)}", *places),
        setting="debug.stall_s for an earlier report, debug.collectives: record if it is in a training step",
    )


def _innermost(stack: str) -> str:
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return lines[0] if lines else stack.splitlines()[0] if stack else "nothing known"


def _refuted(patient: Patient) -> list[Symptom]:
    settings = {
        "ages": "driver.max_staleness and driver.on_stale",
        "publications": "transfer.backend; look at the engines named",
        "denominators": "tracking.rollout_log must stay on, and its files as they are",
        "integrity": "take the folder, or the file that is named, from a copy; do not resume from this one as it is",
    }
    return [
        Symptom(
            kind="records" if finding.check == "integrity" else "wrong results",
            what=f"the audit refutes that {finding.claim}",
            evidence=finding.violations[:3],
            setting=settings.get(finding.check, "report it with the folder: this must not happen"),
        )
        for finding in patient.audit.findings
        if finding.verdict == "refuted"
    ]


def _logprob_gap(patient: Patient) -> list[Symptom]:
    gap = patient.metrics.get("mismatch/abs_logprob_diff")
    config = patient.config
    if config is None or gap is None or (math.isfinite(gap) and gap <= _LOGPROB_GAP):
        return []
    return [
        Symptom(
            kind="wrong results",
            what=f"engines and trainer disagree about logprobs by {gap:.3g} per token (above {_LOGPROB_GAP:g})",
            evidence=(
                f"model.dtype={config.model.dtype}, training autocast="
                f"{config.training.engine.autocast if config.training.engine.type == 'fsdp' else 'of its engine'}",
                f"largest age of the last step: {patient.metrics.get('staleness/age_max', 0):g} versions",
            ),
            setting="at age 0 the same data type on both sides (model.dtype: float32 to find out); else a smaller "
            "driver.max_staleness or training.optimizer.lr",
        )
    ]


def _stale(patient: Patient) -> list[Symptom]:
    share = patient.metrics.get("staleness/stale_token_share", 0.0)
    kept = patient.metrics.get("staleness/kept_stale_groups", 0.0)
    if patient.config is None or (share <= 0.2 and not kept):
        return []
    driver = patient.config.driver
    return [
        Symptom(
            kind="wrong results",
            what=f"{share:.0%} of the tokens of the last step were too old, {kept:g} groups were trained all the same",
            evidence=(f"driver.max_staleness={driver.max_staleness}, driver.on_stale={driver.on_stale}",),
            setting="a larger driver.max_staleness, fewer groups in flight, or faster engines (inference.num_engines)",
        )
    ]


def _skipped(patient: Patient) -> list[Symptom]:
    skipped = patient.metrics.get("train/skipped_steps", 0.0)
    if not skipped:
        return []
    return [
        Symptom(
            kind="wrong results",
            what=f"{skipped:g} training steps changed nothing: loss or gradient was not finite, or engines and trainer "
            "were further apart than training.max_logprob_gap",
            evidence=(f"last gradient norm {patient.metrics.get('train/grad_norm', math.nan):.3g}",),
            setting="a smaller training.optimizer.lr or max_grad_norm; driver.max_failure_share ends such a run",
        )
    ]


def _memory(patient: Patient) -> list[Symptom]:
    lines = [match.group().strip() for match in _MEMORY.finditer(patient.reason)]
    lines += [
        str(event.detail.get("detail", ""))
        for event in patient.events
        if event.kind in _LOSSES and _MEMORY.search(str(event.detail.get("detail", "")))
    ]
    if not lines:
        return []
    told = distinct(lines)
    return [
        Symptom(
            kind="memory",
            what=f"a process ran out of memory: {told[0]}",
            evidence=(*told[1:3], *memory_lines(patient)),
            setting="more training.parallel.data (shards weights and moments), a smaller training.micro_batch_tokens, "
            "training.engine.activation_checkpointing, a smaller inference.engine.max_batch_size, or "
            "placement.mode: disaggregated",
        )
    ]


def memory_lines(patient: Patient) -> tuple[str, ...]:
    """Return who owns which device and what must be resident there, from the config and the size of the model."""
    config = patient.config
    if config is None:
        return ()
    parallel, engines = config.training.parallel, config.inference.num_engines
    shards = parallel.world_size // parallel.replicate
    axes = ", ".join(f"{name} {size}" for name, size in parallel.model_dump().items() if size != 1) or "one rank"
    width = 2 if config.model.dtype in ("bfloat16", "float16") else 4
    weights = patient.model_bytes
    # Weight files have the data type of the model; masters, gradients and two moments are float32.
    training = weights / width * 16 / shards if weights else 0.0
    shared = config.placement.mode == "colocated"
    kind = "GPU" if config.training.gpus_per_worker else "CPU"
    where = "beside engine i" if shared else "of its own"
    return (
        f"training: {parallel.world_size} ranks ({axes}), each with 1/{shards} of the state, on {kind} memory {where}; "
        f"weights, gradients and moments are about {_gib(training)} a rank, and activations of "
        f"{config.training.micro_batch_tokens} tokens come on top",
        f"inference: {engines} engines ({config.inference.engine.type}), weights of {_gib(weights)} each, twice while "
        "a version is staged, and the KV cache",
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size else "unknown size"


def _lost(patient: Patient) -> list[Symptom]:
    lost = [event for event in patient.events if event.kind in _LOSSES]
    if len(lost) < 3 or (patient.events and patient.events[-1].kind == RUN_ENDED):
        return []
    return [
        Symptom(
            kind="failure",
            what=f"{len(lost)} actors were lost",
            evidence=tuple(f"{event.kind}: {dict(event.detail)}" for event in lost[-3:]),
            setting="supervision.restarts bounds replacements; the causes above come first",
        )
    ]


_RULES: tuple[Callable[[Patient], list[Symptom]], ...] = (
    _diverged,
    _memory,
    _stalled,
    _refuted,
    _logprob_gap,
    _stale,
    _skipped,
    _lost,
)


def _state(patient: Patient) -> str:
    """Say where the run is: by the ledger, since a status is up to some seconds older."""
    status, step = patient.status, patient.last_step
    if patient.is_alive:
        return f"runs, {_steps(step)}" + (f", {status.phase}" if status is not None else "")
    if patient.end in (RunEnd.DONE, RunEnd.STOPPED):
        return f"{'finished' if patient.end is RunEnd.DONE else 'stopped'} after {step} steps"
    if patient.end in (RunEnd.FAILED_AT_START, RunEnd.VANISHED_AT_START):
        return f"does not run, {_steps(step)}"
    if patient.end is RunEnd.UNKNOWN:
        return "does not run"
    seen = ""
    if status is not None and status.step == step:
        seen = f", and was last seen {_ago(patient.status_age_s)} ago: {status.phase}"
    return f"does not run, {_steps(step)}{seen}"


def _steps(number: int) -> str:
    return "no step was made" if number == 0 else "1 step is done" if number == 1 else f"{number} steps are done"


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def diagnosis_lines(patient: Patient, symptoms: list[Symptom]) -> list[str]:
    """Return the diagnosis as text."""
    lines = [f"{patient.path}: {_state(patient)}"]
    if not symptoms:
        lines.append("nothing wrong was found in its records")
    for symptom in symptoms:
        lines += ["", f"{symptom.kind}: {symptom.what}"]
        lines += [f"  evidence: {text}" for text in symptom.evidence]
        lines.append(f"  change: {symptom.setting}")
    return lines
