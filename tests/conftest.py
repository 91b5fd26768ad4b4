"""What all tests share: one local Ray cluster per session, few threads, and a table of what was skipped."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Set before torch, ray and tokenizers are first imported: they read these once, and workers inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A cluster or a token of the developer's shell must not leak into the tests.
os.environ.pop("RAY_ADDRESS", None)

_TORCH_THREADS = 1
_MAX_DESELECTED_ROWS = 60


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hold torch to one thread, if some collected test has imported it."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(_TORCH_THREADS)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with eight logical CPUs, shared by the whole session.

    A test that joins it must remove its own actors and placement groups; a test that needs a cluster of another
    shape starts that in a subprocess.
    """
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose step takes a fraction of a second; for `small_run`."""
    from small_runs import make_small_model

    return make_small_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]


def _reason(report: Any) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ").splitlines()[0] if text else "no reason given"


def _name(report: Any) -> str:
    return report.nodeid or str(report.fspath)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every test that was skipped, deselected or expected to fail with its reason, or that there was none."""
    stats = terminalreporter.stats
    rows = [("skipped", _name(report), _reason(report)) for report in stats.get("skipped", [])]
    rows += [("xfail", _name(report), report.wasxfail or "no reason given") for report in stats.get("xfailed", [])]
    deselected = stats.get("deselected", [])
    chosen = terminalreporter.config.getoption("markexpr") or terminalreporter.config.getoption("keyword") or "plugin"
    if len(deselected) <= _MAX_DESELECTED_ROWS:
        rows += [("deselected", item.nodeid, f"by {chosen!r}") for item in deselected]
    terminalreporter.section("tests that did not run")
    if not rows:
        terminalreporter.line("no test was skipped")
    width = max((len(name) for _, name, _ in rows), default=0)
    for outcome, name, reason in sorted(rows):
        terminalreporter.line(f"{outcome:<10} {name:<{width}}  {reason}")
    if len(deselected) > _MAX_DESELECTED_ROWS:
        terminalreporter.line(f"and {len(deselected)} tests were deselected by {chosen!r}")
