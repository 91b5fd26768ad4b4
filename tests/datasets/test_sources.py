"""Every kind of source: what it reads, and what it says about bad input."""

import ast
import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrl.config.dataset import (
    ArithmeticDataset,
    HuggingFaceDataset,
    JsonlDataset,
    ParquetDataset,
    ReasoningGymDataset,
)
from rayrl.datasets.record import derive_name
from rayrl.datasets.registry import SOURCES, load_source
from rayrl.datasets.source import PromptSource
from rayrl.errors import ConfigError, DatasetError
from rayrl.types.prompt import Message

HELD_OUT_SUMS_TO_4 = ["0+3=", "1+2=", "2+3="]


def _write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _jsonl(path: Path, **options: Any) -> PromptSource:
    return load_source(JsonlDataset(type="jsonl", path=str(path), **options))


def _parquet(path: Path, **options: Any) -> PromptSource:
    return load_source(ParquetDataset(type="parquet", path=str(path), **options))


def _arithmetic(**options: Any) -> PromptSource:
    return load_source(ArithmeticDataset(type="arithmetic", **options))


def _reasoning_gym(task: str = "chain_sum", **options: Any) -> PromptSource:
    return load_source(ReasoningGymDataset(type="reasoning_gym", task=task, **options))


def _texts(source: PromptSource) -> list[str]:
    return [source.row(index).text for index in range(len(source))]


# JSONL


def test_jsonl_row_has_prompt_answer_and_the_other_fields_as_metadata(tmp_path: Path) -> None:
    file = _write_lines(
        tmp_path / "my sums.jsonl",
        json.dumps({"prompt": "1+1=", "answer": "2", "level": 3}),
        "",
        json.dumps({"prompt": "ü?", "answer": 7}),
        json.dumps({"prompt": "open", "answer": None}),
    )
    source = _jsonl(file)
    assert (source.name, len(source)) == ("my_sums", 3)
    assert (source.row(0).text, source.row(0).answer, source.row(0).metadata) == ("1+1=", "2", {"level": 3})
    assert (source.row(1).text, source.row(1).answer) == ("ü?", "7")
    assert source.row(2).answer is None


def test_jsonl_prompt_may_be_a_conversation(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    row = _jsonl(_write_lines(tmp_path / "d.jsonl", json.dumps({"prompt": messages, "answer": "2"}))).row(0)
    assert row.messages == (Message(role="system", content="be brief"), Message(role="user", content="1+1?"))
    assert row.text == "1+1?"


def test_jsonl_needs_no_answers_when_the_field_is_null(tmp_path: Path) -> None:
    file = _write_lines(tmp_path / "d.jsonl", '{"question": "why"}')
    row = _jsonl(file, prompt_field="question", answer_field=None, name="mine").row(0)
    assert (row.text, row.answer) == ("why", None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["", "  "], r"d\.jsonl' is empty"),
        (['{"prompt": "a", "answer": "b"}', "", "{oops"], r"line 3 of '.*d\.jsonl' is not JSON"),
        (['["a"]'], "line 1 .*must be a JSON object, got list"),
        (
            ['{"promt": "a", "answer": "b"}'],
            r"no field 'prompt' \(did you mean 'promt'\?\).*'promt', 'answer'",
        ),
        (['{"prompt": "a", "solution": "b"}'], r"no field 'answer'.*dataset\.answer_field: null"),
        (['{"prompt": 3, "answer": "b"}'], "must be text or a list of .*messages, got int"),
        (['{"prompt": [], "answer": "b"}'], "got an empty list"),
        (['{"prompt": [{"role": "user"}], "answer": "b"}'], "is not a message"),
        (['{"prompt": "a", "answer": ["b"]}'], "'answer' .*must be text, a number or null, got list"),
    ],
)
def test_bad_jsonl_is_refused_with_its_place(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        _jsonl(_write_lines(tmp_path / "d.jsonl", *lines))


def test_missing_jsonl_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"absent\.jsonl'.*dataset\.path"):
        _jsonl(tmp_path / "absent.jsonl")


