"""`rayrl preference`: DPO or IPO on pairs of a better and a worse answer."""

import typer

from rayrl.cli.arguments import ConfigPath, Overrides, ResumeFrom, parse_resume
from rayrl.cli.config_file import load_preference_config
from rayrl.cli.failure import naming_run_folder
from rayrl.cli.summary import print_summary
from rayrl.utils.logger import get_logger, setup_logging


def preference(config: ConfigPath, overrides: Overrides = None, resume: ResumeFrom = "never") -> None:
    """Train a model to prefer the better of two given answers (DPO, IPO)."""
    setup_logging()
    run_config = load_preference_config(config, overrides or [])
    get_logger("cli").info("loading torch and Ray")
    from rayrl.driver.pairs import PreferenceRun

    with naming_run_folder(run_config.run_dir):
        result = PreferenceRun(run_config, resume=parse_resume(resume)).train()
    raise typer.Exit(print_summary("preference", result))
