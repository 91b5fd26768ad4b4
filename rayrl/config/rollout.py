"""How episodes are run and sampled."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rayrl.config.base import Section


class GuidedConfig(Section):
    """Guided decoding: exactly one of these."""

    json_schema: str | None = None
    """A JSON schema, as text."""
    regex: str | None = None
    """A regular expression for the whole completion."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar in EBNF."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"guided takes exactly one of json_schema, regex, choice and grammar; given: "
                f"{', '.join(given) or 'none'}"
            )
        return self


class SamplingConfig(Section):
    """How tokens are sampled."""

    max_new_tokens: int = Field(gt=0)
    """Longest completion of one turn, in tokens, the stop token included."""
    temperature: float = Field(default=1.0, ge=0)
    """Training divides its logits by the same number; 0 (greedy) is for evaluation only."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """For evaluation; training refuses values below 1, whose logprobs no trainer can reproduce."""
    top_k: int = Field(default=0, ge=0)
    """For evaluation; training refuses anything but 0 (all tokens)."""
    min_new_tokens: int = Field(default=0, ge=0)
    """No stop token before this many tokens. Training refuses anything but 0, as for `top_p`."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Off the logits of tokens that the completion has already; for evaluation with vLLM, as for `top_p`."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """The same, as often as the completion has the token."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides positive logits of tokens that came before, and multiplies negative ones; as for `presence_penalty`."""
    guided: GuidedConfig | None = None
    """What a completion must look like; for evaluation with vLLM."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, besides the model's own."""


NEUTRAL_SAMPLING: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_new_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "guided": None,
}
"""Fields of `SamplingConfig` that change the distribution in ways that training does not repeat, and their neutral
values: the only ones that training data may be sampled with."""


class SingleTurnWorkflow(Section):
    """One question, one answer."""

    type: Literal["single_turn"]
    prompt_format: Literal["chat", "text"] = "chat"
    """`chat` wraps the prompt in the model's chat template; `text` uses it as it stands."""
    system_prompt: str | None = None
    """System message in front of chat prompts."""


class FunctionWorkflow(Section):
    """A workflow class of yours: `module:Class`, called with `params`; see `rayrl.types.protocols.Workflow`."""

    type: Literal["custom"]
    path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`module:Class`; must be importable in the rollout workers."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""


WorkflowConfig = Annotated[SingleTurnWorkflow | FunctionWorkflow, Field(discriminator="type")]


class RolloutConfig(Section):
    """Rollout workers and what they run."""

    workflow: WorkflowConfig
    """What one episode is."""
    group_size: int = Field(gt=0)
    """Samples per prompt (G)."""
    sampling: SamplingConfig
    """Sampling of training data."""
    num_workers: int = Field(default=1, gt=0)
    """Rollout worker processes; each runs many episodes at once."""
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Time for one episode, its reward included."""
    max_attempts: int = Field(default=2, gt=0)
    """Tries of an episode that fails by an infrastructure fault; faults of data are not tried again."""
