"""A Parquet file or a folder of them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrl.config.dataset import ParquetDataset
from rayrl.datasets.record import check_field, derive_name, row_from_record
from rayrl.datasets.source import PromptRow
from rayrl.errors import DatasetError


class ParquetSource:
    """Holds the table in Arrow memory. Files of a folder are taken in the order of their names.

    Raises DatasetError for a missing, empty or unreadable path, for a missing column and for files that disagree.
    """

    def __init__(self, config: ParquetDataset) -> None:
        self._config = config
        self._path = Path(config.path)
        self.name = config.name or derive_name(self._path.stem)
        self._table = _read_table(self._path)
        where = f"dataset {config.path!r}"
        check_field(config.prompt_field, self._table.column_names, "prompt_field", where)
        if config.answer_field is not None:
            check_field(config.answer_field, self._table.column_names, "answer_field", where)
        if self._table.num_rows == 0:
            raise DatasetError(f"dataset {config.path!r} is empty; dataset.path needs at least one row")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> PromptRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        record = self._table.slice(index, 1).to_pylist()[0]
        where = f"row {index} of {str(self._path)!r}"
        return row_from_record(record, self._config.prompt_field, self._config.answer_field, where)


def _read_table(path: Path) -> pa.Table:
    if not path.exists():
        raise DatasetError(f"dataset {str(path)!r} does not exist; give a Parquet file or folder in dataset.path")
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DatasetError(f"folder {str(path)!r} holds no *.parquet file; give another in dataset.path")
    tables: list[pa.Table] = []
    for file in files:
        try:
            tables.append(pq.read_table(file, partitioning=None))
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"cannot read {str(file)!r} as Parquet: {error}") from error
    try:
        return pa.concat_tables(tables).combine_chunks()
    except pa.ArrowException as error:
        raise DatasetError(f"the Parquet files of {str(path)!r} do not have the same columns: {error}") from error
