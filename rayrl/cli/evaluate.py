"""`rayrl eval`: the evaluation section of a config, on its model or on another one."""

from pathlib import Path
from typing import Annotated

import typer

from rayrl.cli.arguments import ConfigPath, Overrides
from rayrl.cli.config_file import load_run_config
from rayrl.cli.summary import print_metrics
from rayrl.utils.logger import setup_logging


def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Model folder to evaluate instead of `model.path`.")
    ] = None,
) -> None:
    """Evaluate a model on the held-out prompts of a config, without training."""
    setup_logging()
    run_config = load_run_config(config, overrides or [])
    from rayrl.driver.evaluate import evaluate as run_evaluation

    result = run_evaluation(run_config, None if model is None else str(model))
    print_metrics("eval", result.metrics)
