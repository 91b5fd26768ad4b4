"""What a rollout worker is started with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrl.config.model import ModelConfig
from rayrl.config.reward import RewardConfig
from rayrl.config.rollout import RolloutConfig, SamplingConfig
from rayrl.types.sampling import GuidedDecoding, SamplingParams

if TYPE_CHECKING:
    from rayrl.rollout.text_scorer import ScorerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings of one rollout worker; an SFT run has only the model."""

    model: ModelConfig
    rollout: RolloutConfig | None = None
    reward: RewardConfig | None = None
    eval_reward: RewardConfig | None = None
    """Another reward for evaluation; the training reward when None."""
    scorers: "tuple[ScorerEntry, ...]" = ()
    """Reward models that rewards ask."""


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """Return the request parameters of a config."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_new_tokens=config.min_new_tokens,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        repetition_penalty=config.repetition_penalty,
        guided=None if config.guided is None else GuidedDecoding(**config.guided.model_dump()),
    )
