"""The last collectives of one process in a file that can be read while it hangs, and after it was killed.

    64 bytes   magic, slots, number of records written
    slots      256 bytes each, one record as a JSON list, padded with spaces

A write is a copy into mapped memory: no system call, and nothing is lost when the process dies, since the pages belong
to the kernel.
"""

import json
import mmap
import struct
from dataclasses import fields
from pathlib import Path

from rayrl.errors import CheckpointError
from rayrl.infra.collective_record import CollectiveRecord

_MAGIC = b"rayrl-collectives-1"
_HEADER = 64
_SLOT = 256
_COUNTS = struct.Struct("<QQ")
_COUNTS_AT = 32
_FIELDS = tuple(item.name for item in fields(CollectiveRecord))
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class CollectiveRing:
    """Writes the records of one process; the file of an earlier process is replaced."""

    def __init__(self, path: Path, num_slots: int = 2048) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._num_slots = num_slots
        self._num_written = 0
        with path.open("w+b") as file:
            file.truncate(_HEADER + num_slots * _SLOT)
            self._map = mmap.mmap(file.fileno(), 0)
        self._map[: len(_MAGIC)] = _MAGIC
        self._map[_COUNTS_AT : _COUNTS_AT + _COUNTS.size] = _COUNTS.pack(num_slots, 0)

    def write(self, record: CollectiveRecord) -> None:
        """Add a record in the place of the oldest one."""
        data = _packed(record, record.shape, record.place)
        if len(data) > _SLOT:
            data = _packed(record, record.shape[:24], record.place[-48:])[:_SLOT]
        start = _HEADER + self._num_written % self._num_slots * _SLOT
        self._map[start : start + _SLOT] = data.ljust(_SLOT)
        self._num_written += 1
        # After the slot: a reader never takes a slot for written that is not.
        self._map[_COUNTS_AT : _COUNTS_AT + _COUNTS.size] = _COUNTS.pack(self._num_slots, self._num_written)

    def close(self) -> None:
        """Let go of the file; it stays."""
        self._map.close()


def read_ring(path: Path) -> list[CollectiveRecord]:
    """Return the records in the order written. CheckpointError if it is not such a file, OSError if it is not there.

    A record that is being overwritten meanwhile is left out.
    """
    data = path.read_bytes()
    if not data.startswith(_MAGIC) or len(data) < _HEADER:
        raise CheckpointError(f"{path} has no records of collectives")
    num_slots, num_written = _COUNTS.unpack_from(data, _COUNTS_AT)
    records = []
    for index in range(max(0, num_written - num_slots), num_written):
        start = _HEADER + index % num_slots * _SLOT
        try:
            values = dict(zip(_FIELDS, json.loads(data[start : start + _SLOT]), strict=True))
            records.append(CollectiveRecord(**values))
        except (ValueError, TypeError):
            continue
    return records


def _packed(record: CollectiveRecord, shape: str, place: str) -> bytes:
    values = (
        record.group,
        record.sequence,
        record.operation,
        shape,
        record.dtype,
        record.reduction,
        place,
        record.time,
    )
    return _ENCODE(values).encode()
