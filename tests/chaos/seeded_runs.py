"""A run whose processes die at random moments, continued until it has all its steps; then its records are audited."""

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from driver_runs import DriverProcess, check_audit, ledger_position, outcomes

from rayrl import RunConfig
from rayrl.cli.exit_code import ExitCode

LONGEST_PAUSE = 7
"""Transactions of the ledger between two ends, at most."""
KillNode = Callable[[int], bool]
"""Kills the node of a process and gives the cluster another one; False if that node is gone already."""


def run_through(
    config: RunConfig,
    address: str,
    rng: random.Random,
    fates: Sequence[str],
    most_ends: int,
    kill_node: KillNode | None = None,
) -> list[str]:
    """Run a config to its end; return what befell it, in order.

    Args:
        config: the run; a group is four prompts.
        address: of the cluster that it runs on.
        rng: chooses moments and fates.
        fates: what may happen, each as often as it is listed: `driver` (killed), `signal` (the driver is asked to
            leave), `raylet` (the node of an engine is lost), or a role, one of whose actors is killed.
        most_ends: ends of anything before the run is left alone.
        kill_node: for the fate `raylet`.
    """
    befell: list[str] = []
    before = 0
    while True:
        before = max(before, ledger_position(config.run_dir))
        driver = DriverProcess(config, address)
        try:
            while len(befell) < most_ends and driver.process.poll() is None:
                before += rng.randint(1, LONGEST_PAUSE)
                if not driver.reaches(lambda target=before: ledger_position(config.run_dir) >= target):
                    break
                fate = rng.choice(fates)
                if _strike(driver, rng, fate, kill_node):
                    befell.append(fate)
            code = driver.wait()
        finally:
            driver.close()
        assert code in (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED, -signal.SIGKILL), driver.output
        if code == ExitCode.DONE:
            break
    trained = [item.outcome.prompt_id for item in outcomes(config.run_dir) if item.outcome.outcome == "trained"]
    assert len(trained) == len(set(trained)) == config.driver.groups_per_step * config.driver.num_steps
    check_audit(config.run_dir)
    return befell


def _strike(driver: DriverProcess, rng: random.Random, fate: str, kill_node: KillNode | None) -> bool:
    """Let a fate happen; False if nobody is left whom it could meet."""
    if fate == "driver":
        driver.process.kill()
        return True
    if fate == "signal":
        driver.process.send_signal(signal.SIGTERM)
        return True
    role = "inference" if fate == "raylet" else fate
    alive = [pid for name, pid in driver.members().items() if name.startswith(role) and Path(f"/proc/{pid}").exists()]
    if not alive:
        return False
    pid = rng.choice(alive)
    if fate == "raylet":
        assert kill_node is not None, "only on a cluster of several nodes"
        return kill_node(pid)
    os.kill(pid, signal.SIGKILL)
    return True
