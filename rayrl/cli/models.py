"""`rayrl models`: model folders on disk."""

from pathlib import Path
from typing import Annotated

import typer

from rayrl.errors import ModelError

models_app = typer.Typer(no_args_is_help=True, help="Make local model folders.", rich_markup_mode=None)


@models_app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="GGUF file, hub id, model folder, or the name of a packaged model.")
    ],
    root: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of all models.")] = Path("models"),
    name: Annotated[str | None, typer.Option(help="Name below the root; derived from the source if empty.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder of that name.")] = False,
) -> None:
    """Turn a GGUF file or a hub id into a local folder with safetensors and tokenizer, once."""
    from rayrl.models.importing import import_model

    print(f"model folder: {import_model(source, root, name, force)}")


@models_app.command("create-tiny")
def create_tiny(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write.")],
    alphabet: Annotated[str, typer.Option(help="Characters of the tokenizer, one token each.")] = "0123456789+=",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Write a small randomly initialised Llama with a character tokenizer, for tests and the quickstart."""
    if folder.exists() and not force:
        raise ModelError(f"model folder {str(folder)!r} exists; give another one, or --force to replace it")
    from rayrl.models.tiny import create_tiny_model

    print(f"model folder: {create_tiny_model(folder, alphabet=alphabet, replace=force)}")
