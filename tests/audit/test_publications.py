"""Who must have acknowledged a version: engines come, go and are replaced while a run goes on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayrl.audit.publications import check_publications
from rayrl.audit.run_record import RunRecord
from rayrl.checkpoint.ledger import Ledger, PublishedVersion
from rayrl.checkpoint.ledger_events import ENGINE_LOST, ENGINE_REMOVED, RUN_STARTED
from rayrl.checkpoint.ledger_reader import read_ledger


def violations(tmp_path: Path, write: Callable[[Ledger], None]) -> tuple[str, ...]:
    """Return what is found in a ledger that `write` fills."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.record_event(RUN_STARTED, 0, {})
    write(ledger)
    ledger.close()
    unused: Any = None
    run = RunRecord(
        path=tmp_path,
        config=unused,
        ledger=read_ledger(tmp_path / "ledger.sqlite"),
        rollouts={},
        checkpoints={},
        unreadable={},
    )
    return check_publications(run).violations


def publish(
    ledger: Ledger, version: int, digest: str, engines: Sequence[str], missing: Sequence[str] = (), **other: str
) -> None:
    """Record that `digest` was sent and arrived at `engines`; at those in `other` something else did."""
    arrived = {**dict.fromkeys(engines, digest), **other}
    ledger.record_publication(
        PublishedVersion(version=version, sent=digest, acknowledged=arrived, missing=missing), step=version
    )


def test_engine_that_was_lost_owes_nothing_from_then_on(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        publish(ledger, 0, "d0", ["e0", "e1"])
        ledger.record_event(ENGINE_LOST, 0, {"engine": "e1", "cause": "DIED"})
        publish(ledger, 1, "d1", ["e0"])
        publish(ledger, 2, "d2", ["e0"])

    assert violations(tmp_path, write) == ()


def test_engine_that_failed_in_a_publication_and_is_told_of_right_after_is_explained(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        publish(ledger, 0, "d0", ["e0", "e1"])
        publish(ledger, 1, "d1", ["e0"], missing=["e1"])
        ledger.record_event(ENGINE_REMOVED, 1, {"engine": "e1", "reason": "quarantined"})

    assert violations(tmp_path, write) == ()


def test_newcomer_gets_the_version_in_use_and_owes_the_next_ones(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        publish(ledger, 0, "d0", ["e0"])
        publish(ledger, 0, "d0", ["e2"])
        publish(ledger, 1, "d1", ["e0"])

    (found,) = violations(tmp_path, write)
    assert found == "version 1 was not acknowledged by e2, and no event says that this engine left"


def test_push_to_a_newcomer_with_another_digest_is_named(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        publish(ledger, 0, "d0", ["e0"])
        publish(ledger, 0, "x0", ["e2"])

    (found,) = violations(tmp_path, write)
    assert found == "version 0 has two digests in two publications: d0, x0"


def test_engine_that_received_something_else_is_named_with_both_digests(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        publish(ledger, 0, "d0", ["e0"], e1="x0")

    (found,) = violations(tmp_path, write)
    assert found == "version 0 arrived with 2 digests: sent d0; e1 acknowledged x0"


def test_only_engine_is_compared_with_what_was_sent(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        publish(ledger, 0, "d0", [], e0="x0")

    (found,) = violations(tmp_path, write)
    assert found == "version 0 arrived with 2 digests: sent d0; e0 acknowledged x0"


@pytest.mark.parametrize("digest", ["d0", "cut into other buckets"])
def test_next_process_starts_with_the_engines_that_it_has(tmp_path: Path, digest: str) -> None:
    def write(ledger: Ledger) -> None:
        publish(ledger, 0, "d0", ["e0", "e1"])
        ledger.rewind_to(0, min_position=0)
        ledger.record_event(RUN_STARTED, 0, {})
        publish(ledger, 0, digest, ["e0"])
        publish(ledger, 1, "d1", ["e0"])

    assert violations(tmp_path, write) == ()
