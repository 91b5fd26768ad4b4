"""What a run has measured so far, read back from its JSON lines."""

from pathlib import Path

from rayrl.driver.train_loop import TrainHistory
from rayrl.tracking.jsonl_sink import metrics_of, read_rows


def read_history(path: Path, num_steps: int) -> TrainHistory:
    """Return what the steps up to `num_steps` measured; of one that was done again after a resume the last time counts.

    Empty if the run wrote no such file.
    """
    history = TrainHistory()
    if not path.is_file():
        return history
    rewards: dict[int, float] = {}
    for row in read_rows(path):
        if "step" not in row or int(row["step"]) > num_steps:
            continue
        metrics = metrics_of(row)
        history.last_metrics |= metrics
        if "reward/mean" in metrics:
            rewards[int(row["step"])] = metrics["reward/mean"]
        if "eval/accuracy" in metrics:
            history.accuracies.append(metrics["eval/accuracy"])
    history.reward_means = [rewards[step] for step in sorted(rewards)]
    return history
