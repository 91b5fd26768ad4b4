"""What every config file of a run has: name, place, seed, and how it is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field

from rayrl.config.base import Section
from rayrl.config.loader import load_section


class RunSection(Section):
    """Name, place and seed of the run."""

    name: str = Field(pattern=r"^\.*[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    """Name of the run; its folder is `output_root/name`. Dots alone would name another folder."""
    output_root: str = "runs"
    """Folder of all runs; everything that a run writes lies below its own folder there."""
    seed: int = Field(default=1, ge=0)
    """Seed of data order, sampling and initialisation."""
    deterministic: bool = False
    """The same config gives the same weights bit by bit, also when it is killed and resumed. Slow: sequences are
    decoded one by one. Needs driver.max_staleness: 0 and the embedded engine."""


class RunFile(Section):
    """What every config file of a run has."""

    run: RunSection
    """Name and place."""

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file and apply `section.key=value` overrides. ConfigError names field, value and constraint."""
        return load_section(cls, path, overrides)

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.run.output_root) / self.run.name
