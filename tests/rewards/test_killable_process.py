"""Children are one-line scripts here; how long they hang is up to the test."""

import asyncio
import os
import subprocess
import sys

import pytest

from rayrl.rewards.killable_process import KillableProcess

_CHILD = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "hang":
        time.sleep(3600)
    if request["do"] == "die":
        os._exit(7)
    print(json.dumps({"pid": os.getpid(), "size": len(line)}), flush=True)
"""


def _is_running(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.asyncio
async def test_requests_are_answered_by_one_child_in_turn() -> None:
    process = KillableProcess(("-c", _CHILD))
    assert process.pid is None
    replies = await asyncio.gather(*(process.ask({"do": "x" * n}, timeout_s=60) for n in range(5)))
    assert {reply["pid"] for reply in replies} == {process.pid}
    assert [reply["size"] - replies[0]["size"] for reply in replies] == list(range(5))
    await process.close()


@pytest.mark.asyncio
async def test_large_requests_pass_the_pipe() -> None:
    process = KillableProcess(("-c", _CHILD))
    assert (await process.ask({"do": "x" * 1_000_000}, timeout_s=60))["size"] > 1_000_000
    await process.close()


@pytest.mark.asyncio
async def test_child_that_takes_too_long_is_killed_and_replaced() -> None:
    process = KillableProcess(("-c", _CHILD))
    first = (await process.ask({"do": "x"}, timeout_s=60))["pid"]
    with pytest.raises(TimeoutError):
        await process.ask({"do": "hang"}, timeout_s=0.05)
    assert not _is_running(first)
    second = (await process.ask({"do": "x"}, timeout_s=60))["pid"]
    assert second != first
    await process.close()
    assert not _is_running(second)


@pytest.mark.asyncio
async def test_cancelled_request_kills_the_child_so_that_its_reply_is_never_taken_for_another() -> None:
    process = KillableProcess(("-c", _CHILD))
    first = (await process.ask({"do": "x"}, timeout_s=60))["pid"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await process.ask({"do": "hang"}, timeout_s=3600)
    assert not _is_running(first)
    assert (await process.ask({"do": "x"}, timeout_s=60))["pid"] != first
    await process.close()


@pytest.mark.asyncio
async def test_death_of_the_child_is_an_eof_error_and_the_next_request_has_a_new_one() -> None:
    process = KillableProcess(("-c", _CHILD))
    first = (await process.ask({"do": "x"}, timeout_s=60))["pid"]
    with pytest.raises(EOFError):
        await process.ask({"do": "die"}, timeout_s=60)
    assert (await process.ask({"do": "x"}, timeout_s=60))["pid"] != first
    await process.close()


@pytest.mark.asyncio
async def test_child_that_cannot_start_is_an_eof_error() -> None:
    process = KillableProcess(("-c", "raise SystemExit(3)"))
    with pytest.raises(EOFError):
        await process.ask({"do": "x"}, timeout_s=60)
    assert process.pid is None


@pytest.mark.asyncio
async def test_closing_in_the_middle_of_a_request_ends_it_and_starts_nothing_new() -> None:
    process = KillableProcess(("-c", _CHILD))
    pid = (await process.ask({"do": "x"}, timeout_s=60))["pid"]
    request = asyncio.create_task(process.ask({"do": "hang"}, timeout_s=3600))
    await asyncio.sleep(0)
    await process.close()
    await process.close()
    with pytest.raises(EOFError):
        await request
    assert not _is_running(pid)
    with pytest.raises(EOFError, match="was closed"):
        await process.ask({"do": "x"}, timeout_s=60)


@pytest.mark.chaos
def test_idle_child_leaves_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio, sys; from rayrl.rewards.killable_process import KillableProcess\n"
            "async def main():\n"
            "    process = KillableProcess(('-c', sys.argv[1]))\n"
            "    await process.ask({'do': 'x'}, timeout_s=60)\n"
            "    print('idle', flush=True)\n"
            "    await asyncio.Event().wait()\n"
            "asyncio.run(main())",
            _CHILD,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert owner.stdout is not None and owner.stderr is not None
    assert owner.stdout.readline() == b"idle\n"
    owner.kill()
    owner.wait()
    # The child holds the same stderr: it ends when both are gone.
    owner.stderr.read()
    owner.stdout.close()
    owner.stderr.close()
