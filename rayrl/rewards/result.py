"""What a verifier returns, checked: a reward is a finite number or a failure, never anything between."""

import math
from collections.abc import Mapping
from typing import Any

from rayrl.errors import RewardError
from rayrl.types.prompt import Prompt
from rayrl.types.protocols import RewardResult


def require_answer(prompt: Prompt, reward_type: str) -> str:
    """Return the reference answer of `prompt`. Raises RewardError if it has none."""
    if prompt.answer is None:
        raise RewardError(
            f"reward {reward_type!r} needs a reference answer, and prompt {prompt.id} has none; set "
            "dataset.answer_field, or choose a reward that needs no answer"
        )
    return prompt.answer


def checked_result(value: Any, where: str) -> RewardResult:
    """Return `value` as a result.

    Args:
        value: a number, a RewardResult, or a mapping with `total` whose other keys are named parts.
        where: names reward and prompt in errors.

    Raises RewardError for any other type and for a total or part that is not finite.
    """
    if isinstance(value, RewardResult):
        total, parts = value.total, value.parts
    elif isinstance(value, Mapping):
        if "total" not in value:
            raise RewardError(f"{where} returned a dict without 'total'; it has {sorted(map(str, value))}")
        total, parts = value["total"], {str(key): part for key, part in value.items() if key != "total"}
    else:
        total, parts = value, {}
    checked_parts = {name: _finite(part, f"{where}, part {name!r},") for name, part in parts.items()}
    return RewardResult(total=_finite(total, where), parts=checked_parts)


def _finite(value: Any, where: str) -> float:
    try:
        number = float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise RewardError(f"{where} returned {type(value).__name__} {value!r}, not a number")
    if not math.isfinite(number):
        raise RewardError(f"{where} returned {number}, which is not finite")
    return number