# Parquet


def test_parquet_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table({"prompt": ["c"], "answer": ["3"], "n": [3]}), folder / "2.parquet")
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "n": [1, 2]}), folder / "1.parquet")
    source = _parquet(folder)
    assert (source.name, _texts(source)) == ("data", ["a", "b", "c"])
    assert (source.row(2).answer, source.row(2).metadata) == ("3", {"n": 3})


def test_parquet_prompt_may_be_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "d.parquet"
    pq.write_table(pa.table({"chat": [[{"role": "user", "content": "hi"}]]}), file)
    assert _parquet(file, prompt_field="chat", answer_field=None).row(0).messages == (
        Message(role="user", content="hi"),
    )


def test_missing_parquet_column_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    file = tmp_path / "d.parquet"
    pq.write_table(pa.table({"question": ["a"], "answers": ["b"]}), file)
    with pytest.raises(DatasetError, match=r"no field 'prompt'.*'question', 'answers'.*dataset\.prompt_field"):
        _parquet(file)
    with pytest.raises(DatasetError, match=r"no field 'answer' \(did you mean 'answers'\?\)"):
        _parquet(file, prompt_field="question")


def test_bad_parquet_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        _parquet(tmp_path / "absent")
    with pytest.raises(DatasetError, match=r"holds no \*\.parquet"):
        _parquet(tmp_path)
    with pytest.raises(DatasetError, match="as Parquet"):
        _parquet(_write_lines(tmp_path / "d.parquet", "text"))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), tmp_path / "e")
    with pytest.raises(DatasetError, match="e' is empty"):
        _parquet(tmp_path / "e")


def test_parquet_files_that_disagree_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "answer": [1]}), tmp_path / "2.parquet")
    with pytest.raises(DatasetError, match="same columns"):
        _parquet(tmp_path)


# Arithmetic


def test_arithmetic_splits_are_disjoint_and_complete() -> None:
    train, held_out = (_texts(_arithmetic(num_operands=2, split=split)) for split in ("train", "held_out"))
    assert len(train) + len(held_out) == 100
    assert set(train).isdisjoint(held_out)
    assert {*train, *held_out} == {f"{a}+{b}=" for a in range(10) for b in range(10)}


def test_arithmetic_answers_are_the_decimal_sums() -> None:
    source = _arithmetic(num_operands=3, max_operand=12, size=50)
    for index in range(len(source)):
        row = source.row(index)
        assert row.answer == str(sum(map(int, row.text.removesuffix("=").split("+"))))


def test_arithmetic_split_of_a_problem_does_not_depend_on_the_other_settings() -> None:
    small = set(_texts(_arithmetic(num_operands=2, max_operand=9, split="held_out")))
    large = set(_texts(_arithmetic(num_operands=2, max_operand=30, split="held_out")))
    assert small == {text for text in large if all(int(n) <= 9 for n in text.removesuffix("=").split("+"))}


def test_arithmetic_split_is_pinned() -> None:
    held_out = _texts(_arithmetic(num_operands=2, max_operand=4, split="held_out"))
    assert held_out == HELD_OUT_SUMS_TO_4


def test_arithmetic_size_bounds_the_problems() -> None:
    everything = _texts(_arithmetic(num_operands=2))
    some = _texts(_arithmetic(num_operands=2, size=10))
    assert len(some) == 10
    assert set(some) < set(everything)
    assert len({text.split("+")[0] for text in some}) > 2
    assert _texts(_arithmetic(num_operands=2, size=1000)) == everything


def test_arithmetic_without_problems_or_with_too_many_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"held_out_fraction \(1e-09\)"):
        _arithmetic(num_operands=2, max_operand=1, split="held_out", held_out_fraction=1e-9)
    with pytest.raises(DatasetError, match=r"lower dataset\.num_operands"):
        _arithmetic(num_operands=5, max_operand=99)


# reasoning-gym


