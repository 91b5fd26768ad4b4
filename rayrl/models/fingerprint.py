"""A short text that changes when a model folder does: contents of its small files, sizes of its large ones."""

import hashlib
from pathlib import Path

_SMALL_BYTES = 1024 * 1024
_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".gguf")


def model_fingerprint(path: str | Path) -> str:
    """Return the fingerprint of a model folder; whole weights are not read. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(path).iterdir()):
        if file.suffix not in _SUFFIXES or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        if size <= _SMALL_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()
