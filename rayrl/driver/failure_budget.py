"""Budgets for things that may go wrong a few times in a row, and not too often in all."""

from rayrl.errors import BudgetExhausted


class FailureBudget:
    """Counts failures in a row and in all; a success ends the row.

    Raises when one more than `limit` come together, or when more than `limit` in all are above `share` of all tries.
    """

    def __init__(self, *, what: str, limit: int, setting: str, share: float = 1.0, advice: str = "") -> None:
        """`advice` ends each error."""
        self._advice = advice
        self._what = what
        self._limit = limit
        self._setting = setting
        self._share = share
        self._in_a_row = 0
        self._total = 0
        self._tries = 0

    @property
    def total(self) -> int:
        """Failures since the start."""
        return self._total

    def succeed(self) -> None:
        """Note a success."""
        self._tries += 1
        self._in_a_row = 0

    def fail(self, reason: str) -> None:
        """Note a failure. BudgetExhausted, with the last reason and the setting, if it was one too many."""
        self._tries += 1
        self._in_a_row += 1
        self._total += 1
        if self._in_a_row > self._limit:
            raise BudgetExhausted(
                f"{self._in_a_row} {self._what} in a row, {self._setting} allows {self._limit}; the last one: {reason}"
                f"{self._advice}"
            )
        if self._total > self._limit:
            self._check_share(f"the last one: {reason}")

    def finish(self) -> None:
        """At the end: BudgetExhausted if the share is exceeded, however few the failures are."""
        self._check_share("what the run left is not the result of training")

    def _check_share(self, end: str) -> None:
        if self._total > self._share * self._tries:
            raise BudgetExhausted(
                f"{self._total} of {self._tries} tries were {self._what}, more than "
                f"driver.max_failure_share={self._share:g}; {end}{self._advice}"
            )
