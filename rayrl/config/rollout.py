"""How episodes are run and sampled."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rayrl.config.base import Section


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
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, besides the model's own."""


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
