"""Groups of real actors: together or not at all, errors with names, and nothing left behind."""

import asyncio
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from rayrl.errors import ActorDied, ActorError, DeadlineExceeded, ModelError
from rayrl.infra.actor_group import ActorGroup
from rayrl.infra.identity import ActorLabel
from rayrl.infra.process_info import process_info
from rayrl.infra.waiting import get_within, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

# Workers cannot import this module: its classes travel by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _touch(folder: str, name: str) -> None:
    Path(folder, name).touch()


class Worker:
    """Does as it is told; leaves its process id in a file, so that tests find it if the start fails."""

    def __init__(self, folder: str, fate: str = "live") -> None:
        _touch(folder, str(os.getpid()))
        sys.stderr.write(f"the fate of this worker is {fate}\n")
        sys.stderr.flush()
        if fate == "model error":
            raise ModelError("the model folder models/none does not exist; set model.path")
        if fate == "other error":
            raise OSError("disk is gone")
        if fate == "exit":
            os._exit(7)
        self._folder = folder
        self._fate = fate

    async def ready(self) -> dict[str, Any]:
        if self._fate == "hang":
            await asyncio.Event().wait()
        return process_info()

    async def double(self, value: int) -> int:
        return 2 * value

    async def threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def die(self) -> None:
        sys.stderr.write("out of luck\n")
        sys.stderr.flush()
        os._exit(7)

    async def fail(self, own: bool) -> None:
        raise ModelError("no such model") if own else KeyError("missing")

    async def until_closed(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        if self._fate == "never closes":
            await asyncio.Event().wait()
        _touch(self._folder, "closed")


async def _spawn(folder: Path, *fates: str, start_timeout_s: float = 60.0) -> ActorGroup:
    return await ActorGroup.spawn(
        "worker",
        Worker,
        args_per_member=[(str(folder), fate) for fate in fates],
        options_per_member=[{"num_cpus": 0}] * len(fates),
        env={"OMP_NUM_THREADS": "3"},
        max_concurrency=10,
        start_timeout_s=start_timeout_s,
    )


def _all_gone(folder: Path) -> bool:
    """Return True when all processes that left their id in the folder have ended; waits up to 30 s for each."""
    pids = [int(name) for name in os.listdir(folder) if name.isdigit()]
    assert pids
    return all(_ends(pid, 30.0) for pid in pids)


def _ends(pid: int, seconds: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


@pytest.mark.asyncio
async def test_group_answers_in_order_and_leaves_no_process_when_it_is_shut_down(tmp_path: Path) -> None:
    group = await _spawn(tmp_path, "live", "live")
    try:
        answers = await group.call_each("double", [(1,), (2,)], seconds=30, phase="test")
        one = await group.call(1, "double", 4, seconds=30, phase="test")
        threads = await group.call_all("threads", seconds=30, phase="test")
    finally:
        await group.shutdown(30)
        await group.shutdown(30)

    assert answers == [2, 4]
    assert one == 8
    assert threads == ["3", "3"]
    assert [member.name for member in group.members] == ["worker-0", "worker-1"]
    assert {str(member.pid) for member in group.members} < set(os.listdir(tmp_path))
    assert group.status().closed
    assert "closed" in os.listdir(tmp_path)
    assert _all_gone(tmp_path)


@pytest.mark.asyncio
async def test_group_is_killed_when_a_member_does_not_close_in_time(tmp_path: Path) -> None:
    group = await _spawn(tmp_path, "never closes")

    await group.shutdown(0.2)

    assert _all_gone(tmp_path)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fate", "kind", "text"),
    [
        ("model error", ModelError, "the model folder models/none does not exist; set model.path"),
        ("other error", ActorError, "OSError: disk is gone"),
        ("exit", ActorError, "the fate of this worker is exit"),
    ],
)
async def test_partial_start_is_torn_down_with_the_root_cause(tmp_path: Path, fate, kind, text) -> None:
    with pytest.raises(kind) as caught:
        await _spawn(tmp_path, "live", fate)

    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert text in message
    assert "worker-1 (node " in message
    assert "start of worker" in message
    assert _all_gone(tmp_path)


@pytest.mark.asyncio
async def test_start_is_torn_down_with_the_stderr_when_a_member_is_never_ready(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        await _spawn(tmp_path, "live", "hang", start_timeout_s=12.0)

    assert "start of worker: waited 12 s for ready() from worker-1 (node " in str(caught.value)
    assert "| the fate of this worker is hang" in str(caught.value)
    assert _all_gone(tmp_path)


@pytest.mark.asyncio
async def test_error_says_so_when_a_member_has_no_process_for_want_of_resources(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"worker-0 \(node unknown, not started yet\)[\s\S]*free resources"):
        await ActorGroup.spawn(
            "worker",
            Worker,
            args_per_member=[(str(tmp_path),)],
            options_per_member=[{"num_cpus": 1000}],
            start_timeout_s=0.5,
        )


@pytest.mark.asyncio
async def test_calls_fail_with_name_and_reason_when_a_member_fails_hangs_or_dies(tmp_path: Path) -> None:
    group = await _spawn(tmp_path, "live", "live")
    try:
        with pytest.raises(ModelError, match="no such model") as own:
            await group.call(0, "fail", True, seconds=30, phase="loading")
        with pytest.raises(ActorError, match=r"loading: worker-0 \(node [\s\S]*KeyError: 'missing'"):
            await group.call(0, "fail", False, seconds=30, phase="loading")
        with pytest.raises(
            DeadlineExceeded, match=r"^step 3: waited 0.1 s for hang\(\) from worker-1 \(node .*pid \d+"
        ):
            await group.call(1, "hang", seconds=0.1, phase="step 3")
        with pytest.raises(ActorError) as death:
            await group.call(1, "die", seconds=30, phase="step 4")
        answer = await group.call(0, "double", 1, seconds=30, phase="step 5")
    finally:
        await group.shutdown(5)

    assert own.value.__notes__ == [f"raised in {group.members[0].label} during loading"]
    assert str(death.value).startswith(f"step 4: {group.members[1].label} died: ")
    assert "| out of luck" in str(death.value)
    assert answer == 2
    assert _all_gone(tmp_path)


@pytest.mark.asyncio
async def test_members_come_and_go_and_no_name_is_used_twice(tmp_path: Path) -> None:
    group = await _spawn(tmp_path, "live", "live")
    try:
        first = group.members[0]
        end = asyncio.create_task(group.until_gone(first))
        await asyncio.sleep(0)
        os.kill(first.pid, signal.SIGKILL)
        reason = await asyncio.wait_for(end, 60)
        # The group does not know yet: a call that may go anywhere finds the other one by itself.
        answer = await group.call_any("double", 4, seconds=60, phase="step 6")
        removed = group.remove(first.name)
        added = await group.add(lambda index: (str(tmp_path),), {"num_cpus": 0}, start_timeout_s=60)
        answers = await group.call_all("double", 1, seconds=60, phase="step 7")
    finally:
        await group.shutdown(5)

    assert isinstance(reason, ActorDied)
    assert (answer, answers) == (8, [2, 2])
    assert removed is first
    assert added.name == "worker-2"
    assert [member.name for member in group.members] == ["worker-1", "worker-2"]
    assert _all_gone(tmp_path)


@pytest.mark.asyncio
async def test_remote_call_goes_on_when_the_wait_for_it_expires(tmp_path: Path) -> None:
    group = await _spawn(tmp_path, "live")
    label = group.members[0].label
    try:
        ref = group.members[0].handle.double.remote(21)
        with pytest.raises(DeadlineExceeded):
            await wait_for(group.members[0].handle.hang.remote(), seconds=0.01, phase="p", actor=label)
        answer = await wait_for(ref, seconds=30, phase="p", actor=label)
    finally:
        await group.shutdown(5)

    assert answer == 42


def test_waiting_without_a_loop_gives_results_and_the_same_errors(tmp_path: Path) -> None:
    actor = ray.remote(Worker).options(num_cpus=0).remote(str(tmp_path))
    label = ActorLabel(name="worker-0")
    try:
        one = get_within(actor.double.remote(3), seconds=60, phase="p", actor=label)
        two = get_within([actor.double.remote(1), actor.double.remote(2)], seconds=60, phase="p", actor=label)
        with pytest.raises(ModelError, match="no such model"):
            get_within(actor.fail.remote(True), seconds=60, phase="p", actor=label)
        with pytest.raises(DeadlineExceeded, match=r"p: waited .* for 1 of 2 answers from worker-0"):
            get_within([actor.double.remote(1), actor.hang.remote()], seconds=0.5, phase="p", actor=label)
        with pytest.raises(ActorError, match=r"worker-0 .* died"):
            get_within(actor.die.remote(), seconds=60, phase="p", actor=label)
    finally:
        ray.kill(actor)

    assert one == 6
    assert two == [2, 4]
