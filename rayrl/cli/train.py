"""`rayrl train`: a reinforcement learning run."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rayrl.cli.arguments import ConfigPath, Overrides
from rayrl.cli.config_file import load_run_config
from rayrl.cli.failure import naming_run_folder
from rayrl.cli.summary import print_summary
from rayrl.utils.logger import setup_logging


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="never|auto|PATH",
            help="'auto' goes on from the newest complete checkpoint of this run, PATH from that one.",
        ),
    ] = "never",
) -> None:
    """Train a model with reinforcement learning.

    SIGTERM or Ctrl-C finishes the step, saves and leaves with exit code 3; a second Ctrl-C leaves at once with 130.
    """
    setup_logging()
    run_config = load_run_config(config, overrides or [])
    from rayrl.driver.run import Run

    start: Literal["never", "auto"] | Path
    start = "never" if resume == "never" else "auto" if resume == "auto" else Path(resume)
    with naming_run_folder(run_config.run_dir):
        result = Run(run_config, resume=start).train()
    raise typer.Exit(print_summary("train", result))
