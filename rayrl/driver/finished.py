"""A resume of a run that has all its steps already: nothing is started for it."""

from rayrl.checkpoint.ledger_events import RUN_ENDED, RUN_FAILED, RUN_STARTED
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.checkpoint.store import Checkpoint
from rayrl.config.run import RunConfig
from rayrl.driver.result import RunResult
from rayrl.driver.train_loop import TrainHistory, summary_metrics
from rayrl.tracking.jsonl_sink import read_rows
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
    ends = [event for event in ledger.events if event.kind in (RUN_STARTED, RUN_ENDED, RUN_FAILED)]
    steps = ledger.live_steps
    is_done = bool(ends) and ends[-1].kind == RUN_ENDED and ends[-1].detail.get("status") == "done"
    if not is_done or not steps or steps[-1].step != num_steps:
        return None
    return RunResult(
        status="done", steps=num_steps, metrics=summary_metrics(_history(folder, num_steps)), run_dir=folder.path
    )


def _history(folder: RunFolder, num_steps: int) -> TrainHistory:
    """Return what the run measured; of a step that was done again after a resume the last time counts."""
    history = TrainHistory()
    if not folder.metrics_path.is_file():
        return history
    rewards: dict[int, float] = {}
    for row in read_rows(folder.metrics_path):
        metrics = {name: float(value) for name, value in row.items() if "/" in name}
        history.last_metrics |= metrics
        if "reward/mean" in metrics:
            rewards[int(row["step"])] = metrics["reward/mean"]
        if "eval/accuracy" in metrics:
            history.accuracies.append(metrics["eval/accuracy"])
    history.reward_means = [rewards[step] for step in sorted(rewards) if step <= num_steps]
    return history
