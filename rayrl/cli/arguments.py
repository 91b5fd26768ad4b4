"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Replace single values of the file; values are YAML."),
]

ResumeFrom = Annotated[
    str,
    typer.Option(
        metavar="never|auto|PATH",
        help="'auto' goes on from the newest complete checkpoint of this run, PATH from that one.",
    ),
]


def parse_resume(text: str) -> Literal["never", "auto"] | Path:
    """Return the value of `--resume` as `Run` takes it."""
    return "never" if text == "never" else "auto" if text == "auto" else Path(text)
