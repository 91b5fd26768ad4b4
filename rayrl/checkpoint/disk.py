"""Every change that a checkpoint makes to the file system, one method each.

The store has no other way to the disk, so that a test can cut a commit off at any of these calls.
"""

import os
import shutil
from pathlib import Path

from rayrl.utils.atomic_file import sync_folder


class Disk:
    """The real file system. All methods raise OSError."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def sync_file(self, path: Path) -> None:
        """Make the content of a file durable, whichever process wrote it."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)
