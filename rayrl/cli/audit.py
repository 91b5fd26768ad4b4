"""`rayrl audit`: what the records of a run prove."""

from pathlib import Path
from typing import Annotated

import typer

from rayrl.cli.exit_code import ExitCode


def audit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
    max_violations: Annotated[int, typer.Option(min=1, help="Violations shown for each check.")] = 10,
) -> None:
    """Prove or refute, from what is on disk, that a run trained what it says. Exit code 1 if not all is proven."""
    from rayrl.audit.report import audit_run, report_lines

    report = audit_run(run_dir)
    if as_json:
        print(report.to_json(), end="")
    else:
        print(f"audit of {run_dir}: {'passed' if report.passed else 'NOT PASSED'}")
        for line in report_lines(report, max_violations):
            print(line)
    raise typer.Exit(ExitCode.DONE if report.passed else ExitCode.FAILED)
