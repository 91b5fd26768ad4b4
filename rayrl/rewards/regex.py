"""1 if a pattern is found and, where it has a group, its last match equals the answer."""

import re

from rayrl.config import reward as config
from rayrl.errors import ConfigError
from rayrl.rewards.result import require_answer
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import RewardResult


class RegexReward:
    """Searches the completion. Raises ConfigError if the pattern is not a regular expression."""

    def __init__(self, settings: config.RegexReward) -> None:
        try:
            self._pattern = re.compile(settings.pattern)
        except re.error as error:
            raise ConfigError(f"reward.pattern {settings.pattern!r} is not a regular expression: {error}") from error

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        """Return 1 or 0; surrounding white space of the group does not count.

        Raises RewardError if the pattern has a group and the prompt no answer.
        """
        if self._pattern.groups == 0:
            return RewardResult(total=float(self._pattern.search(completion) is not None))
        answer = require_answer(prompt, "regex")
        found: str | None = None
        for match in self._pattern.finditer(completion):
            found = match.group(1)
        return RewardResult(total=float(found is not None and found.strip() == answer.strip()))
