"""The verifier of the reasoning-gym task that made the prompt."""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rayrl.config import reward as config
from rayrl.errors import RewardError
from rayrl.rewards.result import checked_result
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import RewardResult
from rayrl.utils.daemon_thread import call_in_thread

# A minus belongs to the number unless it stands between two operands, as in `5-3`.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)")
_ANSWER_TAG = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def extract_answer(completion: str, how: Literal["text", "last_number", "answer_tag"]) -> str | None:
    """Return the part of a completion that is the answer, None if there is none.

    `last_number` understands signs, decimals and thousands separators: `16 - 5 = -1,011.5.` gives `-1011.5`.
    """
    if how == "text":
        return completion.strip()
    if how == "answer_tag":
        tagged: list[str] = _ANSWER_TAG.findall(completion)
        return tagged[-1] if tagged else None
    numbers: list[str] = _NUMBER.findall(completion.replace("\N{MINUS SIGN}", "-"))
    return numbers[-1].replace(",", "") if numbers else None


class ReasoningGymReward:
    """Scores with the task that the prompt's metadata names; see `rayrl.datasets.reasoning_gym` for its form."""

    def __init__(self, settings: config.ReasoningGymReward) -> None:
        # Imported here: it takes a second or two, which the first episode would wait for.
        from reasoning_gym.factory import create_dataset

        self._create = create_dataset
        self._extract = settings.extract
        self._verifiers: dict[str, Callable[[str, dict[str, Any]], float]] = {}

    async def score(self, prompt: Prompt, completion: str) -> RewardResult:
        """Return the task's score, usually in [0, 1]; a completion without an answer gets 0.

        Raises RewardError if the prompt is not of reasoning-gym or its verifier fails.
        """
        where = f"reward reasoning_gym on prompt {prompt.id}"
        for key in ("task", "settings", "entry"):
            if key not in prompt.metadata:
                raise RewardError(f"{where}: its metadata has no {key!r}; set dataset.type: reasoning_gym")
        answer = extract_answer(completion, self._extract)
        if answer is None:
            return RewardResult(total=0.0)
        try:
            # Some verifiers run for long, on expressions that the model wrote.
            value = await call_in_thread(self._verify, prompt.metadata, answer)
        except Exception as error:
            raise RewardError(f"{where} failed on {answer!r}: {type(error).__name__}: {error}") from error
        return checked_result(value, where)

    def _verify(self, metadata: Mapping[str, Any], answer: str) -> float:
        task, settings = metadata["task"], metadata["settings"]
        key = json.dumps([task, settings], sort_keys=True)
        if key not in self._verifiers:
            self._verifiers[key] = self._create(task, **settings).score_answer
        return self._verifiers[key](answer, ast.literal_eval(metadata["entry"]))
