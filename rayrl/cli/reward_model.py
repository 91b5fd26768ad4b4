"""`rayrl reward-model`: a reward model from pairs of a better and a worse answer."""

import typer

from rayrl.cli.arguments import ConfigPath, Overrides, ResumeFrom, parse_resume
from rayrl.cli.config_file import load_reward_model_config
from rayrl.cli.failure import naming_run_folder
from rayrl.cli.summary import print_summary
from rayrl.utils.logger import get_logger, setup_logging


def reward_model(config: ConfigPath, overrides: Overrides = None, resume: ResumeFrom = "never") -> None:
    """Train a reward model: one number per text, higher for the better of two answers."""
    setup_logging()
    run_config = load_reward_model_config(config, overrides or [])
    get_logger("cli").info("loading torch and Ray")
    from rayrl.driver.pairs import RewardModelRun

    with naming_run_folder(run_config.run_dir):
        result = RewardModelRun(run_config, resume=parse_resume(resume)).train()
    raise typer.Exit(print_summary("reward-model", result))
