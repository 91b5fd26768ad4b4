"""Injected hangs in real runs: each ends within its deadline with a message that names the cause."""

import re
from pathlib import Path
from typing import Any

import pytest
from audit_runs import small_config

from rayrl import Run
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.errors import BudgetExhausted, DataExhausted, StallError
from rayrl.infra.collective_report import report_collectives
from rayrl.infra.collective_ring import read_ring

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def debug(**changes: Any) -> dict[str, Any]:
    return {"stall_s": 4.0, "on_stall": "stop", **changes}


def test_rollout_that_never_ends_is_named_with_its_stage_and_the_stacks_of_all_actors(
    small_model: Path, tmp_path: Path
) -> None:
    config = small_config(
        small_model,
        tmp_path,
        2,
        {},
        rollout={
            "workflow": {"type": "custom", "path": "hang_code:EndlessWorkflow"},
            "group_size": 2,
            "sampling": {"max_new_tokens": 4},
        },
        debug=debug(),
    )

    with pytest.raises(StallError, match=r"debug\.stall_s=4 s; the workflow does not return: episode rows/0/\d+#\d"):
        Run(config).train()

    (report,) = (config.run_dir / "logs").glob("stall_*.txt")
    text = report.read_text()
    for actor in ("train-0", "inference-0", "inference-1", "rollout-0"):
        assert f"stacks of {actor}:\n" in text
    stacks = re.findall(r"^ *(?:Current thread|Thread) ", text, re.MULTILINE)
    assert len(stacks) >= 4, "as py-spy writes them where it is found, else as Python does"
    assert [event.kind for event in read_ledger(config.run_dir / "ledger.sqlite").events][-2:] == [
        "stalled",
        "run_failed",
    ]


@pytest.mark.distributed
def test_checked_collectives_of_a_good_run_are_alike_on_all_ranks(small_model: Path, tmp_path: Path) -> None:
    config = small_config(
        small_model,
        tmp_path,
        1,
        {},
        training={"optimizer": {"lr": 1e-3}, "parallel": {"data": 2}},
        debug={"collectives": "check"},
    )

    Run(config).train()

    report = report_collectives(config.run_dir / "logs")
    assert report is not None and report.divergence is None
    assert {"train-0", "train-1", "inference-0", "inference-1"} == set(report.last)
    calls = read_ring(config.run_dir / "logs" / "collectives" / "train-1.ring")
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= {call.operation for call in calls}
    assert any("rayrl" in call.place or "training/" in call.place for call in calls)


@pytest.mark.slow
def test_stuck_reward_ends_the_run_with_its_name_and_limit(small_model: Path, tmp_path: Path) -> None:
    config = small_config(
        small_model,
        tmp_path,
        2,
        {"max_failed_groups": 1},
        reward={"type": "function", "path": "hang_code:stuck_reward", "timeout_s": 1.0},
    )

    words = (
        r"in a row.*reward function 'hang_code:stuck_reward' on prompt rows/0/\d+ took longer than reward.timeout_s=1"
    )
    with pytest.raises(BudgetExhausted, match=words):
        Run(config).train()


def test_exhausted_data_trains_what_there_is_and_ends_by_name(small_model: Path, tmp_path: Path) -> None:
    config = small_config(small_model, tmp_path, 4, {})
    config = config.model_copy(update={"dataset": config.dataset.model_copy(update={"epochs": 1})})

    with pytest.raises(DataExhausted, match=r"dataset rows is exhausted: all 9 prompts.*dataset\.epochs=1"):
        Run(config).train()

    assert [row.step for row in read_ledger(config.run_dir / "ledger.sqlite").live_steps] == [1, 2, 3]
