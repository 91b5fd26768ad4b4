"""`rayrl doctor`: what is wrong with a run, from its records and, if it runs, its actors."""

import time
from pathlib import Path
from typing import Annotated

import typer

from rayrl.cli.exit_code import ExitCode


def doctor(
    run: Annotated[str, typer.Argument(metavar="RUN_DIR|RUN_ID", help="Folder of a run, or the beginning of its id.")],
    root: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to look for an id.")] = Path("runs"),
) -> None:
    """Name hangs, wrong results and memory faults with evidence and the setting to change. Exit code 1 if any."""
    from rayrl.audit.doctor import diagnose, diagnosis_lines
    from rayrl.audit.doctor_record import examine, find_run

    patient = examine(find_run(run, root), time.time())
    symptoms = diagnose(patient)
    for line in diagnosis_lines(patient, symptoms):
        print(line)
    raise typer.Exit(ExitCode.FAILED if symptoms else ExitCode.DONE)
