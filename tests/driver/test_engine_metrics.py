"""Metrics of engines: sums, extremes and rates over whoever answered."""

import pytest

from rayrl.driver.engine_metrics import engine_metrics
from rayrl.inference.engine import EngineStatus
from rayrl.inference.lifecycle import EngineState


def status(**values):
    base = {
        "state": EngineState.RUNNING,
        "version": 1,
        "num_running": 2,
        "num_waiting": 3,
        "kv_use": 0.25,
        "total_requests": 5,
        "total_tokens": 100,
        "total_prefill_tokens": 40,
        "total_steps": 50,
        "failure": None,
        "total_preemptions": 1,
        "prefix_hit_share": 0.5,
    }
    return EngineStatus(**{**base, **values})


def test_metrics_are_sums_and_extremes_over_engines():
    metrics = engine_metrics([status(), status(kv_use=0.75, prefix_hit_share=0.0)])

    assert metrics["inference/engines"] == 2.0
    assert (metrics["inference/running_requests"], metrics["inference/waiting_requests"]) == (4.0, 6.0)
    assert (metrics["inference/kv_use_max"], metrics["inference/prefix_hit_share"]) == (0.75, 0.25)
    assert (metrics["inference/preemptions"], metrics["inference/sampled_tokens"]) == (2.0, 200.0)
    assert "inference/tokens_per_s" not in metrics


def test_rate_is_over_the_time_since_the_last_call():
    before = engine_metrics([status()])

    metrics = engine_metrics([status(total_tokens=160)], before, 2.0)

    assert metrics["inference/tokens_per_s"] == pytest.approx(30.0, rel=1e-12, abs=0)


def test_there_is_no_rate_when_an_engine_was_replaced():
    metrics = engine_metrics([status(total_tokens=10)], engine_metrics([status()]), 2.0)

    assert "inference/tokens_per_s" not in metrics


def test_there_are_no_metrics_when_no_engine_answers():
    assert engine_metrics([]) == {}
