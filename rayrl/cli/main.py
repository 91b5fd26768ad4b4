"""The `rayrl` command. Each command is one file; what it runs is imported inside it, so that `--help` stays quick.

Exit codes: see `rayrl.cli.exit_code`.
"""

import os
import sys
from asyncio import CancelledError
from collections.abc import Sequence
from typing import Annotated

import typer

from rayrl import __version__
from rayrl.cli.audit import audit
from rayrl.cli.check import check
from rayrl.cli.doctor import doctor
from rayrl.cli.evaluate import evaluate
from rayrl.cli.exit_code import exit_code_of
from rayrl.cli.failure import failure_text, root_error
from rayrl.cli.models import models_app
from rayrl.cli.preference import preference
from rayrl.cli.reward_model import reward_model
from rayrl.cli.schema import schema
from rayrl.cli.sft import sft
from rayrl.cli.train import train

app = typer.Typer(
    name="rayrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 failed, 2 bad usage, config or resources, 3 stopped (--resume auto goes on), "
    "130 interrupted.",
)
app.command("train")(train)
app.command("sft")(sft)
app.command("preference")(preference)
app.command("reward-model")(reward_model)
app.command("eval")(evaluate)
app.command("check")(check)
app.command("audit")(audit)
app.command("doctor")(doctor)
app.command("schema")(schema)
app.add_typer(models_app, name="models")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"rayrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Post-train language models with reinforcement learning on Ray."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code; `arguments` defaults to those of the process."""
    # As `python -m` does, so that `module:function` in a config finds the user's files. Behind all that is installed:
    # a file of the same name must not hide a library.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        app(args=None if arguments is None else list(arguments), prog_name="rayrl")
    except (Exception, KeyboardInterrupt, CancelledError) as error:  # noqa: BLE001  the CLI turns every error into an exit code
        failure = root_error(error)
        print(failure_text(failure), file=sys.stderr)
        raise SystemExit(exit_code_of(failure)) from None


if __name__ == "__main__":
    main()
