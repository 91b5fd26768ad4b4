"""Routing by load and session."""

from rayrl.rollout.router import Router


def test_session_returns_to_its_engine_when_the_load_is_balanced() -> None:
    router = Router(["a", "b"])
    home = router.acquire("s")
    router.acquire()
    assert router.acquire("s") == home


def test_session_moves_when_its_engine_is_far_more_loaded() -> None:
    router = Router(["a", "b"], max_imbalance=2)
    home = router.acquire("s")
    other = "b" if home == "a" else "a"
    assert router.acquire("s") == home
    assert router.acquire("s") == other


def test_avoided_engines_are_not_chosen() -> None:
    router = Router(["a", "b"])
    assert router.acquire(avoid=frozenset({"a"})) == "b"
    assert router.acquire(avoid=frozenset({"a", "b"})) is None


def test_removed_engine_gets_nothing_and_its_release_is_ignored() -> None:
    router = Router(["a", "b"])
    router.acquire(avoid=frozenset({"b"}))
    router.remove("a")
    router.release("a")
    assert router.acquire() == "b"
    assert router.load == {"b": 1}


def test_sessions_are_forgotten_oldest_first_when_there_are_too_many() -> None:
    router = Router(["a", "b"], max_sessions=1)
    router.acquire("old", avoid=frozenset({"b"}))
    router.acquire("new", avoid=frozenset({"a"}))
    router.acquire(avoid=frozenset({"b"}))
    assert router.acquire("old") == "b"
