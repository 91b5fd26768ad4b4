"""Checkpoints that cannot be used: what is wrong with one, and putting it aside without losing it.

    step_000008  ->  step_000008.damaged    not looked at by any resume, retention or audit; `why_damaged.txt` inside

Nothing removes such a folder but its owner: a file of it may be put back from a copy.
"""

from dataclasses import dataclass
from pathlib import Path

from rayrl.checkpoint.disk import Disk

SUFFIX = ".damaged"
REASON_FILE = "why_damaged.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedCheckpoint:
    """A folder with the name of a checkpoint that is not a whole one.

    Example: `DamagedCheckpoint(path=Path("checkpoints/step_000008"), reason="is damaged: groups.arrow has 100 bytes,
    not 4096")`.
    """

    path: Path
    reason: str
    """Goes on from the name of the folder."""
    is_unreadable: bool = False
    """The file system refused to show it: it may be whole."""

    @classmethod
    def from_error(cls, path: Path, error: Exception) -> "DamagedCheckpoint":
        """Return what an error of the store says of a folder, without its path and its advice."""
        text = str(error).replace(f"checkpoint {path} ", "").replace(f"{path} ", "")
        return cls(path=path, reason=text.split("; ")[0], is_unreadable=isinstance(error.__cause__, OSError))

    @property
    def step(self) -> int:
        """The step that the folder is named after."""
        return int(self.path.name.removeprefix("step_").split(".")[0])

    def __str__(self) -> str:
        return f"{self.path.name} {self.reason}"


def set_aside(damaged: DamagedCheckpoint, disk: Disk) -> Path:
    """Rename the folder, so that nothing takes it for a checkpoint, note the reason in it, and return where it is.

    Raises OSError, with the folder where it was.
    """
    target, attempt = damaged.path.with_name(damaged.path.name + SUFFIX), 0
    while target.exists():
        attempt += 1
        target = damaged.path.with_name(f"{damaged.path.name}{SUFFIX}.{attempt}")
    disk.write(damaged.path / REASON_FILE, f"{damaged}\n".encode())
    disk.rename(damaged.path, target)
    return target


def read_set_aside(root: Path) -> dict[str, str]:
    """Return the folders below `root` that were put aside, by name, each with its reason."""
    found: dict[str, str] = {}
    for path in sorted(root.glob(f"step_*{SUFFIX}*")):
        try:
            found[path.name] = (path / REASON_FILE).read_text(encoding="utf-8").strip()
        except OSError:
            found[path.name] = "for a reason that is not told"
    return found
