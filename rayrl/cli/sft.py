"""`rayrl sft`: supervised fine-tuning, usually the warm start of a reinforcement learning run."""

import typer

from rayrl.cli.arguments import ConfigPath, Overrides, ResumeFrom, parse_resume
from rayrl.cli.config_file import load_sft_config
from rayrl.cli.failure import naming_run_folder
from rayrl.cli.summary import print_summary
from rayrl.utils.logger import get_logger, setup_logging


def sft(config: ConfigPath, overrides: Overrides = None, resume: ResumeFrom = "never") -> None:
    """Fine-tune a model on prompts with answers."""
    setup_logging()
    run_config = load_sft_config(config, overrides or [])
    get_logger("cli").info("loading torch and Ray")
    from rayrl.driver.sft import SFTRun

    with naming_run_folder(run_config.run_dir):
        result = SFTRun(run_config, resume=parse_resume(resume)).train()
    raise typer.Exit(print_summary("sft", result))
