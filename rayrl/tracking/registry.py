"""From the names in `tracking.sinks` to sinks."""

from collections.abc import Callable

from rayrl.config.tracking import TrackingConfig
from rayrl.errors import ConfigError
from rayrl.tracking.console_sink import ConsoleSink
from rayrl.tracking.jsonl_sink import JsonlSink
from rayrl.tracking.metrics import Sink, Tracker
from rayrl.tracking.run_folder import RunFolder
from rayrl.tracking.wandb_sink import WandbSink, check_installed
from rayrl.utils.logger import get_logger

_logger = get_logger("tracking")

SINKS: dict[str, Callable[[TrackingConfig, RunFolder, int], Sink]] = {
    "console": lambda config, folder, num_steps: ConsoleSink(num_steps),
    "jsonl": lambda config, folder, num_steps: JsonlSink(folder.metrics_path),
    "wandb": lambda config, folder, num_steps: WandbSink(folder, config.wandb),
}


def check_sinks(config: TrackingConfig) -> None:
    """Raise ConfigError if a sink needs a package that is missing; to be called before anything is started."""
    if "wandb" in config.sinks:
        check_installed()


def make_tracker(config: TrackingConfig, folder: RunFolder, num_steps: int) -> Tracker:
    """Open all sinks of the config. One that cannot be opened is left out with a warning.

    Raises ConfigError if one needs a package that is missing.
    """
    check_sinks(config)
    sinks: list[Sink] = []
    for name in dict.fromkeys(config.sinks):
        try:
            sinks.append(SINKS[name](config, folder, num_steps))
        except ConfigError:
            Tracker(sinks).close()
            raise
        except Exception as error:  # noqa: BLE001 - boundary `tracking`: a failing sink never ends a run
            _logger.warning("cannot open sink %s, it is off for this run: %s: %s", name, type(error).__name__, error)
    return Tracker(sinks)
