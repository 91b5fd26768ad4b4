"""Recorded collectives: what is compared, how a divergence is told, and real gloo groups whose ranks go wrong."""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayrl.errors import CheckpointError
from rayrl.infra.collective_record import CollectiveRecord, first_divergence
from rayrl.infra.collective_report import report_collectives
from rayrl.infra.collective_ring import CollectiveRing, read_ring

CALL = CollectiveRecord(
    group="data",
    sequence=1,
    operation="all_gather",
    shape="[1024]",
    dtype="float32",
    reduction="",
    place="training/fsdp_engine.py:140",
)


def calls(*operations: str, **changes: Any) -> list[CollectiveRecord]:
    return [
        replace(CALL, sequence=number, operation=operation, **changes)
        for number, operation in enumerate(operations, start=1)
    ]


def test_alike_ranks_do_not_diverge_and_one_rank_alone_cannot() -> None:
    alike = calls("all_gather", "all_reduce")
    assert first_divergence({"train-0": alike, "train-1": alike}) is None
    assert first_divergence({"train-0": alike}) is None


def test_rank_that_calls_something_else_is_named_with_both_calls() -> None:
    usual = calls("all_gather", "all_gather")
    odd = [*calls("all_gather"), replace(CALL, sequence=2, operation="all_reduce", reduction="sum", place="x.py:7")]

    found = first_divergence({f"train-{rank}": usual if rank < 3 else odd for rank in range(4)})

    assert str(found) == (
        "train-3 calls all_reduce #2 on data where the others call all_gather: all_reduce #2 on data "
        "([1024], float32, sum) at x.py:7; the others: all_gather #2 on data ([1024], float32) at "
        "training/fsdp_engine.py:140"
    )


def test_rank_that_does_not_come_is_named_with_its_last_call() -> None:
    found = first_divergence({"train-0": calls("all_gather", "all_reduce"), "train-1": calls("all_gather")})

    assert "train-1 does not come to all_reduce #2 on data" in str(found)
    assert "its last call is all_gather #1 on data" in str(found)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("shape", "[512]", "with shape [512] instead of [1024]"),
        ("dtype", "float16", "with data type float16 instead of float32"),
        ("reduction", "max", "with reduction max instead of "),
    ],
)
def test_difference_within_one_operation_is_named(field: str, value: str, words: str) -> None:
    changes: dict[str, Any] = {field: value}
    found = first_divergence({"a": [CALL], "b": [CALL], "c": [replace(CALL, **changes)]})
    assert words in str(found)


def test_rank_that_calls_something_else_goes_before_ranks_that_wait_in_another_group() -> None:
    waiting = [replace(CALL, group="tensor")]
    found = first_divergence(
        {"a": [CALL, *waiting], "b": [replace(CALL, operation="barrier"), replace(CALL, group="tensor", sequence=0)]}
    )
    assert found is not None and found.group == "data"


def test_ranks_that_remember_different_stretches_are_compared_where_both_remember() -> None:
    long = calls(*["all_gather"] * 9)
    assert first_divergence({"a": long, "b": long[4:]}) is None


def test_ring_keeps_the_last_records_and_can_be_read_while_it_is_open(tmp_path: Path) -> None:
    ring = CollectiveRing(tmp_path / "train-0.ring", num_slots=4)
    written = calls(*["all_gather"] * 10)
    for call in written:
        ring.write(call)

    assert read_ring(tmp_path / "train-0.ring") == written[-4:]


def test_record_that_is_too_long_for_its_slot_is_shortened_and_stays_readable(tmp_path: Path) -> None:
    ring = CollectiveRing(tmp_path / "a.ring")
    ring.write(replace(CALL, shape="[1, 2, 3] " * 40, place="/very/long/folder" * 9 + "/file.py:9"))
    (read,) = read_ring(tmp_path / "a.ring")
    assert read.operation == "all_gather" and read.place.endswith("/file.py:9")


def test_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ring").write_bytes(b"x" * 300)
    with pytest.raises(CheckpointError, match="no records of collectives"):
        read_ring(tmp_path / "a.ring")


def run_ranks(folder: Path, mode: str) -> list[dict[str, str | None]]:
    """Start three ranks and return what each was told in each scenario."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).parent / "recorded_ranks.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(port), str(folder), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(out.strip() for out, _ in outputs), "\n".join(err[-2000:] for _, err in outputs)
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.distributed
def test_check_names_skipped_reordered_and_different_collectives_before_they_start(tmp_path: Path) -> None:
    told = run_ranks(tmp_path / "collectives", "check")

    assert [rank["all_alike"] for rank in told] == [None, None, None]
    assert told[0]["good_then_skip"] == told[1]["good_then_skip"]
    assert "train-2 does not come to all_reduce #2" in str(told[0]["good_then_skip"])
    assert "its last call is all_reduce #1" in str(told[0]["good_then_skip"])
    assert "recorded_ranks.py:" in str(told[0]["good_then_skip"])
    for rank in told:
        assert "train-1 calls broadcast #1 on" in str(rank["reorder"])
        assert "where the others call all_reduce" in str(rank["reorder"])
        assert "train-1 calls all_reduce #1" in str(rank["other_shape"])
        assert "with shape [5] instead of [4]" in str(rank["other_shape"])
        assert "with data type float64 instead of float32" in str(rank["other_dtype"])
        assert "train-0 calls all_reduce" in str(rank["other_reduction"])
        assert "with reduction max instead of sum" in str(rank["other_reduction"])


@pytest.mark.distributed
def test_record_names_the_skipped_collective_after_the_group_timed_out(tmp_path: Path) -> None:
    told = run_ranks(tmp_path / "collectives", "record")

    report = report_collectives(tmp_path)

    assert [str(rank["good_then_skip"])[:5] for rank in told] == ["gloo:", "gloo:", "None"]
    assert report is not None
    assert "train-2 does not come to all_reduce #2" in str(report.divergence)
