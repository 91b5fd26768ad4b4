"""Procedural problems with verifiers from the reasoning-gym library."""

from typing import Any

from rayrl.config.dataset import ReasoningGymDataset
from rayrl.datasets.source import PromptRow
from rayrl.errors import DatasetError
from rayrl.utils.nearest import did_you_mean


class ReasoningGymSource:
    """The problems of one task. The library makes each from the seed and its index when it is asked for.

    The metadata of a row is what the `reasoning_gym` reward needs to score in another process:
    `task`, `settings` (arguments of the task) and `entry`, the library's own record as a Python literal; as JSON it
    would lose its tuples, which some verifiers compare.

    Raises DatasetError for an unknown task and for parameters that the task does not take.
    """

    def __init__(self, config: ReasoningGymDataset) -> None:
        self.name = config.name or config.task
        self._task = config.task
        self._settings = {**config.params, "seed": config.seed, "size": config.size}
        self._dataset = _create(config, self._settings)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> PromptRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._dataset[index]
        answer = entry["answer"]
        return PromptRow(
            text=entry["question"],
            answer=None if answer is None else str(answer),
            metadata={"task": self._task, "settings": self._settings, "entry": repr(_plain(entry))},
        )


def _plain(value: Any) -> Any:
    """Return `value` in built-in types, whose `repr` is a literal; some tasks mix in strings and numbers of numpy."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    for scalar in (bool, int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    # What is left are None, which is a literal, and numbers of numpy, which know their own built-in form.
    return None if value is None else _plain(value.item())


def _create(config: ReasoningGymDataset, settings: dict[str, Any]) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if config.task not in DATASETS:
        raise DatasetError(
            f"reasoning-gym has no task {config.task!r}{did_you_mean(config.task, DATASETS)}; change dataset.task"
        )
    reserved = {"seed", "size"} & config.params.keys()
    if reserved:
        raise DatasetError(f"dataset.params must not hold {sorted(reserved)}: set dataset.seed and dataset.size")
    valid = DATASETS[config.task][1].__dataclass_fields__
    for name in config.params:
        if name not in valid:
            known = ", ".join(sorted(set(valid) - {"seed", "size"}))
            raise DatasetError(
                f"task {config.task!r} has no parameter {name!r}{did_you_mean(name, valid)}; "
                f"dataset.params may hold {known}"
            )
    try:
        dataset = create_dataset(config.task, **settings)
        dataset[0]
    except Exception as error:  # each task checks its parameters in its own way, most by assertion
        raise DatasetError(
            f"task {config.task!r} does not work with dataset.params {config.params}: {type(error).__name__}: {error}"
        ) from error
    return dataset
