"""One JSON object per line."""

import json
from pathlib import Path
from typing import Any

from rayrl.config.dataset import JsonlDataset
from rayrl.datasets.record import derive_name, row_from_record
from rayrl.datasets.source import PromptRow
from rayrl.errors import DatasetError


class JsonlSource:
    """Keeps the byte offset of each line in memory, and reads and parses a row when it is asked for.

    All lines are parsed once at construction, so that a broken one is found before anything is started.
    Raises DatasetError for a missing, empty or malformed file; empty lines are skipped.
    """

    def __init__(self, config: JsonlDataset) -> None:
        self._config = config
        self._path = Path(config.path)
        self.name = config.name or derive_name(self._path.stem)
        self._lines: list[tuple[int, int]] = []
        try:
            with self._path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._parse(line, number)
                        self._lines.append((number, offset))
                    offset += len(line)
        except OSError as error:
            raise DatasetError(
                f"cannot read dataset {str(self._path)!r}: {error.strerror}; give an existing file in dataset.path"
            ) from error
        if not self._lines:
            raise DatasetError(f"dataset {str(self._path)!r} is empty; dataset.path needs at least one JSON object")

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> PromptRow:
        number, offset = self._lines[index]
        with self._path.open("rb") as file:
            file.seek(offset)
            return self._parse(file.readline(), number)

    def _parse(self, line: bytes, number: int) -> PromptRow:
        where = f"line {number} of {str(self._path)!r}"
        try:
            record: Any = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{where} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DatasetError(f"{where} must be a JSON object, got {type(record).__name__}")
        return row_from_record(record, self._config.prompt_field, self._config.answer_field, where)
