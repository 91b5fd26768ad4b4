"""A signal while Ray comes up: the run leaves at once, and a cluster that comes up after all is shut down."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from rayrl.driver import joining
from rayrl.driver.stop_signal import StopSignal
from rayrl.infra.cluster import ClusterInfo


class SlowRay:
    """Stands for a Ray that comes up only when it is told to."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_start = threading.Event()
        self.left = threading.Event()

    def join(self, min_cpus: float) -> ClusterInfo:
        self.asked.set()
        assert self.may_start.wait(60)
        return ClusterInfo(started=True, address="a:1", host="a")

    def leave(self, info: ClusterInfo) -> None:
        self.left.set()


@pytest.fixture
def slow_ray(monkeypatch: pytest.MonkeyPatch) -> SlowRay:
    ray = SlowRay()
    monkeypatch.setattr(joining, "join_cluster", ray.join)
    monkeypatch.setattr(joining, "leave_cluster", ray.leave)
    return ray


async def run_on_cluster() -> str:
    async with joining.joined_cluster(1.0, StopSignal()) as cluster:
        return cluster.address


@pytest.mark.asyncio
async def test_signal_is_heard_before_ray_is_there_and_the_late_cluster_is_shut_down(slow_ray: SlowRay) -> None:
    task = asyncio.create_task(run_on_cluster())
    await asyncio.to_thread(slow_ray.asked.wait, 60)

    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert not slow_ray.left.is_set(), "it did not wait for Ray"
    slow_ray.may_start.set()
    assert await asyncio.to_thread(slow_ray.left.wait, 60)


@pytest.mark.asyncio
async def test_cluster_is_left_once_the_body_has_ended(slow_ray: SlowRay) -> None:
    slow_ray.may_start.set()

    assert await run_on_cluster() == "a:1"

    assert slow_ray.left.is_set()


RUN_A_TASK = """
import asyncio, ray
from rayrl.driver.joining import joined_cluster
from rayrl.driver.stop_signal import StopSignal

async def main():
    async with joined_cluster(1.0, StopSignal()):
        # A thread that has to be there for Ray would be gone by now.
        await asyncio.to_thread(int)
        print("sum", ray.get(ray.remote(lambda: 20 + 22).remote(), timeout=60))
    assert not ray.is_initialized()

asyncio.run(main())
"""


@pytest.mark.ray
def test_local_ray_works_until_the_body_has_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_A_TASK],
        env={**os.environ, "RAY_ADDRESS": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "sum 42" in done.stdout
