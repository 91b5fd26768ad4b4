"""A resume of a run that has all its steps already: nothing is started for it."""

from rayrl.checkpoint.ledger_events import RUN_ENDED
from rayrl.checkpoint.ledger_reader import last_of_run, read_ledger
from rayrl.checkpoint.store import Checkpoint
from rayrl.config.run import RunConfig
from rayrl.driver.result import RunResult
from rayrl.driver.run_history import read_history
from rayrl.driver.train_loop import summary_metrics
from rayrl.tracking.run_folder import RunFolder


def finished_result(
    folder: RunFolder, config: RunConfig, checkpoint: Checkpoint | None, config_text: str
) -> RunResult | None:
    """Return the result of a run that ended as done with this very config, and left all that it should; else None.

    The metrics are those of the JSON lines, if the run wrote any.
    """
    num_steps = config.driver.num_steps
    if checkpoint is None or checkpoint.step != num_steps or folder.saved_config() != config_text:
        return None
    if config.checkpoint.export_hf and not (folder.export / "config.json").is_file():
        return None
    ledger = read_ledger(folder.ledger_path)
    last, steps = last_of_run(ledger.events), ledger.live_steps
    is_done = last is not None and last.kind == RUN_ENDED and last.detail.get("status") == "done"
    if not is_done or not steps or steps[-1].step != num_steps:
        return None
    metrics = summary_metrics(read_history(folder.metrics_path, num_steps))
    return RunResult(status="done", steps=num_steps, metrics=metrics, run_dir=folder.path)
