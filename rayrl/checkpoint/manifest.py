"""The manifest: written last, it makes a folder a checkpoint. Reading and checking it changes nothing on disk."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from rayrl.errors import CheckpointError

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT_VERSION = 1
_KIND = "rayrl-checkpoint"
_BLOCK = 4 * 1024 * 1024


class NewerFormatError(CheckpointError):
    """A checkpoint of a later rayrl: it is whole, so skipping it for an older one would lose work in silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    xxh3: str
    """xxh3-128 of the content, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    serial: int
    """Grows with each commit in one store. The latest checkpoint is the last one committed, not the one of the
    highest step: after a resume from an older checkpoint the steps beyond it are no longer part of the run."""
    step: int
    version: int
    run_id: str
    config_digest: str
    files: Mapping[str, FileEntry]
    """By path relative to the checkpoint, with slashes."""

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file, its own digest included."""
        body = {"kind": _KIND, "format": FORMAT_VERSION, **asdict(self)}
        return (json.dumps({**body, "digest": _digest_of(body)}, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, contents not checked. CheckpointError says why it is not one."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}")
    if not path.is_file():
        if (folder / STATE).is_file() or folder.name.startswith((".tmp-", "step_")):
            raise CheckpointError(f"checkpoint {folder} is incomplete: it has no {MANIFEST}; resume from another one")
        raise CheckpointError(f"{folder} is not a rayrl checkpoint: it has no {MANIFEST}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return parse_manifest(str(folder), content)


def parse_manifest(folder: str, content: bytes) -> Manifest:
    """Return the manifest in a file's content; `folder` names the checkpoint in errors. CheckpointError as above."""
    try:
        data = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise CheckpointError(f"{folder} is not a rayrl checkpoint: {MANIFEST} is of another kind")
    if isinstance(data.get("format"), int) and data["format"] > FORMAT_VERSION:
        raise NewerFormatError(
            f"checkpoint {folder} has format {data['format']}, this rayrl reads up to {FORMAT_VERSION}; upgrade rayrl"
        )
    return _parse(folder, data)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if a file is missing or has another size."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} is incomplete: {name} is missing")
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} has {size} bytes, not {entry.size}")


def check_digests(folder: Path, manifest: Manifest) -> None:
    """Read all files and raise CheckpointError if one differs from what was saved."""
    check_sizes(folder, manifest)
    for name, entry in manifest.files.items():
        try:
            digest = file_digest(folder / name)
        except OSError as error:
            raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
        if digest != entry.xxh3:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: digest of {name} is {digest}, not {entry.xxh3}; "
                "remove this checkpoint to resume from an older one"
            )


def file_digest(path: Path) -> str:
    """Return xxh3-128 of a file. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _parse(folder: str, data: dict[str, Any]) -> Manifest:
    body = {name: value for name, value in data.items() if name != "digest"}
    if data.get("digest") != _digest_of(body):
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} does not match its own digest")
    files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{folder} is not a rayrl checkpoint: file {name!r} lies outside")
    return Manifest(
        serial=body["serial"],
        step=body["step"],
        version=body["version"],
        run_id=body["run_id"],
        config_digest=body["config_digest"],
        files=files,
    )


def _digest_of(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
