"""The project's logger: every line carries component and rank."""

import logging
import sys
from typing import Any

_FORMAT = "%(asctime)s %(levelname).1s [%(component)s%(rank)s] %(message)s"
_ROOT = "rayrl"


class _ContextFilter(logging.Filter):
    """Fills in component and rank where a record has none, so that the format never fails."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "component"):
            record.component = record.name.removeprefix(f"{_ROOT}.")
        if not hasattr(record, "rank"):
            record.rank = ""
        return True


class ComponentLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger bound to a component and, in a group of processes, to a rank."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs


def get_logger(component: str, rank: int | None = None) -> ComponentLogger:
    """Return the logger of a component, for example `get_logger("train", rank=0)`."""
    suffix = "" if rank is None else f":{rank}"
    return ComponentLogger(logging.getLogger(f"{_ROOT}.{component}"), {"component": component, "rank": suffix})


def setup_logging(level: str = "INFO") -> None:
    """Send the project's log lines to stderr once per process; calling again only changes the level.

    Of a stderr that was closed since, the present one takes the place.
    """
    root = logging.getLogger(_ROOT)
    root.setLevel(level)
    for handler in root.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream.closed:
            # `setStream` would flush the closed one.
            handler.stream = sys.stderr
    if root.handlers:
        return
    first = logging.StreamHandler(sys.stderr)
    first.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    first.addFilter(_ContextFilter())
    root.addHandler(first)
    root.propagate = False
