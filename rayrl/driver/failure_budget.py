"""Budgets for things that may go wrong a few times in a row."""

from rayrl.errors import BudgetExhausted


class FailureBudget:
    """Counts failures in a row; a success sets it back. Raises when one more than `limit` come together."""

    def __init__(self, *, what: str, limit: int, setting: str) -> None:
        self._what = what
        self._limit = limit
        self._setting = setting
        self._in_a_row = 0
        self._total = 0

    @property
    def total(self) -> int:
        """Failures since the start."""
        return self._total

    def succeed(self) -> None:
        """Note a success."""
        self._in_a_row = 0

    def fail(self, reason: str) -> None:
        """Note a failure. BudgetExhausted, with the last reason and the setting, if it was one too many."""
        self._in_a_row += 1
        self._total += 1
        if self._in_a_row > self._limit:
            raise BudgetExhausted(
                f"{self._in_a_row} {self._what} in a row, {self._setting} allows {self._limit}; the last one: {reason}"
            )
