"""Copies of complete checkpoints on another file system: anything that fsspec knows, an object store for example.

    upload   files of a complete local checkpoint -> url/step_000010/..., the manifest last
    fetch    url/step_000010/... -> a local folder, every digest compared

Object stores have no rename, but write one object whole or not at all: a copy without a manifest, or whose sizes differ
from it, does not exist. Nothing here is ever read instead of a local checkpoint that is complete.
"""

from collections.abc import Collection
from pathlib import Path

from rayrl.checkpoint.manifest import MANIFEST, Manifest, NewerFormatError, check_digests, parse_manifest
from rayrl.checkpoint.store import CHECKPOINT_NAME
from rayrl.errors import CheckpointError
from rayrl.utils.logger import get_logger

_logger = get_logger("checkpoint")


class CheckpointMirror:
    """The copies below one URL. One process writes. All methods raise CheckpointError."""

    def __init__(self, url: str) -> None:
        """CheckpointError if fsspec knows no file system for the URL."""
        self._url = url.rstrip("/")
        try:
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError, OSError) as error:
            raise CheckpointError(
                f"checkpoint.copy_to={url!r} cannot be opened: {error}; install the package of that protocol, or give "
                "another URL"
            ) from error
        self._root = self._root.rstrip("/")

    def upload(self, folder: Path, manifest: Manifest) -> str:
        """Copy a complete checkpoint and return its URL; a copy of it that is complete already stays as it is."""
        target = f"{self._root}/{folder.name}"
        try:
            if self._manifest(folder.name) == manifest:
                return f"{self._url}/{folder.name}"
            # Without its manifest what lies there does not exist: first it, then the files that it names.
            self._remove(target)
            for name in sorted(manifest.files):
                self._fs.makedirs(f"{target}/{name}".rsplit("/", 1)[0], exist_ok=True)
                self._fs.put_file(str(folder / name), f"{target}/{name}")
            self._check_sizes(folder.name, manifest)
            self._fs.pipe_file(f"{target}/{MANIFEST}", manifest.to_bytes())
        except OSError as error:
            raise self._failure("write", folder.name, error) from error
        return f"{self._url}/{folder.name}"

    def complete(self) -> dict[str, Manifest]:
        """Return the manifests of all complete copies by folder name, in the order in which they were written."""
        found: dict[str, Manifest] = {}
        try:
            for name in self._names():
                manifest = self._manifest(name)
                if manifest is None:
                    continue
                try:
                    self._check_sizes(name, manifest)
                except CheckpointError as error:
                    _logger.warning("passed over: %s", error)
                    continue
                found[name] = manifest
        except OSError as error:
            raise self._failure("look for", "", error) from error
        return dict(sorted(found.items(), key=lambda item: item[1].serial))

    def fetch(self, name: str, folder: Path) -> None:
        """Copy a complete copy into the empty `folder` and compare every digest."""
        manifest = self.complete().get(name)
        if manifest is None:
            raise CheckpointError(f"there is no complete checkpoint at {self._url}/{name}")
        try:
            for file in sorted(manifest.files):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(f"{self._root}/{name}/{file}", str(folder / file))
            check_digests(folder, manifest)
            (folder / MANIFEST).write_bytes(manifest.to_bytes())
        except OSError as error:
            raise self._failure("read", name, error) from error

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all copies but these. One that cannot be removed is told and stays."""
        try:
            gone = [name for name in self._names() if name not in names]
        except OSError as error:
            raise self._failure("look for", "", error) from error
        for name in gone:
            try:
                self._remove(f"{self._root}/{name}")
            except OSError as error:
                _logger.warning("cannot remove the old checkpoint %s/%s: %s", self._url, name, error)

    def _names(self) -> list[str]:
        if not self._fs.exists(self._root):
            return []
        self._fs.invalidate_cache()
        names = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        return sorted(name for name in names if CHECKPOINT_NAME.match(name))

    def _manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a copy; None if it has none, or one that is cut off."""
        path = f"{self._root}/{name}/{MANIFEST}"
        if not self._fs.exists(path):
            return None
        try:
            return parse_manifest(f"{self._url}/{name}", self._fs.cat_file(path))
        except NewerFormatError:
            raise
        except CheckpointError as error:
            _logger.warning("passed over: %s", error)
            return None

    def _check_sizes(self, name: str, manifest: Manifest) -> None:
        for file, entry in manifest.files.items():
            path = f"{self._root}/{name}/{file}"
            size = self._fs.size(path) if self._fs.exists(path) else None
            if size != entry.size:
                raise CheckpointError(f"checkpoint {self._url}/{name} is damaged: {file} has {size} bytes")

    def _remove(self, target: str) -> None:
        manifest = f"{target}/{MANIFEST}"
        if self._fs.exists(manifest):
            self._fs.rm_file(manifest)
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)

    def _failure(self, action: str, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot {action} checkpoints at {self._url}/{name} (checkpoint.copy_to): {error.strerror or error}; "
            "checkpoints in the run's folder are intact"
        )
