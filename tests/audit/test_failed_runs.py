"""What a run that fails leaves: its reason, and an audit of what it did before."""

import json
from pathlib import Path

import pytest
from audit_runs import small_config

from rayrl import Run
from rayrl.audit.report import audit_run
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.errors import BudgetExhausted

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_short_run_whose_weights_are_lost_does_not_end_as_done(tiny_model: Path, tmp_path: Path) -> None:
    config = small_config(
        tiny_model, tmp_path, 4, {"max_staleness": 3}, training={"optimizer": {"lr": 1e30, "eps": 1e-30}}
    )

    with pytest.raises(BudgetExhausted):
        Run(config).train()

    last = read_ledger(config.run_dir / "ledger.sqlite").events[-1]
    assert last.kind == "run_failed"
    assert last.detail["error"].startswith("BudgetExhausted: ")
    report = json.loads((config.run_dir / "audit.json").read_text())
    assert [item["check"] for item in report["findings"] if item["verdict"] == "refuted"] == []
    assert audit_run(config.run_dir).numbers["steps"] >= 1
