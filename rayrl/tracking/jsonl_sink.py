"""`metrics.jsonl`: one JSON object per line, and its reader."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonlSink:
    """Appends `{"step": 3, "time": 1700000000.5, "reward/mean": 0.5}` per call; messages are `{"time", "message"}`.

    Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity", so that each line is strict JSON;
    `float()` reads them back. Each line reaches the operating system at once: a killed process loses none.
    A line that an earlier process left unfinished is removed when the file is opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        _cut_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._clock = clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write({"step": step, "time": self._now(), **{name: _plain(value) for name, value in metrics.items()}})

    def message(self, text: str) -> None:
        self._write({"time": self._now(), "message": text})

    def close(self) -> None:
        self._file.close()

    def _now(self) -> float:
        return round(self._clock(), 3)

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file in the order written; an unfinished last line is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of one row, those that are not finite included: what else a row has is not a number."""
    return {name: float(value) for name, value in row.items() if "/" in name}


def read_series(path: Path, name: str) -> list[tuple[int, float]]:
    """Return `(step, value)` of one metric by step. Of a step that was done again after a resume the last one counts.

    Steps of an earlier part that lie beyond the last row, undone by a resume, are left out.
    """
    values: dict[int, float] = {}
    last = -1
    for row in read_rows(path):
        if "step" in row:
            last = row["step"]
            if name in row:
                values[last] = float(row[name])
    return sorted((step, value) for step, value in values.items() if step <= last)


def _plain(value: float) -> float | int | str:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _cut_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        end = size
        # Lines are far shorter than this; going back in blocks keeps a long file out of memory.
        block = 64 * 1024
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
