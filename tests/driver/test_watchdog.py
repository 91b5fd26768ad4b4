"""The watchdog over real engines and fakes of the rest: a paused engine and a full queue are named in time."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_config

from rayrl.audit.live_status import read_status
from rayrl.checkpoint.ledger import Ledger
from rayrl.checkpoint.ledger_reader import read_ledger
from rayrl.config.inference import InferenceConfig, ScriptedEngine
from rayrl.driver.group_buffer import GroupBuffer
from rayrl.driver.progress import Progress
from rayrl.driver.watchdog import Watchdog
from rayrl.errors import StallError
from rayrl.inference.scripted import ScriptedModel, scripted_engine
from rayrl.inference.step_gate import StepGate
from rayrl.infra.actor_group import Member
from rayrl.rollout.episode_board import EpisodeBoard
from rayrl.types.prompt import Prompt, PromptId
from rayrl.types.protocols import EpisodeContext, RewardResult
from rayrl.types.sampling import GenerationRequest, SamplingParams

QUEUE = 2
PROMPT = Prompt(id=PromptId(dataset="sums", epoch=0, ordinal=3), text="1+3=")


class Remote:
    """What a Ray handle is to its caller: methods with `remote`."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self.remote = answer


class Handle:
    """An actor that only has a status."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self.status = Remote(answer)
        self._actor_id = self

    def hex(self) -> str:
        return "0c5d94"


class Group:
    """An actor group of one member, which is this process."""

    def __init__(self, name: str, answer: Callable[[], Awaitable[Any]]) -> None:
        self.name = name
        member = Member(name=f"{name}-0", index=0, handle=Handle(answer), node="", host="", pid=os.getpid())
        self.members = (member,)


class Rollouts:
    """A rollout loop whose groups are all with the workers."""

    def status(self) -> dict[str, Any]:
        return {"in_flight": 2}


async def no_episodes() -> dict[str, Any]:
    return {"oldest_episodes": ()}


@asynccontextmanager
async def watched(
    tmp_path: Path,
    gate: StepGate | None = None,
    on_stall: str = "stop",
    worker: Callable[[], Awaitable[Any]] = no_episodes,
) -> AsyncIterator[tuple[Watchdog, Any, Progress]]:
    """Yield a watchdog over a scripted engine with two requests in it, and the engine."""
    inference = InferenceConfig(engine=ScriptedEngine(type="scripted"), max_queued_requests=QUEUE)
    engine = scripted_engine(ScriptedModel(lambda prompt: (1, 2)), inference, gate=gate)
    await engine.start()
    await engine.load(0, {})
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    progress = Progress()
    groups: Any = [Group("inference", engine.status), Group("rollout", worker)]
    rollouts: Any = Rollouts()
    try:
        yield (
            Watchdog(
                config=small_config(inference__max_queued_requests=QUEUE, debug={"stall_s": 0.2, "on_stall": on_stall}),
                progress=progress,
                buffer=GroupBuffer(),
                phase=lambda: "waiting for 2 groups",
                rollout_loop=rollouts,
                groups=lambda: groups,
                ledger=ledger,
                logs=tmp_path,
            ),
            engine,
            progress,
        )
    finally:
        await engine.close()
        ledger.close()


async def ask(engine: Any, name: str) -> None:
    request = GenerationRequest(request_id=name, prompt_tokens=(1,), params=SamplingParams(max_new_tokens=2))
    async for _ in engine.generate(request):
        pass


async def hang() -> None:
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_paused_engine_is_named_and_ends_the_run(tmp_path: Path) -> None:
    async with watched(tmp_path) as (watchdog, engine, _):
        await engine.pause("keep")
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(ask(engine, name)) for name in "ab"]
            with pytest.raises(StallError, match=r"debug\.stall_s=0\.2 s; engine inference-0 is paused with 0 running"):
                await watchdog.guard(hang())
            await engine.resume()
            await asyncio.gather(*asking)

    events = read_ledger(tmp_path / "ledger.sqlite").events
    assert [event.kind for event in events] == ["stalled"]
    assert "engine inference-0 is paused" in (tmp_path / events[0].detail["report"]).read_text()
    status = read_status(tmp_path)
    assert status is not None and status.actors["inference-0"]["pid"] == os.getpid()


@pytest.mark.asyncio
async def test_full_queue_is_named(tmp_path: Path) -> None:
    gate = StepGate()
    async with watched(tmp_path, gate) as (watchdog, engine, _):
        async with asyncio.TaskGroup() as tasks:
            for name in "ab":
                tasks.create_task(ask(engine, name))
            with pytest.raises(StallError, match=r"the queue of engine inference-0 is full: 2 requests wait"):
                await watchdog.guard(hang())
            gate.allow(100)


class Stuck:
    """A reward that does not return."""

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        await hang()
        raise AssertionError("it never returns")


async def stuck_in_reward(context: EpisodeContext) -> None:
    await context.reward.score(PROMPT, "4")


async def endless(context: EpisodeContext) -> None:
    await hang()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("episode", "words"),
    [
        (stuck_in_reward, r"the reward does not return: episode sums/0/3#1 is in scoring for"),
        (endless, r"the workflow does not return: episode sums/0/3#1 is in workflow for"),
    ],
)
async def test_episode_that_does_not_end_is_named_with_its_stage(
    tmp_path: Path, episode: Callable[[EpisodeContext], Awaitable[None]], words: str
) -> None:
    unused: Any = None
    board = EpisodeBoard()
    given = EpisodeContext(sampler=unused, reward=Stuck(), tokenizer=unused, params=unused, max_context=8)

    async def run() -> None:
        with board.episode(PROMPT.id, 1, given) as context:
            await episode(context)

    async def status() -> dict[str, Any]:
        return {"oldest_episodes": board.oldest(4)}

    async with watched(tmp_path, worker=status) as (watchdog, _, _):
        running = asyncio.create_task(run())
        with pytest.raises(StallError, match=words):
            await watchdog.guard(hang())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.asyncio
async def test_report_without_stop_leaves_the_run_alone_and_is_made_once(tmp_path: Path) -> None:
    async with watched(tmp_path, on_stall="report") as (watchdog, _, _):
        reported = asyncio.Event()

        async def work() -> None:
            while not (tmp_path / "stall_1.txt").exists():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0)
            reported.set()

        await asyncio.wait_for(watchdog.guard(work()), 60)

    assert reported.is_set()
    assert not (tmp_path / "stall_2.txt").exists()


@pytest.mark.asyncio
async def test_failure_of_the_train_loop_comes_through(tmp_path: Path) -> None:
    async def fail() -> None:
        raise ValueError("of the loop")

    async with watched(tmp_path) as (watchdog, _, _):
        with pytest.raises(ValueError, match="of the loop"):
            await watchdog.guard(fail())
