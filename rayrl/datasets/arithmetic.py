"""Sums such as `3+4+5=`, for very small models."""

import hashlib

from rayrl.config.dataset import ArithmeticDataset
from rayrl.datasets.source import PromptRow
from rayrl.errors import DatasetError

REJECTED = "rejected"
"""Field of a row with an answer that is worse than its `answer`."""
_MAX_PROBLEMS = 2_000_000


class ArithmeticSource:
    """All ordered sums of `num_operands` numbers from 0 to `max_operand` that belong to the split.

    Which split a problem belongs to is a hash of the problem alone: it depends on no seed and not on the other
    settings, so that no run trains on what another holds out. `size` keeps the problems with the smallest hashes,
    an even sample over the operands.

    Raises DatasetError if the split has no problem, or if there are too many to list.
    """

    def __init__(self, config: ArithmeticDataset) -> None:
        self.name = config.name or f"arithmetic_{config.split}"
        base = config.max_operand + 1
        num_problems = base**config.num_operands
        if num_problems > _MAX_PROBLEMS:
            raise DatasetError(
                f"{num_problems:,} sums of {config.num_operands} numbers up to {config.max_operand} are more than "
                f"{_MAX_PROBLEMS:,}; lower dataset.num_operands or dataset.max_operand"
            )
        hashed = ((_fraction(code, base, config.num_operands), code) for code in range(num_problems))
        held_out = config.split == "held_out"
        members = [(value, code) for value, code in hashed if (value < config.held_out_fraction) == held_out]
        if config.size is not None:
            members = sorted(members)[: config.size]
        if not members:
            raise DatasetError(
                f"none of the {num_problems} sums belongs to split {config.split!r}; change "
                f"dataset.held_out_fraction ({config.held_out_fraction}) or dataset.max_operand ({config.max_operand})"
            )
        self._codes = sorted(code for _, code in members)
        self._base = base
        self._num_operands = config.num_operands
        self._with_rejected = config.with_rejected

    def __len__(self) -> int:
        return len(self._codes)

    def row(self, index: int) -> PromptRow:
        operands = _operands(self._codes[index], self._base, self._num_operands)
        metadata = {REJECTED: str(_wrong_sum(operands))} if self._with_rejected else {}
        return PromptRow(text=_problem(operands), answer=str(sum(operands)), metadata=metadata)


def _wrong_sum(operands: list[int]) -> int:
    """Return a number from 0 on that differs from the sum by 1 to 5; the same for the same problem."""
    digest = hashlib.blake2b(_problem(operands).encode(), digest_size=2, person=b"rejected").digest()
    distance, total = 1 + digest[0] % 5, sum(operands)
    return total - distance if digest[1] % 2 and total >= distance else total + distance


def _operands(code: int, base: int, num_operands: int) -> list[int]:
    """Return the digits of `code` in `base`, the first operand as the most significant."""
    operands: list[int] = []
    for _ in range(num_operands):
        code, digit = divmod(code, base)
        operands.append(digit)
    return operands[::-1]


def _problem(operands: list[int]) -> str:
    return "+".join(map(str, operands)) + "="


def _fraction(code: int, base: int, num_operands: int) -> float:
    """Return a number in [0, 1) that depends on the text of the problem only."""
    digest = hashlib.blake2b(_problem(_operands(code, base, num_operands)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
