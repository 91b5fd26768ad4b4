"""Engines and rollout workers of real runs that are killed: idle, generating, and in every phase of a publication."""

import json
import random
from pathlib import Path

import engine_runs
import pytest
import ray
from engine_runs import LiveRun, doomed, doomed_trainer, events, run_config, wait_gone

from rayrl.errors import ActorDied, BudgetExhausted

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(900), pytest.mark.usefixtures("ray_cluster")]

# Workers cannot import this folder: its classes travel by value.
ray.cloudpickle.register_pickle_by_value(engine_runs)


def test_run_goes_on_when_engines_and_the_rollout_worker_are_killed(small_model: Path, tmp_path: Path) -> None:
    live = LiveRun(run_config(small_model, tmp_path))
    live.until_step(1)
    live.kill(live.members("inference")["inference-0"])
    live.until_replaced("inference", 1)
    live.kill(live.members("rollout")["rollout-0"])
    live.until_replaced("rollout", 1)
    live.more_steps(2)
    # None is left: training waits, and goes on with the first replacement.
    for pid in live.members("inference").values():
        live.kill(pid)
    live.until_replaced("inference", 3)
    live.more_steps(2)
    result = live.finish()
    lost = [json.loads(text) for text in events(result.run_dir, "engine_lost")]
    assert sorted(item["engine"] for item in lost) == ["inference-0", "inference-1", "inference-2"]
    assert {(item["cause"], item["decision"]) for item in lost} == {("DIED", "REPLACE")}
    assert [json.loads(text)["worker"] for text in events(result.run_dir, "worker_lost")] == ["rollout-0"]
    assert result.metrics["supervision/inference_replaced"] == 3


def test_engines_that_die_in_each_phase_of_a_publication_cost_no_prompt(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each successor survives the publication that it joins by, and dies in the next one, a phase further on; the last
    # dies when it is to join: whether a second join ever comes depends on when it was ready.
    fates = {0: ("prepare", 2), 2: ("receive", 1), 3: ("commit", 1), 4: ("join_transfer", 0)}
    monkeypatch.setattr("rayrl.driver.fleet.EngineActor", doomed(fates))
    live = LiveRun(run_config(small_model, tmp_path))
    live.until_replaced("inference", 4)
    live.more_steps(2)
    result = live.finish()
    lost = [json.loads(text)["engine"] for text in events(result.run_dir, "engine_lost")]
    assert lost == ["inference-0", "inference-2", "inference-3", "inference-4"]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prepare", "receive", "commit", "join_transfer"])
def test_only_engine_that_dies_in_a_publication_is_waited_for(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr("rayrl.driver.fleet.EngineActor", doomed({0: (phase, 0 if phase == "join_transfer" else 1)}))
    live = LiveRun(run_config(small_model, tmp_path, inference__num_engines=1))
    live.until_replaced("inference", 1)
    live.more_steps(2)
    result = live.finish()
    assert [json.loads(text)["engine"] for text in events(result.run_dir, "engine_lost")] == ["inference-0"]


@pytest.mark.slow
def test_run_ends_with_the_cause_when_engines_keep_dying(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrl.driver.fleet.EngineActor", doomed(dict.fromkeys(range(9), ("receive", 0))))
    live = LiveRun(run_config(small_model, tmp_path, supervision__restarts=1, inference__num_engines=1))
    with pytest.raises(BudgetExhausted, match=r"inference-1 is lost: its process is gone; 1 of supervision.restarts=1"):
        live.handle.wait(timeout_s=200)
    wait_gone(live.pids)


@pytest.mark.slow
def test_trainer_killed_in_the_transfer_is_named(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrl.driver.fleet.TrainWorker", doomed_trainer(survives=2))
    live = LiveRun(run_config(small_model, tmp_path))
    with pytest.raises(ActorDied, match=r"publication of version 2: transfer: train-0 .* died"):
        live.handle.wait(timeout_s=200)
    wait_gone(live.pids)


@pytest.mark.slow
def test_frozen_engine_is_replaced_after_its_silence(small_model: Path, tmp_path: Path) -> None:
    live = LiveRun(run_config(small_model, tmp_path, supervision__silence_s=5, driver__deadlines__publication_s=10))
    live.until_step(1)
    live.freeze(live.members("inference")["inference-1"])
    live.until_replaced("inference", 1)
    live.more_steps(2)
    result = live.finish()
    (lost,) = [json.loads(text) for text in events(result.run_dir, "engine_lost")]
    assert (lost["engine"], lost["cause"]) == ("inference-1", "SILENT")


@pytest.mark.slow
def test_engines_join_and_leave_while_the_run_goes_on(small_model: Path, tmp_path: Path) -> None:
    live = LiveRun(run_config(small_model, tmp_path, inference__num_engines=1, supervision__max_engines=3))
    # The cluster has room: they come by themselves.
    live.until(lambda status: len(status["supervision"]["inference"]["members"]) == 3, "three engines")
    live.more_steps(2)
    live.handle.scale_inference(1)
    live.until(lambda status: list(status["supervision"]["inference"]["members"]) == ["inference-0"], "one engine")
    live.more_steps(2)
    live.handle.scale_inference(2)
    live.until(lambda status: len(status["supervision"]["inference"]["members"]) == 2, "two engines")
    live.more_steps(2)
    result = live.finish()
    assert len(events(result.run_dir, "engine_removed")) == 2
    assert events(result.run_dir, "engine_lost") == []


@pytest.mark.slow
def test_engine_that_joins_a_run_of_adapters_makes_its_weights_of_its_own_folder(
    small_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'rayrl[lora]'")
    lora = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    live = LiveRun(
        run_config(small_model, tmp_path, training__lora=lora, transfer__lora="adapters", transfer__probe_every=1)
    )
    live.until_step(1)
    live.kill(live.members("inference")["inference-0"])
    live.until_replaced("inference", 1)
    live.more_steps(3)
    result = live.finish()
    assert events(result.run_dir, "probe_bad_engine") == events(result.run_dir, "probe_alarm") == []
    assert result.metrics["probe/compared_weights"] > 0
    assert result.metrics["probe/logprob_diff"] < 1e-3
    # Two layers, A and B of two modules of 32 x 32 and 64 x 32, at multiples of 64 bytes.
    assert result.metrics["transfer/bytes"] == 4 * 2 * (2 * (32 + 32) + 2 * (64 + 32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_run_survives_kills_at_random_moments(small_model: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    live = LiveRun(run_config(small_model, tmp_path, rollout__num_workers=2, supervision__restarts=50))
    live.until_step(1)
    num_killed = {"inference": 0, "rollout": 0}
    for _ in range(4):
        role = chance.choice(["inference", "inference", "rollout"])
        victims = live.members(role)
        if victims:
            live.kill(chance.choice(sorted(victims.values())))
            num_killed[role] += 1
        # Not waited for: the next one may be killed while this one is being replaced.
        live.let_pass(chance.uniform(0.0, 3.0))
    for role, count in num_killed.items():
        live.until_replaced(role, count)
    live.more_steps(2)
    result = live.finish()
    assert len(events(result.run_dir, "engine_lost")) >= num_killed["inference"]
    assert len(events(result.run_dir, "worker_lost")) >= num_killed["rollout"]
