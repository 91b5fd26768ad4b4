"""Which config changes a resume may have."""

from pathlib import Path
from typing import Any

import pytest

from rayrl.checkpoint.compatibility import ALLOWED, UNSET, Difference, check_compatible, differences
from rayrl.config.run import RunConfig
from rayrl.config.supervised import PreferenceRunConfig, RewardModelRunConfig, SFTRunConfig
from rayrl.errors import CheckpointError

BASE: dict[str, Any] = {
    "run": {"name": "one"},
    "model": {"path": "models/a"},
    "dataset": {"type": "arithmetic"},
    "reward": {"type": "exact_match"},
    "rollout": {"workflow": {"type": "single_turn"}, "group_size": 4, "sampling": {"max_new_tokens": 4}},
    "driver": {"groups_per_step": 4, "num_steps": 10},
    "training": {"optimizer": {"lr": 1e-3}},
    "inference": {"engine": {"type": "scripted"}},
    "evaluation": {"dataset": {"type": "arithmetic", "split": "held_out"}, "sampling": {"max_new_tokens": 4}},
}


def resolved(**changes: Any) -> dict[str, Any]:
    """Return the resolved base config, with dotted fields changed; `__` stands for the dot."""
    data = RunConfig.model_validate(BASE).model_dump(mode="json")
    for name, value in changes.items():
        *sections, key = name.split("__")
        target = data
        for section in sections:
            target = target[section]
        target[key] = value
    return data


@pytest.mark.parametrize(
    "change",
    [
        {"run__output_root": "elsewhere"},
        {"driver__num_steps": 20},
        {"driver__deadlines__step_s": 5.0},
        {"inference__num_engines": 3},
        {"inference__engine": {"type": "transformers", "max_batch_size": 8, "prefill_tokens": 16}},
        {"evaluation": None},
        {"evaluation__every": 7},
        {"checkpoint__every": 3},
        {"tracking__wandb__project": "p"},
        {"placement__mode": "colocated"},
        {"training__micro_batch_tokens": 16},
        {"training__threads_per_worker": 2},
        {"training__parallel__data": 2},
        {"rollout__num_workers": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_change_of_where_and_how_it_runs_is_allowed(change: dict[str, Any]) -> None:
    found = check_compatible(resolved(), resolved(**change))

    assert found and all(item.allowed for item in found)


@pytest.mark.parametrize(
    "change",
    [
        {"model__path": "models/b"},
        {"dataset__max_operand": 5},
        {"run__seed": 2},
        {"reward__type": "regex"},
        {"rollout__group_size": 8},
        {"rollout__sampling__temperature": 0.5},
        {"rollout__workflow__prompt_format": "text"},
        {"algorithm__clip_high": 0.3},
        {"driver__groups_per_step": 8},
        {"driver__max_staleness": 3},
        {"driver__minibatches": 2},
        {"training__optimizer__lr": 1e-4},
        {"training__schedule__warmup_steps": 3},
        {"training__engine__autocast": "bfloat16"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_change_of_what_is_learned_is_refused(change: dict[str, Any]) -> None:
    path = next(iter(change)).replace("__", ".")

    with pytest.raises(CheckpointError, match=path):
        check_compatible(resolved(), resolved(**change))


def test_error_lists_each_refused_field_with_both_values_and_no_allowed_one() -> None:
    new = resolved(model__path="models/b", run__seed=2, driver__num_steps=20)

    with pytest.raises(CheckpointError) as caught:
        check_compatible(resolved(), new)

    lines = str(caught.value).splitlines()
    assert lines[1:4] == ["  model.path: 'models/a' -> 'models/b'", "  run.seed: 1 -> 2", "what may differ:"]
    assert "  driver.num_steps, dataset.epochs (a longer or shorter run)" in lines[4:], "a line for each reason"
    assert any("training.parallel" in line for line in lines[4:])
    assert not any("sft." in line for line in lines[4:]), "sections that such a config does not have"


def test_equal_configs_have_no_differences() -> None:
    assert differences(resolved(), resolved()) == []


def test_tuple_and_list_are_the_same_value() -> None:
    assert differences({"a": (1, 2)}, {"a": [1, 2]}) == []


def test_field_that_one_side_lacks_is_a_difference() -> None:
    assert differences({"dataset": {"a": None}}, {"dataset": {}}) == [
        Difference(path="dataset", old=UNSET, new={}, allowed=False),
        Difference(path="dataset.a", old=None, new=UNSET, allowed=False),
    ]


def test_name_that_only_begins_like_an_allowed_one_is_refused() -> None:
    assert not differences({"inference_extra": 1}, {"inference_extra": 2})[0].allowed


def test_every_allowed_field_exists(repo_root: Path) -> None:
    configs = [
        resolved(),
        SFTRunConfig.load(repo_root / "configs" / "quickstart_sft.yaml").model_dump(mode="json"),
        PreferenceRunConfig.load(repo_root / "configs" / "quickstart_dpo.yaml").model_dump(mode="json"),
        RewardModelRunConfig.load(repo_root / "configs" / "quickstart_reward_model.yaml").model_dump(mode="json"),
    ]

    def exists(path: str, section: Any) -> bool:
        for part in path.split("."):
            if not isinstance(section, dict) or part not in section:
                return False
            section = section[part]
        return True

    assert [path for path in ALLOWED if not any(exists(path, config) for config in configs)] == []
