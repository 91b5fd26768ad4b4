"""What the ledger says of a run as a whole: that it began, how it ended; and the audit of it, left in its folder."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rayrl.audit.report import AUDIT_FILE, write_audit
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_events import RUN_ENDED, RUN_FAILED, RUN_INTERRUPTED, RUN_STARTED
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.driver.progress import Progress
from rayrl.errors import RayrlError
from rayrl.infra.collective_report import report_collectives
from rayrl.utils.logger import get_logger

_LOGGER = get_logger("driver.record")


@dataclass(slots=True, kw_only=True)
class Ending:
    """How the body ended; to be set by it."""

    status: str = "stopped"


@asynccontextmanager
async def recording_run(
    ledger: Ledger, stream: PromptStream, progress: Progress, run_dir: Path
) -> AsyncIterator[Ending]:
    """Record start and end of the body in the ledger, then audit the run, also one that failed."""
    ledger.record_event(RUN_STARTED, progress.step, {"dataset": stream.state()})
    ending = Ending()
    try:
        yield ending
    except BaseException as error:
        _note_divergence(error, run_dir / "logs")
        _record_failure(ledger, progress, error)
        # Cancelled: somebody wants to leave at once.
        if isinstance(error, Exception):
            await asyncio.to_thread(_audit, run_dir)
        raise
    detail = {"status": ending.status, "dataset": stream.state(), "outstanding": progress.outstanding}
    ledger.record_event(RUN_ENDED, progress.step, detail)
    await asyncio.to_thread(_audit, run_dir)


def _note_divergence(error: BaseException, logs: Path) -> None:
    """Say with the error in which collective the ranks parted, where collectives were recorded and that is known."""
    report = report_collectives(logs)
    if report is None:
        return
    if report.divergence is not None:
        error.add_note(f"collectives diverge: {report.divergence}")
    elif isinstance(error, TimeoutError):
        error.add_note("last collectives: " + "; ".join(f"{name} in {call}" for name, call in report.last.items()))


def _record_failure(ledger: Ledger, progress: Progress, error: BaseException) -> None:
    text = f"{type(error).__name__}: {error}"
    is_interrupted = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
    kind, detail = (RUN_INTERRUPTED, {}) if is_interrupted else (RUN_FAILED, {"error": text[:2000]})
    try:
        ledger.record_event(kind, progress.step, detail)
    except RayrlError as second:
        # The ledger may be what failed; the first error is the one to tell.
        _LOGGER.warning("how the run ended could not be recorded: %s", second)


def _audit(run_dir: Path) -> None:
    _LOGGER.info("reading the records of the run once more, for %s", run_dir / AUDIT_FILE)
    try:
        report = write_audit(run_dir)
    except Exception as error:  # noqa: BLE001 - an audit that cannot be made must not hide how the run ended
        _LOGGER.warning("the run could not be audited: %s: %s", type(error).__name__, error)
        return
    refuted = [finding for finding in report.findings if finding.verdict == "refuted"]
    for finding in refuted:
        _LOGGER.error("audit: %s refuted: %s", finding.check, finding.violations[0])
    if not refuted:
        _LOGGER.info("audit: nothing refuted")
