"""What users implement or call: `Sampler`, `Workflow`, `Reward`, and the tokenizer as they see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rayrl.types.prompt import Message, Prompt
from rayrl.types.sampling import Completion, SamplingParams
from rayrl.types.trajectory import Trajectory


class Tokenizer(Protocol):
    """The part of a tokenizer that workflows use; `rayrl.models.tokenizer` makes one from a model folder."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, without special tokens."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation with the opening of the assistant's turn. ModelError without template."""
        ...


class Sampler(Protocol):
    """The only way in which a workflow or a model-graded reward sees inference."""

    async def sample(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        """Return one completion. Raises EngineError if no engine could give one within the configured attempts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The score of one completion.

    Example: `RewardResult(total=1.1, parts={"answer": 1.0, "format": 0.1})`.
    """

    total: float
    """Finite; anything else is treated as a failed reward."""
    parts: Mapping[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Scores completions. An exception becomes a failure record of the episode, never a 0."""

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        """Return the score of `completion`, the decoded text that the model produced for `prompt`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """What a workflow may use during one episode."""

    sampler: Sampler
    reward: Reward
    tokenizer: Tokenizer
    params: SamplingParams
    max_context: int
    """Prompt and completion together, in tokens."""


class Workflow(Protocol):
    """Runs one episode on a prompt: one or many turns, tools, environment steps."""

    async def run_episode(self, prompt: Prompt, sample_index: int, context: EpisodeContext) -> Trajectory:
        """Return the trajectory of one episode. An exception becomes a failure record."""
        ...
