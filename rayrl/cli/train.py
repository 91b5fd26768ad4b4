"""`rayrl train`: a reinforcement learning run."""

import typer

from rayrl.cli.arguments import ConfigPath, Overrides, ResumeFrom, parse_resume
from rayrl.cli.config_file import load_run_config
from rayrl.cli.failure import naming_run_folder
from rayrl.cli.summary import print_summary
from rayrl.utils.logger import get_logger, setup_logging


def train(config: ConfigPath, overrides: Overrides = None, resume: ResumeFrom = "never") -> None:
    """Train a model with reinforcement learning.

    SIGTERM or Ctrl-C finishes the step, saves and leaves with exit code 3; a second Ctrl-C leaves at once with 130.
    """
    setup_logging()
    run_config = load_run_config(config, overrides or [])
    get_logger("cli").info("loading torch and Ray")
    from rayrl.driver.run import Run

    with naming_run_folder(run_config.run_dir):
        result = Run(run_config, resume=parse_resume(resume)).train()
    raise typer.Exit(print_summary("train", result))
