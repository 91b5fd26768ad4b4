"""The failure policy: every cause, every side of every limit."""

import itertools

import pytest

from rayrl.driver.failure_policy import (
    Decision,
    FaultCause,
    Health,
    Heartbeat,
    RestartHistory,
    RestartLimits,
    Ruling,
    backoff,
    blame,
    decide,
    judge_health,
)

LIMITS = RestartLimits(restarts=3, window_s=100.0, backoff_s=1.0, max_backoff_s=5.0, min_members=1)


def ruling(
    cause: FaultCause = FaultCause.DIED, *, num_live: int = 1, times: tuple[float, ...] = (), now: float = 50.0
) -> Ruling:
    history = RestartHistory(times=times)
    return decide(cause, role="inference", num_live=num_live, history=history, limits=LIMITS, now=now)


@pytest.mark.parametrize(("cause", "num_live", "used"), list(itertools.product(FaultCause, (0, 1, 2), range(6))))
def test_decision_follows_from_budget_and_number_left_for_every_cause(
    cause: FaultCause, num_live: int, used: int
) -> None:
    result = ruling(cause, num_live=num_live, times=tuple(float(time) for time in range(used)))
    if used < LIMITS.restarts:
        expected = Decision.REPLACE
    else:
        expected = Decision.GO_ON_WITHOUT if num_live >= 1 else Decision.STOP_RUN
    assert result.decision is expected
    assert cause.value in result.reason
    assert f"{used} of supervision.restarts=3" in result.reason


def test_pause_is_nothing_first_then_doubles_up_to_its_cap() -> None:
    assert [backoff(used, LIMITS) for used in (0, 1, 2, 3, 4, 5, 5000)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert ruling(times=(48.0, 49.0)).pause_s == 2.0


def test_restart_that_left_the_window_no_longer_counts() -> None:
    assert ruling(num_live=0, times=(0.0, 1.0, 2.0), now=99.9).decision is Decision.STOP_RUN
    assert ruling(num_live=0, times=(0.0, 1.0, 2.0), now=100.0).decision is Decision.REPLACE


def test_history_forgets_what_left_the_window() -> None:
    history = RestartHistory(times=(0.0, 60.0)).add(101.0, window_s=100.0)
    assert history.times == (60.0, 101.0)


def test_budget_of_nothing_never_replaces() -> None:
    limits = RestartLimits(restarts=0, window_s=100.0, backoff_s=1.0, max_backoff_s=5.0, min_members=2)
    for num_live, expected in ((1, Decision.STOP_RUN), (2, Decision.GO_ON_WITHOUT)):
        result = decide(
            FaultCause.SILENT, role="inference", num_live=num_live, history=RestartHistory(), limits=limits, now=0.0
        )
        assert result.decision is expected


def test_answering_member_without_work_is_never_at_fault() -> None:
    health = Health(answered_at=0.0, moved_at=0.0)
    for now in (10.0, 1000.0, 5000.0):
        health = health.after(Heartbeat(answered=True), now)
        assert judge_health(health, now=now, silence_s=60.0, stall_s=600.0) is None


@pytest.mark.parametrize(("silent_s", "expected"), [(60.0, None), (60.1, FaultCause.SILENT)])
def test_member_is_silent_only_beyond_the_limit(silent_s: float, expected: FaultCause | None) -> None:
    health = Health(answered_at=5.0, moved_at=5.0).after(Heartbeat(answered=False), 30.0)
    fault = judge_health(health, now=5.0 + silent_s, silence_s=60.0, stall_s=600.0)
    assert (None if fault is None else fault[0]) is expected


@pytest.mark.parametrize(("stalled_s", "expected"), [(600.0, None), (600.1, FaultCause.STALLED)])
def test_member_with_work_stalls_only_beyond_the_limit(stalled_s: float, expected: FaultCause | None) -> None:
    working = Heartbeat(answered=True, has_work=True, progress=7)
    health = Health(answered_at=0.0, moved_at=0.0).after(working, 1.0).after(working, 1.0 + stalled_s)
    fault = judge_health(health, now=1.0 + stalled_s, silence_s=60.0, stall_s=600.0)
    assert (None if fault is None else fault[0]) is expected


def test_progress_ends_a_stall() -> None:
    health = Health(answered_at=0.0, moved_at=0.0)
    for now in range(0, 3000, 500):
        health = health.after(Heartbeat(answered=True, has_work=True, progress=now + 1), float(now))
    assert judge_health(health, now=2500.0, silence_s=60.0, stall_s=600.0) is None


def test_reported_failure_comes_before_silence() -> None:
    health = Health(answered_at=0.0, moved_at=0.0).after(Heartbeat(answered=True, failure="out of memory"), 1.0)
    assert judge_health(health, now=900.0, silence_s=60.0, stall_s=600.0) == (FaultCause.FAILED, "out of memory")


@pytest.mark.parametrize(
    ("deaths", "refusals", "silent", "expected"),
    [
        (["a"], ["b"], ["c"], ("a", "b")),
        (["a"], [], ["c"], ("a",)),
        ([], ["b"], ["c"], ("b",)),
        ([], [], ["c", "d"], ("c", "d")),
        (["a"], ["a"], [], ("a",)),
        ([], [], [], ()),
    ],
)
def test_publication_is_laid_to_first_hand_causes_before_silence(
    deaths: list[str], refusals: list[str], silent: list[str], expected: tuple[str, ...]
) -> None:
    assert blame(deaths, refusals, silent) == expected
