"""Sinks and the fan-out: nothing is lost, nothing ends the run."""

import io
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from rayrl.config.tracking import TrackingConfig
from rayrl.tracking.console_sink import ConsoleSink, format_duration
from rayrl.tracking.curve import sparkline
from rayrl.tracking.jsonl_sink import JsonlSink, read_rows, read_series
from rayrl.tracking.metrics import Tracker
from rayrl.tracking.registry import SINKS, make_tracker
from rayrl.tracking.run_folder import RunFolder


class RecordingSink:
    def __init__(self, fail_on: str = "") -> None:
        self.fail_on = fail_on
        self.calls: list[str] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(f"log {step} {dict(metrics)}")

    def message(self, text: str) -> None:
        self._call(f"message {text}")

    def close(self) -> None:
        self._call("close")

    def _call(self, call: str) -> None:
        self.calls.append(call)
        if self.fail_on and call.startswith(self.fail_on):
            raise OSError("no space left")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def warnings_of(component: str) -> Iterator[list[str]]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(level=logging.WARNING)
    logger = logging.getLogger(f"rayrl.{component}")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def plain_console() -> tuple[ConsoleSink, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return ConsoleSink(20, Console(file=out, force_terminal=False), clock), out, clock


def test_every_sink_gets_every_call() -> None:
    sinks = [RecordingSink(), RecordingSink()]
    tracker = Tracker(sinks)

    tracker.log(1, {"a": 2.0})
    tracker.message("hello")
    tracker.close()

    assert sinks[0].calls == sinks[1].calls == ["log 1 {'a': 2.0}", "message hello", "close"]


def test_failing_sink_is_off_after_one_warning_and_the_others_go_on() -> None:
    bad, good = RecordingSink(fail_on="log"), RecordingSink()
    tracker = Tracker([bad, good])

    with warnings_of("tracking") as warnings:
        tracker.log(1, {})
        tracker.log(2, {})
        tracker.close()

    assert bad.calls == ["log 1 {}", "close"]
    assert good.calls == ["log 1 {}", "log 2 {}", "close"]
    assert warnings == ["RecordingSink failed and is off for the rest of the run: OSError: no space left"]


def test_close_never_raises_and_closes_once() -> None:
    sink = RecordingSink(fail_on="close")
    tracker = Tracker([sink])

    with warnings_of("tracking"):
        tracker.close()
    tracker.close()

    assert sink.calls == ["close", "close"]


def test_interrupt_is_not_taken_for_a_failing_sink() -> None:
    class Interrupted(RecordingSink):
        def message(self, text: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tracker([Interrupted()]).message("x")


def test_jsonl_rows_are_strict_json_with_nonfinite_numbers_as_strings(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl", clock=lambda: 5.25)
    sink.log(3, {"a": 0.5, "n": 7, "nan": math.nan, "up": math.inf, "down": -math.inf})
    sink.message("a line")
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "m.jsonl").read_text().splitlines()]

    assert rows == [
        {"step": 3, "time": 5.25, "a": 0.5, "n": 7, "nan": "NaN", "up": "Infinity", "down": "-Infinity"},
        {"time": 5.25, "message": "a line"},
    ]
    assert math.isnan(read_series(tmp_path / "m.jsonl", "nan")[0][1])


def test_jsonl_row_is_on_disk_before_close(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")

    sink.log(1, {"a": 1.0})

    assert len(list(read_rows(tmp_path / "m.jsonl"))) == 1
    sink.close()


@pytest.mark.parametrize("torn", ["", '{"step": 3, "ti', '{"step": 3' + "x" * 200_000])
def test_jsonl_goes_on_after_a_line_that_a_killed_process_left_unfinished(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n' + torn)

    sink = JsonlSink(path)
    sink.log(3, {"a": 3.0})
    sink.close()

    assert read_series(path, "a") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_series_takes_the_last_value_of_a_step_and_forgets_steps_undone_by_a_resume(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (2, 20.0), (3, 30.0)):
        sink.log(step, {"a": value})
    sink.close()

    assert read_series(tmp_path / "m.jsonl", "a") == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_plain_console_shows_step_metrics_and_time_left() -> None:
    sink, out, clock = plain_console()

    sink.log(1, {"reward/mean": 0.25, "throughput/tokens_per_s": 1520.4, "internal/thing": 1.0})
    clock.now = 10.0
    sink.log(2, {"reward/mean": 0.5, "eval/accuracy": 0.75, "staleness/age_mean": 1.5})

    assert out.getvalue().splitlines() == [
        "step 1/20  reward 0.250  tokens/s 1520",
        "step 2/20  reward 0.500  accuracy 0.750  staleness 1.50  tokens/s 1520  eta 3m00s",
    ]


def test_plain_console_says_of_which_step_an_older_evaluation_is() -> None:
    sink, out, clock = plain_console()

    sink.log(0, {"eval/accuracy": 0.25})
    clock.now = 10.0
    sink.log(1, {"reward/mean": 0.5})

    assert out.getvalue().splitlines() == [
        "step 0/20  accuracy 0.250",
        "step 1/20  reward 0.500  accuracy 0.250 (step 0)  eta 3m10s",
    ]


def test_plain_console_prints_at_most_one_line_per_second_but_evaluations_and_the_last_step() -> None:
    sink, out, clock = plain_console()

    for step in range(1, 21):
        clock.now += 0.3
        sink.log(step, {"eval/accuracy": 0.5} if step == 3 else {"reward/mean": 0.5})
    sink.close()

    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps == [1, 3, 7, 11, 15, 19, 20]


def test_plain_console_shows_a_held_back_line_when_the_run_stops_early() -> None:
    sink, out, clock = plain_console()

    sink.log(1, {})
    clock.now = 0.1
    sink.log(2, {})
    sink.close()

    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/20", "step 2/20"]


def test_plain_console_shows_the_last_step_once_with_the_evaluation_that_follows_it() -> None:
    sink, out, clock = plain_console()

    clock.now = 5.0
    sink.log(20, {"reward/mean": 0.5})
    clock.now = 9.0
    sink.log(20, {"eval/accuracy": 0.75})
    sink.close()

    assert out.getvalue().splitlines() == ["step 20/20  reward 0.500  accuracy 0.750"]


def test_plain_console_takes_text_literally() -> None:
    sink, out, _ = plain_console()

    sink.message("[red]not markup[/red] " + "x" * 200)

    assert out.getvalue() == "[red]not markup[/red] " + "x" * 200 + "\n"


def test_live_console_shows_the_bar_and_gives_the_terminal_back() -> None:
    out = io.StringIO()
    sink = ConsoleSink(20, Console(file=out, force_terminal=True, width=120), Clock())

    sink.log(5, {"reward/mean": 0.5})
    sink.message("above the bar")
    sink.close()

    text = out.getvalue()
    assert "5/20" in text and "reward 0.500" in text and "above the bar" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0s"), (59.6, "1m00s"), (200, "3m20s"), (3725, "1h02m")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_tracker_of_the_config_writes_to_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder.create(tmp_path / "one", "a: 1\n", "d", ["x"], resume=False) as folder:
        tracker = make_tracker(TrackingConfig(sinks=("console", "jsonl", "jsonl")), folder, num_steps=2)
        tracker.log(2, {"reward/mean": 1.0})
        tracker.close()

        assert read_series(folder.metrics_path, "reward/mean") == [(2, 1.0)]
        assert len(list(read_rows(folder.metrics_path))) == 1, "a sink named twice is opened once"
    assert "step 2/2  reward 1.000" in capsys.readouterr().out


def test_sink_that_cannot_be_opened_is_left_out_with_a_warning(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "one", "a: 1\n", "d", ["x"], resume=False) as folder:
        folder.metrics_path.mkdir()

        with warnings_of("tracking") as warnings:
            make_tracker(TrackingConfig(sinks=("jsonl",)), folder, num_steps=2).log(1, {})

    assert len(warnings) == 1 and "cannot open sink jsonl" in warnings[0]


def test_registry_has_every_sink_that_the_config_allows() -> None:
    literal = TrackingConfig.model_json_schema()["properties"]["sinks"]["items"]["enum"]

    assert sorted(SINKS) == sorted(literal)


def test_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_sparkline_averages_when_there_are_more_values_than_columns() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"


def test_sparkline_leaves_a_blank_where_no_value_is_finite() -> None:
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([math.inf]) == " "
