"""Which checkpoints are kept: the last, every so many steps, and the best of a metric."""

from pathlib import Path

import pytest

from rayrl.checkpoint.retention import Candidate, RetentionRule, best, to_remove
from rayrl.checkpoint.run_state import RunState
from rayrl.checkpoint.score import SCORE
from rayrl.checkpoint.store import CheckpointStore

METRIC = "eval/accuracy"


def candidates(*scores: float | None) -> list[Candidate]:
    """Return checkpoints of steps 10, 20, ... with these scores."""
    return [Candidate(serial=index, step=10 * index, score=score) for index, score in enumerate(scores, start=1)]


def kept(found: list[Candidate], rule: RetentionRule) -> list[int]:
    removed = to_remove(found, rule)
    return [item.step for item in found if item not in removed]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (RetentionRule(keep_last=1), [50]),
        (RetentionRule(keep_last=2), [40, 50]),
        (RetentionRule(keep_last=9), [10, 20, 30, 40, 50]),
        (RetentionRule(keep_last=1, keep_every=20), [20, 40, 50]),
        (RetentionRule(keep_last=1, metric=METRIC), [30, 50]),
        (RetentionRule(keep_last=1, metric=METRIC, mode="min"), [10, 50]),
        (RetentionRule(keep_last=1, keep_every=40, metric=METRIC), [30, 40, 50]),
    ],
)
def test_checkpoint_is_kept_when_one_part_of_the_rule_asks_for_it(rule: RetentionRule, expected: list[int]) -> None:
    assert kept(candidates(0.1, 0.9, 0.9, None, 0.3), rule) == expected


def test_newest_is_the_best_when_scores_are_equal_and_none_when_none_was_measured() -> None:
    winner = best(candidates(0.5, 0.5, 0.2), "max")
    assert winner is not None
    assert winner.step == 20
    assert best(candidates(None, None), "max") is None


def save(store: CheckpointStore, step: int) -> Path:
    return store.commit(
        store.begin(step),
        RunState(
            step=step,
            version=step,
            dataset_state={},
            buffered=0,
            ledger_position=step,
            consumed=0,
            config_digest="c",
            run_id="r",
        ),
    )


def names(root: Path) -> list[str]:
    return sorted(item.name for item in root.iterdir())


def test_best_checkpoint_stays_when_its_score_comes_before_or_after_it_is_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, rule=RetentionRule(keep_last=1, metric=METRIC))
    save(store, 1)
    store.record_score(1, 0.2)
    store.record_score(2, 0.8)
    save(store, 2)
    save(store, 3)
    store.record_score(3, 0.5)
    save(store, 4)

    assert names(tmp_path) == ["step_000002", "step_000004"]
    save(CheckpointStore(tmp_path, rule=RetentionRule(keep_last=1, metric=METRIC)), 5)
    assert names(tmp_path) == ["step_000002", "step_000005"], "another process reads the scores"


def test_score_is_not_given_to_a_checkpoint_of_the_same_version_number_from_before_a_rewind(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, rule=RetentionRule(keep_last=2, metric=METRIC))
    path = save(store, 3)
    store.forget_scores()
    store.record_score(3, 0.9)
    assert not (path / SCORE).exists()


def test_damaged_score_counts_as_none(tmp_path: Path) -> None:
    rule = RetentionRule(keep_last=1, metric=METRIC)
    store = CheckpointStore(tmp_path, rule=rule)
    first = save(store, 1)
    store.record_score(1, 0.9)
    (first / SCORE).write_text('{"metric": "eval/accur')
    save(store, 2)
    assert names(tmp_path) == ["step_000002"]
