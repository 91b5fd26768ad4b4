"""A dataset of the Hugging Face hub, or a folder that its library can read."""

from typing import Any

from rayrl.config.dataset import HuggingFaceDataset
from rayrl.datasets.record import check_field, derive_name, row_from_record
from rayrl.datasets.source import PromptRow
from rayrl.errors import ConfigError, DatasetError


class HuggingFaceSource:
    """Reads through the `datasets` library, which keeps the data memory-mapped on disk.

    Raises ConfigError if the library is missing, DatasetError if the dataset cannot be loaded or lacks a field.
    """

    def __init__(self, config: HuggingFaceDataset) -> None:
        self._config = config
        self.name = config.name or derive_name(config.path)
        self._dataset = _load(config)
        where = f"dataset {config.path!r}"
        if len(self._dataset) == 0:
            raise DatasetError(f"split {config.split!r} of {where} is empty; choose another in dataset.split")
        check_field(config.prompt_field, self._dataset.column_names, "prompt_field", where)
        if config.answer_field is not None:
            check_field(config.answer_field, self._dataset.column_names, "answer_field", where)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> PromptRow:
        where = f"row {index} of {self._config.path!r}"
        return row_from_record(self._dataset[index], self._config.prompt_field, self._config.answer_field, where)


def _load(config: HuggingFaceDataset) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "dataset.type huggingface needs the `datasets` library: pip install 'rayrl[huggingface]'"
        ) from error
    try:
        return datasets.load_dataset(config.path, config.subset, split=config.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DatasetError(
            f"cannot load dataset {config.path!r} (subset {config.subset!r}, split {config.split!r}): {error}"
        ) from error
