"""Episodes and groups: trajectories, failures as data, seeds."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import CharTokenizer, FixedSampler, context, prompt

from rayrl.config.rollout import FunctionWorkflow
from rayrl.errors import ConfigError, DatasetError, EngineError, RewardError
from rayrl.rollout.episode import run_episode
from rayrl.rollout.group import GroupRequest, run_group, sample_seed
from rayrl.rollout.registry import make_workflow
from rayrl.rollout.sft_examples import encode_example
from rayrl.rollout.single_turn import SingleTurn
from rayrl.types.prompt import Message, Prompt, PromptId
from rayrl.types.protocols import EpisodeContext, RewardResult
from rayrl.types.sampling import SamplingParams
from rayrl.types.trajectory import Trajectory, VersionSpan

TEXT = SingleTurn("text")


@pytest.mark.asyncio
async def test_trajectory_has_prompt_and_sampled_tokens_with_mask_and_versions() -> None:
    trajectory = await TEXT.run_episode(prompt(), 1, context())
    assert trajectory.tokens == (51, 43, 52, 61, 55, 0)
    assert trajectory.loss_mask == (0, 0, 0, 0, 1, 1)
    assert trajectory.logprobs == (0.0, 0.0, 0.0, 0.0, -0.5, -0.5)
    assert trajectory.spans == (VersionSpan(start=4, end=6, version=2),)
    assert (trajectory.reward, trajectory.sample_index, trajectory.stop_reason) == (1.0, 1, "stop")


@pytest.mark.asyncio
async def test_chat_prompts_go_through_the_template_with_the_system_message() -> None:
    workflow = SingleTurn("chat", system_prompt="add")
    trajectory = await workflow.run_episode(prompt(), 0, context())
    assert CharTokenizer().decode(trajectory.tokens[:-2]) == "<system>add<user>3+4=<assistant>"


@pytest.mark.asyncio
async def test_messages_of_the_prompt_replace_its_text_in_chats() -> None:
    with_messages = Prompt(
        id=PromptId(dataset="d", epoch=0, ordinal=0), text="unused", messages=(Message(role="user", content="hi"),)
    )
    trajectory = await SingleTurn("chat").run_episode(with_messages, 0, context())
    assert CharTokenizer().decode(trajectory.tokens[:-2]) == "<user>hi<assistant>"


@pytest.mark.asyncio
async def test_prompt_longer_than_the_context_is_a_record_with_the_numbers() -> None:
    trajectory = await run_episode(TEXT, prompt(), 0, context(max_context=10), timeout_s=5, max_attempts=3)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "prompt"
    assert "has 4 tokens and 8 new ones" in trajectory.failure.message
    assert trajectory.failure.attempts == 1


@pytest.mark.asyncio
async def test_failing_reward_is_a_record_and_never_a_zero() -> None:
    class Broken:
        async def score(self, prompt: Prompt, completion: str) -> RewardResult:
            raise RewardError("verifier says no")

    trajectory = await run_episode(TEXT, prompt(), 0, context(reward=Broken()), timeout_s=5, max_attempts=3)
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "reward"


@pytest.mark.asyncio
async def test_infrastructure_fault_is_tried_again_and_succeeds() -> None:
    class Flaky(FixedSampler):
        async def sample(self, prompt_tokens, params, *, session_id=None):  # type: ignore[no-untyped-def]
            if not self.params:
                self.params.append(params)
                raise EngineError("no engine")
            return await super().sample(prompt_tokens, params, session_id=session_id)

    trajectory = await run_episode(TEXT, prompt(), 0, context(sampler=Flaky()), timeout_s=5, max_attempts=2)
    assert trajectory.failure is None


@pytest.mark.asyncio
async def test_workflow_that_throws_is_a_record_after_one_attempt() -> None:
    class Throwing:
        async def run_episode(self, prompt: Prompt, sample_index: int, context: EpisodeContext) -> Trajectory:
            raise KeyError("tool")

    trajectory = await run_episode(Throwing(), prompt(), 0, context(), timeout_s=5, max_attempts=3)
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.attempts) == ("workflow", 1)
    assert "KeyError: 'tool'" in trajectory.failure.message


@pytest.mark.asyncio
async def test_workflow_that_calls_exit_is_a_record_and_the_worker_goes_on() -> None:
    class Leaving:
        async def run_episode(self, prompt: Prompt, sample_index: int, context: EpisodeContext) -> Trajectory:
            raise SystemExit(3)

    trajectory = await run_episode(Leaving(), prompt(), 0, context(), timeout_s=5, max_attempts=3)
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.message) == ("workflow", "SystemExit: 3")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda good: None, "returned NoneType, not a Trajectory"),
        (lambda good: replace(good, loss_mask=(0,) * 6, spans=()), "no sampled token"),
        (
            lambda good: replace(good, loss_mask=(1,) * 6, spans=(VersionSpan(start=0, end=6, version=2),)),
            "first token .* carries loss",
        ),
        (lambda good: replace(good, reward=float("nan")), "reward of the trajectory is nan"),
        (lambda good: replace(good, logprobs=(*good.logprobs[:-1], float("-inf"))), "logprob .* is not finite"),
        (lambda good: replace(good, sample_index=7), "sample 7 of sums/0/0 when it was asked for sample 1"),
    ],
)
async def test_trajectory_that_training_could_not_use_is_a_record_of_the_workflow(
    change: Callable[[Trajectory], Any], said: str
) -> None:
    class Changed:
        async def run_episode(self, prompt: Prompt, sample_index: int, context: EpisodeContext) -> Trajectory:
            result: Trajectory = change(await TEXT.run_episode(prompt, sample_index, context))
            return result

    trajectory = await run_episode(Changed(), prompt(), 1, context(), timeout_s=5, max_attempts=3)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "workflow"
    assert re.search(said, trajectory.failure.message)


@pytest.mark.asyncio
async def test_episode_without_end_is_a_timeout_record_that_names_the_setting() -> None:
    class Endless:
        async def run_episode(self, prompt: Prompt, sample_index: int, context: EpisodeContext) -> Trajectory:
            await asyncio.Event().wait()
            raise AssertionError

    trajectory = await run_episode(Endless(), prompt(), 0, context(), timeout_s=0.01, max_attempts=3)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "timeout"
    assert "rollout.episode_timeout_s=0.01" in trajectory.failure.message


@pytest.mark.asyncio
async def test_group_summary_counts_usable_trajectories_only() -> None:
    class FirstFails:
        num_calls = 0

        async def score(self, prompt: Prompt, completion: str) -> RewardResult:
            self.num_calls += 1
            if self.num_calls == 1:
                raise RewardError("once")
            return RewardResult(total=1.0, parts={"answer": 1.0})

    request = GroupRequest(prompt=prompt(), group_size=4, params=SamplingParams(max_new_tokens=8))
    summary, trajectories = await run_group(request, TEXT, context(reward=FirstFails()), timeout_s=5, max_attempts=1)
    assert len(trajectories) == 4
    assert (summary.num_usable, summary.rewards) == (3, (1.0, 1.0, 1.0))
    assert len(summary.failures) == 1
    assert summary.reward_parts == {"answer": 1.0}
    assert (summary.oldest_version, summary.newest_version) == (2, 2)
    assert summary.num_sampled_tokens == 6


@pytest.mark.asyncio
async def test_each_sample_has_its_own_seed_that_depends_on_run_prompt_and_place_only() -> None:
    sampler = FixedSampler()
    request = GroupRequest(prompt=prompt(), group_size=3, params=SamplingParams(max_new_tokens=8), seed=1)
    await run_group(request, TEXT, context(sampler=sampler), timeout_s=5, max_attempts=1)
    seeds = {params.seed for params in sampler.params}
    assert len(seeds) == 3
    assert seeds == {sample_seed(1, prompt().id, index) for index in range(3)}
    assert sample_seed(2, prompt().id, 0) not in seeds


def test_supervised_example_has_the_loss_on_the_answer_and_its_end() -> None:
    example = encode_example(prompt(), CharTokenizer(), prompt_format="text", system_prompt=None, max_context=64)
    assert example.tokens == (51, 43, 52, 61, 55, 0)
    assert example.loss_mask == (0, 0, 0, 0, 1, 1)


def test_supervised_example_without_an_answer_is_refused() -> None:
    with pytest.raises(DatasetError, match="has no answer"):
        encode_example(prompt(answer=None), CharTokenizer(), prompt_format="text", system_prompt=None, max_context=64)


@pytest.mark.parametrize(("path", "message"), [("no_such_module:X", "cannot import"), ("math:nope", "has no 'nope'")])
def test_workflow_that_cannot_be_imported_is_a_config_error(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_workflow(FunctionWorkflow(type="custom", path=path))


def test_workflow_whose_module_or_class_fails_is_a_config_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_workflow_broken.py").write_text("def f(:\n", encoding="utf-8")
    (tmp_path / "user_workflow.py").write_text("def make():\n    raise KeyError('tool')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"rollout\.workflow\.path='user_workflow_broken:X'.*SyntaxError"):
        make_workflow(FunctionWorkflow(type="custom", path="user_workflow_broken:X"))
    with pytest.raises(ConfigError, match=r"rollout\.workflow\.path='user_workflow:make': KeyError: 'tool'"):
        make_workflow(FunctionWorkflow(type="custom", path="user_workflow:make"))
