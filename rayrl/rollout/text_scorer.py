"""A reward model behind a Ray actor handle: tokens are made here, with its own tokenizer, and scored there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayrl.config.model import ModelConfig
from rayrl.config.reward import RewardModelReward
from rayrl.infra.identity import ActorLabel
from rayrl.infra.waiting import wait_for
from rayrl.rewards.reward_model import ScoredReward
from rayrl.rollout.sft_examples import encode_example
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerEntry:
    """One reward model as a rollout worker is told of it."""

    settings: RewardModelReward
    """Its path is absolute."""
    handle: Any
    """Ray's handle of the actor."""
    label: ActorLabel
    """The actor as error messages name it."""


class ActorTextScorer:
    """Implements `TextScorer`."""

    def __init__(self, entry: ScorerEntry) -> None:
        from rayrl.models.context import context_limit
        from rayrl.models.tokenizer import load_tokenizer

        self._settings = settings = entry.settings
        self._handle = entry.handle
        self._label = entry.label
        self._tokenizer = load_tokenizer(settings.path, trust_remote_code=settings.trust_remote_code)
        self._max_context = context_limit(ModelConfig(path=settings.path))

    async def score(self, prompt: Prompt, completion: str) -> float:
        """See `TextScorer`. The text is closed by the end-of-sequence token, as in the training of reward models."""
        example = encode_example(
            replace(prompt, answer=completion),
            self._tokenizer,
            prompt_format=self._settings.prompt_format,
            system_prompt=self._settings.system_prompt,
            max_context=self._max_context,
        )
        score: float = await wait_for(
            self._handle.score.remote(example.tokens),
            seconds=self._settings.timeout_s,
            phase="score of a reward model (reward.timeout_s)",
            actor=self._label,
        )
        return score


def connect_scorers(rewards: Iterable[Reward], entries: Sequence[ScorerEntry]) -> None:
    """Tell the rewards that ask reward models which actors to ask."""
    scorers = {entry.settings.path: ActorTextScorer(entry) for entry in entries}
    for reward in rewards:
        if isinstance(reward, ScoredReward):
            reward.connect(scorers)
