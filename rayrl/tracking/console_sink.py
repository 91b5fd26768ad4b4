"""Progress for people: a live bar on a terminal, plain lines everywhere else."""

import logging
import sys
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

COLUMNS: dict[str, tuple[str, str]] = {
    "reward": ("reward/mean", "{:.3f}"),
    "accuracy": ("eval/accuracy", "{:.3f}"),
    "loss": ("loss/total", "{:.4f}"),
    "staleness": ("staleness/age_mean", "{:.2f}"),
    "samples/s": ("throughput/samples_per_s", "{:.1f}"),
    "tokens/s": ("throughput/tokens_per_s", "{:.0f}"),
}
"""What is shown, in this order, where the run has it: label, name of the metric, format."""

_MIN_INTERVAL_S = 1.0


class ConsoleSink:
    """Shows step x of N, the metrics of `COLUMNS` and the time left.

    On a terminal one live line; else one plain line per step. Plain lines come at most about once per second, except
    for evaluations. The line of the last step is held back until its evaluation or `close`, so that it comes once.
    Values of metrics that a step lacks are those of the last step that had them; of evaluations with that step.
    """

    def __init__(
        self, num_steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._console = console if console is not None else Console(file=sys.stdout)
        self._clock = clock
        self._values: dict[str, float] = {}
        self._evaluated: int | None = None
        self._first: tuple[int, float] | None = None
        self._last_print: float | None = None
        self._held_back: str | None = None
        self._live = _LiveBar(self._console, num_steps) if self._console.is_terminal else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        self._values.update(metrics)
        if any(name.startswith("eval/") for name in metrics):
            self._evaluated = step
        text = self._summary(step, now)
        if self._live is not None:
            self._live.update(step, text)
            return
        line = f"step {step}/{self._num_steps}  {text}".rstrip()
        is_evaluation = any(name.startswith("eval/") for name in metrics)
        is_due = self._last_print is None or now - self._last_print >= _MIN_INTERVAL_S
        if is_evaluation or (is_due and step < self._num_steps):
            self._last_print, self._held_back = now, None
            self._print(line)
        else:
            self._held_back = line

    def message(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        if self._held_back is not None:
            line, self._held_back = self._held_back, None
            self._print(line)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _summary(self, step: int, now: float) -> str:
        old = "" if self._evaluated == step else f" (step {self._evaluated})"
        parts = [
            f"{label} {form.format(self._values[name])}{old if name.startswith('eval/') else ''}"
            for label, (name, form) in COLUMNS.items()
            if name in self._values
        ]
        assert self._first is not None, "set by log"
        first_step, since = self._first
        if first_step < step < self._num_steps:
            parts.append(f"eta {format_duration((now - since) / (step - first_step) * (self._num_steps - step))}")
        return "  ".join(parts)


class _LiveBar:
    """The live line, and the log lines of this process above it instead of through it."""

    def __init__(self, console: Console, num_steps: int) -> None:
        before = sys.stderr
        self._progress = Progress(
            TextColumn("train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}", markup=False),
            console=console,
            refresh_per_second=4,
            # A redirected stderr is a file that someone wants to keep whole.
            redirect_stderr=before.isatty(),
        )
        self._task = self._progress.add_task("train", total=num_steps, summary="")
        self._progress.start()
        self._moved = [
            handler
            for handler in logging.getLogger("rayrl").handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is before
        ]
        self._before = before
        for handler in self._moved:
            handler.setStream(sys.stderr)

    def update(self, step: int, summary: str) -> None:
        self._progress.update(self._task, completed=step, summary=summary)

    def stop(self) -> None:
        self._progress.stop()
        for handler in self._moved:
            handler.setStream(self._before)
        self._moved = []


def format_duration(seconds: float) -> str:
    """Return `12s`, `3m20s` or `1h02m`."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"
