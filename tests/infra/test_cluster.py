"""Which cluster a process gets, each case in a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import ray

from rayrl.errors import PlacementError
from rayrl.infra.cluster import join_cluster, leave_cluster

pytestmark = pytest.mark.ray

_SCRIPT = """
import json, ray
from rayrl.errors import PlacementError
from rayrl.infra.cluster import join_cluster, leave_cluster
try:
    info = join_cluster(min_cpus=5.5)
    cpus = ray.cluster_resources()["CPU"]
    leave_cluster(info)
    answer = [info.started, info.address, cpus, ray.is_initialized()]
except PlacementError as error:
    answer = str(error)
print("ANSWER", json.dumps(answer))
"""


def _in_process(**variables: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env={**environment, **variables}, capture_output=True, text=True, timeout=120
    )
    assert "ANSWER" in result.stdout, result.stderr[-2000:]
    return json.loads(result.stdout.rpartition("ANSWER")[2])


def test_a_local_cluster_of_the_wanted_size_is_started_and_left_when_there_is_none() -> None:
    started, _, cpus, still_connected = _in_process()

    assert started
    assert cpus == max(6, os.cpu_count() or 1)
    assert not still_connected


def test_the_cluster_of_ray_address_is_joined_and_stays(ray_cluster) -> None:
    address = ray.get_runtime_context().gcs_address

    answer = _in_process(RAY_ADDRESS=address)

    assert answer == [False, address, 8.0, True]
    assert ray.cluster_resources()["CPU"] == 8.0


def test_the_cluster_in_use_is_kept_when_the_process_is_connected(ray_cluster) -> None:
    info = join_cluster(min_cpus=100)
    leave_cluster(info)

    assert not info.started
    assert ray.is_initialized()


@pytest.mark.parametrize("of_the_user", [None, "1"])
def test_lines_of_workers_have_no_colours_when_a_stream_is_redirected(
    monkeypatch: pytest.MonkeyPatch, of_the_user: str | None
) -> None:
    seen: list[str | None] = []
    monkeypatch.delenv("RAY_COLOR_PREFIX", raising=False)
    if of_the_user is not None:
        monkeypatch.setenv("RAY_COLOR_PREFIX", of_the_user)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **arguments: seen.append(os.environ.get("RAY_COLOR_PREFIX")) or _refuse())

    with pytest.raises(PlacementError):
        join_cluster()

    assert seen == [of_the_user or "0"]


def _refuse() -> None:
    raise RuntimeError("not here")


def test_error_names_the_address_when_the_cluster_does_not_answer() -> None:
    answer = _in_process(RAY_ADDRESS="127.0.0.1:1")

    assert "RAY_ADDRESS=127.0.0.1:1 does not answer" in answer
    assert "unset RAY_ADDRESS" in answer


def test_error_names_the_address_when_it_is_none() -> None:
    answer = _in_process(RAY_ADDRESS="nonsense")

    assert "cannot join the Ray cluster at nonsense" in answer
    assert "unset it" in answer


def test_local_ray_that_does_not_start_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "init", fail)

    with pytest.raises(PlacementError, match=r"a local Ray did not start: The current node timed out.*RAY_ADDRESS"):
        join_cluster(1.0)
