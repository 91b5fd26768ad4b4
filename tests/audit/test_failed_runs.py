"""What a run that fails leaves: its reason, and an audit of what it did before."""

import json
from pathlib import Path

import pytest
from audit_runs import small_config

from rayrl import Run
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.errors import ConfigError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_run_that_a_filter_ends_leaves_its_failure_and_an_audit_that_refutes_nothing(
    small_model: Path, tmp_path: Path
) -> None:
    config = small_config(small_model, tmp_path, 4, {}, algorithm={"shaping": {"filter": "operator:index"}})

    with pytest.raises(ConfigError, match=r"algorithm\.shaping\.filter=operator:index raised TypeError") as failure:
        Run(config).train()

    assert failure.value.after_start, "it is not the input of a run that was never started"
    last = read_ledger(config.run_dir / "ledger.sqlite").events[-1]
    assert last.kind == "run_failed"
    assert last.detail["error"].startswith("ConfigError: ")
    report = json.loads((config.run_dir / "audit.json").read_text())
    assert [item["check"] for item in report["findings"] if item["verdict"] == "refuted"] == []
