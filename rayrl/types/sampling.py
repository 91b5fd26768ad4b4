"""Requests to an inference engine and what comes back: token ids in, token ids out."""

from dataclasses import dataclass
from typing import Literal

from rayrl.types.trajectory import VersionSpan

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecoding:
    """What the decoded completion must look like; exactly one of the fields is given.

    Example: `GuidedDecoding(regex="[0-9]{1,4}")`.
    """

    json_schema: str | None = None
    """A JSON schema, as text."""
    regex: str | None = None
    """A regular expression for the whole completion."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar, in the EBNF that the engine's library reads."""

    def __post_init__(self) -> None:
        given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"guided decoding takes exactly one of json_schema, regex, choice and grammar; given: "
                f"{', '.join(given) or 'none'}"
            )


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
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the completion has already, -2 to 2; 0 is off."""
    frequency_penalty: float = 0.0
    """Taken off the logit of each token as often as the completion has it already, -2 to 2; 0 is off."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or completion are divided by it if positive, else multiplied; 1 is off. Keskar et
    al. 2019, arXiv:1909.05858."""
    guided: GuidedDecoding | None = None
    """What the completion must look like; nothing in particular when None."""

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens came before, beyond what the model makes of them."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def can_continue(self) -> bool:
        """Whether a completion can go on as a new request whose prompt ends with the tokens so far.

        Penalties, guided decoding and stop strings look at the completion as such, and a new request takes the part
        that is there already for its prompt.
        """
        return self.guided is None and not self.has_penalties and not self.stop


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
