"""Requests to an inference engine and what comes back: token ids in, token ids out."""

from dataclasses import dataclass
from typing import Literal

from rayrl.types.trajectory import VersionSpan

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Logprobs are those of the distribution that was sampled from, after all of this.

    Example: `SamplingParams(temperature=1.0, max_new_tokens=16)`.
    """

    max_new_tokens: int
    """At most this many tokens, the stop token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy, and then the logprobs are those at temperature 1."""
    top_p: float = 1.0
    """Smallest set of most likely tokens with at least this mass; 1 keeps all."""
    top_k: int = 0
    """Only the k most likely tokens; 0 keeps all."""
    min_new_tokens: int = 0
    """No stop token before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence, besides the model's own end-of-sequence ids. The stop token is returned."""
    stop: tuple[str, ...] = ()
    """Strings that end the sequence once they appear in the decoded text. Their tokens are returned."""
    seed: int | None = None
    """Same seed, prompt and weights give the same tokens, whatever else runs in the batch, up to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate."""

    request_id: str
    """Unique among the requests in flight on all engines."""
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    session_id: str | None = None
    """Requests of one session prefer the engine that served the last one (prefix reuse)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some tokens of one request, all sampled by one weight version, in order.

    Example: `Chunk(request_id="r1", tokens=(17, 4), logprobs=(-0.1, -2.0), version=3, finish_reason="stop")`.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log of the probability each token was sampled with; same length as `tokens`."""
    version: int
    """As the engine knows it at the moment of sampling."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a request only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """An engine could not serve one request; the others go on."""

    request_id: str
    message: str
    retry: bool
    """True if the same request may succeed later or elsewhere (a full queue, say)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All chunks of one request, joined."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    """Cover `tokens` without a gap; positions are relative to the completion."""
    finish_reason: FinishReason


def join_chunks(chunks: list[Chunk]) -> Completion:
    """Join the chunks of one request into a completion; the last one must carry the finish reason."""
    assert chunks and chunks[-1].finish_reason is not None, "a request ends with a chunk that has a finish reason"
    spans: list[VersionSpan] = []
    position = 0
    for chunk in chunks:
        end = position + len(chunk.tokens)
        if spans and spans[-1].version == chunk.version:
            spans[-1] = VersionSpan(start=spans[-1].start, end=end, version=chunk.version)
        elif chunk.tokens:
            spans.append(VersionSpan(start=position, end=end, version=chunk.version))
        position = end
    return Completion(
        request_id=chunks[0].request_id,
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        spans=tuple(spans),
        finish_reason=chunks[-1].finish_reason,
    )
