"""The last lines of a run: status, steps, accuracy, reward, folder."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rayrl.cli.exit_code import ExitCode

if TYPE_CHECKING:
    from rayrl.driver.result import RunResult

_METRICS = {
    "accuracy before": "eval/accuracy_before",
    "accuracy after": "eval/accuracy",
    "reward first step": "reward/first",
    "reward last step": "reward/last",
    "margin before": "eval/margin_before",
    "margin after": "eval/margin",
    "loss last step": "loss/last",
}


def summary_rows(result: "RunResult") -> list[tuple[str, str]]:
    """Return label and value of each line; metrics that the run does not have are left out."""
    status = "stopped; go on with --resume auto" if result.status == "stopped" else result.status
    rows = [("status", status), ("steps", str(result.steps))]
    metrics = dict(result.metrics)
    if metrics.get("eval/version", 0) < metrics.get("train/version", 0):
        # A run that was stopped has no evaluation of its last version: an older one is not "after".
        metrics.pop("eval/accuracy", None)
    rows += [(label, f"{metrics[name]:.4g}") for label, name in _METRICS.items() if name in metrics]
    return [*rows, ("run folder", str(result.run_dir))]


def print_summary(title: str, result: "RunResult") -> ExitCode:
    """Print the end of a run, a table on a terminal and plain lines elsewhere; return the exit code of the command."""
    _print_rows(title, summary_rows(result))
    return ExitCode.STOPPED if result.status == "stopped" else ExitCode.DONE


def print_metrics(title: str, metrics: Mapping[str, float]) -> None:
    """Print every metric by its own name."""
    _print_rows(title, [(name, f"{value:.4g}") for name, value in sorted(metrics.items())])


def _print_rows(title: str, rows: list[tuple[str, str]]) -> None:
    if sys.stdout.isatty():
        _print_table(title, rows)
    else:
        for label, value in rows:
            print(f"{title}: {label} = {value}")


def _print_table(title: str, rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for label, value in rows:
        table.add_row(label, value)
    Console().print(table)
