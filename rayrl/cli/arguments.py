"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Replace single values of the file; values are YAML."),
]
