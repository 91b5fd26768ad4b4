"""1 if the completion equals the answer, else 0."""

from rayrl.config import reward as config
from rayrl.rewards.result import require_answer
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import RewardResult


class ExactMatchReward:
    """Compares whole texts."""

    def __init__(self, settings: config.ExactMatchReward) -> None:
        self._settings = settings

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        """Return 1 or 0. Raises RewardError if the prompt has no answer."""
        answer = require_answer(prompt, "exact_match")
        return RewardResult(total=float(self._normal_form(completion) == self._normal_form(answer)))

    def _normal_form(self, text: str) -> str:
        text = text.strip() if self._settings.strip else text
        return text.casefold() if self._settings.ignore_case else text
