"""Hand-written fakes for rollout tests."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from rayrl.types.prompt import Message, Prompt, PromptId
from rayrl.types.protocols import EpisodeContext, Reward, RewardResult, Sampler
from rayrl.types.sampling import Chunk, Completion, GenerationRequest, RequestFailure, SamplingParams
from rayrl.types.trajectory import VersionSpan


def prompt(text: str = "3+4=", answer: str | None = "7") -> Prompt:
    return Prompt(id=PromptId(dataset="sums", epoch=0, ordinal=0), text=text, answer=answer)


class CharTokenizer:
    """One id per character; id 0 ends a sequence."""

    eos_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("".join(f"<{message.role}>{message.content}" for message in messages) + "<assistant>")


class FixedSampler:
    """Answers every prompt with the same text, by one version."""

    def __init__(self, text: str = "7", version: int = 2) -> None:
        self.text = text
        self.version = version
        self.params: list[SamplingParams] = []

    async def sample(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        self.params.append(params)
        tokens = (*(ord(character) for character in self.text), 0)
        return Completion(
            request_id="r",
            tokens=tokens,
            logprobs=(-0.5,) * len(tokens),
            spans=(VersionSpan(start=0, end=len(tokens), version=self.version),),
            finish_reason="stop",
        )


class MatchReward:
    """1 if the completion is the answer."""

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        return RewardResult(total=float(completion == prompt.answer))


def context(sampler: Sampler | None = None, reward: Reward | None = None, max_context: int = 64) -> EpisodeContext:
    return EpisodeContext(
        sampler=sampler or FixedSampler(),
        reward=reward or MatchReward(),
        tokenizer=CharTokenizer(),
        params=SamplingParams(max_new_tokens=8),
        max_context=max_context,
    )


class FakeEngine:
    """An engine client that plays a list of scripts, one per call: items to yield, or an exception to raise."""

    def __init__(self, *scripts: list[list[Chunk | RequestFailure] | Exception]) -> None:
        self.scripts = list(scripts)
        self.calls: list[list[GenerationRequest]] = []
        self.aborted: list[str] = []

    async def stream(self, requests: list[GenerationRequest]) -> AsyncIterator[list[Chunk | RequestFailure]]:
        self.calls.append(requests)
        if not self.scripts:
            yield [finished(request.request_id, (7,)) for request in requests]
            return
        for item in self.scripts.pop(0):
            if isinstance(item, Exception):
                raise item
            yield [rename(entry, requests[0].request_id) for entry in item]
            await asyncio.sleep(0)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def rename(item: Chunk | RequestFailure, request_id: str) -> Chunk | RequestFailure:
    """Return an item of a script with the id of the request that plays it."""
    if isinstance(item, RequestFailure):
        return RequestFailure(request_id=request_id, message=item.message, retry=item.retry)
    return Chunk(
        request_id=request_id,
        tokens=item.tokens,
        logprobs=item.logprobs,
        version=item.version,
        finish_reason=item.finish_reason,
    )


def chunk(tokens: tuple[int, ...], version: int = 0) -> Chunk:
    return Chunk(request_id="", tokens=tokens, logprobs=(-1.0,) * len(tokens), version=version)


def finished(request_id: str, tokens: tuple[int, ...], version: int = 0) -> Chunk:
    return Chunk(
        request_id=request_id,
        tokens=tokens,
        logprobs=(-1.0,) * len(tokens),
        version=version,
        finish_reason="stop",
    )