def test_reasoning_gym_row_carries_what_the_reward_needs() -> None:
    source = _reasoning_gym(params={"min_terms": 2, "max_terms": 2}, size=7, seed=3)
    row = source.row(6)
    entry = ast.literal_eval(row.metadata["entry"])
    assert (source.name, len(source)) == ("chain_sum", 7)
    assert (entry["question"], entry["answer"]) == (row.text, row.answer)
    assert row.metadata["task"] == "chain_sum"
    assert row.metadata["settings"] == {"min_terms": 2, "max_terms": 2, "seed": 3, "size": 7}
    assert json.loads(json.dumps(row.metadata)) == row.metadata
    with pytest.raises(IndexError):
        source.row(7)


def test_reasoning_gym_problems_depend_on_the_seed_only() -> None:
    first, again, other = (_texts(_reasoning_gym(size=5, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_reasoning_gym_entry_with_numpy_values_is_a_literal() -> None:
    entry = ast.literal_eval(_reasoning_gym("knights_knaves", size=2).row(0).metadata["entry"])
    assert isinstance(entry["metadata"]["statements"], tuple)
    assert type(entry["metadata"]["names"][0]) is str


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("chain_sums", {}, r"no task 'chain_sums' \(did you mean 'chain_sum'\?\)"),
        ("chain_sum", {"min_term": 2}, r"no parameter 'min_term' \(did you mean 'min_terms'\?\).*max_terms"),
        ("chain_sum", {"min_terms": 0}, "AssertionError: min_terms must be positive"),
        ("chain_sum", {"seed": 4}, r"must not hold \['seed'\].*dataset\.seed"),
    ],
)
def test_bad_reasoning_gym_task_is_refused(task: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        _reasoning_gym(task, params=params)


# Hugging Face


def test_missing_datasets_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_datasets(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ConfigError, match=r"pip install 'rayrl\[huggingface\]'"):
        load_source(HuggingFaceDataset(type="huggingface", path="owner/data"))


class _FakeTable(list[dict[str, Any]]):
    column_names = ["prompt", "answer"]


def _fake_library(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Stand in for the optional library with the two names that are used of it."""
    from types import ModuleType, SimpleNamespace

    class DatasetsError(Exception):
        pass

    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, subset: str | None, *, split: str) -> _FakeTable:
        calls.append((path, subset, split))
        if path == "owner/absent":
            raise DatasetsError("not found")
        return _FakeTable(rows)

    library = ModuleType("datasets")
    vars(library).update(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=DatasetsError))
    monkeypatch.setitem(sys.modules, "datasets", library)
    return calls


def test_hub_dataset_is_read_through_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake_library(monkeypatch, [{"prompt": "a", "answer": 1}])
    source = load_source(HuggingFaceDataset(type="huggingface", path="owner/data", subset="main", split="train[:9]"))
    assert calls == [("owner/data", "main", "train[:9]")]
    assert (source.name, len(source), source.row(0).answer) == ("owner_data", 1, "1")


def test_hub_dataset_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_library(monkeypatch, [])
    with pytest.raises(DatasetError, match=r"'owner/absent' .*not found"):
        load_source(HuggingFaceDataset(type="huggingface", path="owner/absent"))
    with pytest.raises(DatasetError, match=r"split 'train' .*is empty"):
        load_source(HuggingFaceDataset(type="huggingface", path="owner/data"))


# All


def test_every_dataset_type_of_the_config_has_a_source() -> None:
    from typing import get_args

    from rayrl.config.dataset import DatasetConfig

    types = {get_args(section.model_fields["type"].annotation)[0] for section in get_args(get_args(DatasetConfig)[0])}
    assert set(SOURCES) == types


def test_derived_names_fit_into_prompt_ids() -> None:
    assert [derive_name(name) for name in ("owner/data", "a b", "...", "x.y-z_1")] == [
        "owner_data",
        "a_b",
        "dataset",
        "x.y-z_1",
    ]


def test_importing_the_sources_loads_no_heavy_library() -> None:
    code = (
        "import sys, rayrl.datasets.registry;"
        "print([name for name in ('torch', 'datasets', 'transformers', 'reasoning_gym') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
