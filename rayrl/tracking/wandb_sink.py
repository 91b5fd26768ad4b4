"""Weights & Biases: the only home of `wandb`, which is imported when the sink is opened."""

import netrc
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import yaml

from rayrl.config.tracking import WandbConfig
from rayrl.errors import ConfigError
from rayrl.tracking.run_folder import RunFolder


def check_installed() -> None:
    """Raise ConfigError if the package is missing; imports nothing."""
    if find_spec("wandb") is None:
        raise ConfigError(
            "tracking.sinks has 'wandb', which is not installed; run `pip install 'rayrl[wandb]'` "
            "or take it out of tracking.sinks"
        )


class WandbSink:
    """One run of W&B, with the id of the run folder, so that a resumed run continues its curves; files in the folder.

    Steps are the metric `step`, not W&B's own counter, which refuses steps that are done again after a resume.
    """

    def __init__(self, folder: RunFolder, config: WandbConfig) -> None:
        check_installed()
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            id=folder.run_id,
            name=folder.path.name,
            dir=str(folder.path),
            mode=resolve_mode(config.mode, wandb.Settings().base_url),
            resume="allow",
            # A run that the caller's own script has open stays the caller's.
            reinit="create_new",
            config=yaml.safe_load(folder.saved_config()),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def message(self, text: str) -> None:
        """Nothing: lines for people are in the console and in `metrics.jsonl`."""

    def close(self) -> None:
        self._run.finish()
        # Ends the service process; it would also end a run that the caller's own script has open.
        if self._wandb.run is None:
            self._wandb.teardown()


def resolve_mode(mode: Literal["auto", "online", "offline"], base_url: str) -> Literal["online", "offline"]:
    """Return the mode to use: `auto` is online if there is a key in WANDB_API_KEY or in the netrc file for the host."""
    if mode != "auto":
        return mode
    hosts = {urlparse(base_url).hostname or base_url, "api.wandb.ai"}
    return "online" if os.environ.get("WANDB_API_KEY") or _in_netrc(hosts) else "offline"


def _in_netrc(hosts: set[str]) -> bool:
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        entries = netrc.netrc(str(path))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(entries.authenticators(host) is not None for host in hosts)
