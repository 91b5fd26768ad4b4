"""Write tensors one by one into one safetensors file, in the order in which they come.

The library's own writer needs all tensors in memory at once. The format: 8 bytes of length, a JSON header with the
place of each tensor, then the values; values of larger data types come first, so that all are aligned.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from rayrl.infra.buckets import DTYPE_BYTES, TensorSpec

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "float32": "F32",
    "int64": "I64",
    "float64": "F64",
}


class SafetensorsWriter:
    """A new file whose tensors are known and whose values come later."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._file: BinaryIO = path.open("wb")
        header, self._places = _layout(specs)
        self._file.write(header)
        self._start = len(header)
        # Tensors without values at the end, too, are within the file.
        self._file.truncate(self._start + sum(spec.num_bytes for spec in specs))

    def write(self, index: int, flat: Tensor) -> None:
        """Write the bytes of tensor `index`, uint8 on the CPU."""
        if flat.numel():
            self._file.seek(self._start + self._places[index])
            self._file.write(flat.numpy().data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _layout(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[int, int]]:
    """Return the header, and where each tensor begins behind it."""
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[int, int] = {}
    end = 0
    for index in _by_size(specs):
        spec, places[index] = specs[index], end
        end += spec.num_bytes
        rows[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [places[index], end],
        }
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _by_size(specs: Sequence[TensorSpec]) -> Iterator[int]:
    yield from sorted(range(len(specs)), key=lambda index: (-DTYPE_BYTES[specs[index].dtype], specs[index].name))
