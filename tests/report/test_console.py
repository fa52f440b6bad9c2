"""Tests of the console: the compact form, its widths, colours and units, and what the log keeps."""

import contextlib
import io
import re
from typing import Any

import pytest

from megatronish.launch.rank import _Copied
from megatronish.report.metrics import Console, Part, compact_parts, duration, full_line, with_prefix
from megatronish.train.hooks.log import Pace

VALUES: dict[str, Any] = {
    "step": 123456,
    "loss": 10.81234,
    "grad_norm": 12.3456,
    "learning_rate": 3.9e-4,
    "loss_scale": 1.0,
    "consumed_samples": 1,
    "tokens": 1,
    "step_seconds": 0.5,
    "data_seconds": 0.001,
    "tokens_per_second": 12345.6,
    "model_tflops_per_device": 412.3,
    "mfu": 0.4123,
    "peak_memory_bytes": 12.3 * 2**30,
    "global_batch_size": 512,
    "skipped_since_line": 0,
    "nan_since_line": 0,
    "seconds_left": 12 * 86400 + 3 * 3600,
}


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def written(console: Console, values: dict[str, Any], num_steps: int = 500_000) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        console.step(values, num_steps)
    return output.getvalue()


def test_the_compact_line_has_all_that_matters_on_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    line = written(Console(is_compact=True, has_colours=False), VALUES)
    assert line == (
        "step 123456/500000  loss 10.8123  grad 12.3   lr 3.9e-4  12.3k tok/s  MFU 41.2%  12.3GiB  ETA 12d03h\n"
    )
    assert len(line) == 100 + 1


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"mfu": None, "model_tflops_per_device": 0.0004}, "  400 MFLOP/s  "),
        ({"data_seconds": 0.5}, "  data wait 50%"),
        ({"skipped_since_line": 2}, "  skipped 2"),
        ({"nan_since_line": 1, "loss": float("nan")}, "loss    nan"),
        ({"loss_scale": 65536.0}, "  scale 65536"),
        ({"accuracy": 0.25}, "  accuracy 0.25  "),
        ({"grad_norm": float("inf")}, "  grad inf    "),
    ],
)
def test_what_is_out_of_the_ordinary_is_shown(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    console = Console(is_compact=True, has_colours=False)
    assert shown in written(console, VALUES | changed)
    assert shown not in written(console, VALUES)


@pytest.mark.parametrize("columns", [120, 80, 60, 20])
def test_a_narrow_terminal_gets_fewer_parts_and_never_loses_step_and_loss(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    line = written(Console(is_compact=True, has_colours=True), VALUES | {"skipped_since_line": 3})
    plain = re.sub(r"\033\[\d+m", "", line).rstrip("\n")
    assert len(plain) <= max(columns, 64)
    for part in ("step 123456/500000", "loss 10.8123", "12.3k tok/s", "skipped 3"):
        assert part in plain


@pytest.mark.parametrize(
    ("environment", "stream", "form", "compact", "coloured"),
    [
        ({}, Terminal, "auto", True, True),
        ({"NO_COLOR": "1"}, Terminal, "auto", True, False),
        ({"TERM": "dumb"}, Terminal, "auto", False, False),
        ({}, io.StringIO, "auto", False, False),
        ({}, io.StringIO, "compact", True, False),
        ({}, Terminal, "full", False, True),
    ],
)
def test_a_terminal_gets_the_compact_form_in_colours_and_a_pipe_the_full_one(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], stream: Any, form: Any, compact: bool, coloured: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(stream()):
        console = Console.of(form)
    assert (console.is_compact, console.has_colours) == (compact, coloured)


def test_the_log_keeps_the_full_line_while_the_terminal_shows_the_compact_one() -> None:
    terminal, log = Terminal(), io.StringIO()
    with contextlib.redirect_stdout(_Copied(terminal, log)):  # type: ignore[type-var]
        console = Console.of("auto")
        console.step(VALUES, 500_000)
        console.evaluation(name="valid", step=3, loss=2.0, perplexity=7.4)
    first, second = log.getvalue().splitlines()
    assert first.partition("]")[2] == full_line(VALUES, 500_000).partition("]")[2]
    assert second == " valid loss at iteration 3 | lm loss value: 2.000000E+00 | lm loss PPL: 7.400000E+00 |"
    shown = re.sub(r"\033\[\d+m", "", terminal.getvalue()).splitlines()
    assert shown[0].startswith("step 123456/500000  loss 10.8123") and "\033[" in terminal.getvalue()
    assert shown[1] == "eval valid  loss 2.0000  perplexity 7.40  at step 3"


def test_the_full_line_ends_with_data_time_and_eta() -> None:
    assert full_line(VALUES, 500_000).endswith("| MFU: 41.2% | data time (ms): 1.0 | ETA: 12d03h |")


def test_every_step_of_a_run_has_the_same_parts_in_its_columns() -> None:
    early = [part.text for part in compact_parts(VALUES | {"step": 7, "loss": 10.5}, 500_000)]
    late = [part.text for part in compact_parts(VALUES | {"seconds_left": 5.0, "grad_norm": 1.0}, 500_000)]
    assert list(map(len, early)) == list(map(len, late))
    assert Part("", "12.3k tok/s").text == "12.3k tok/s"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "   0"), (7.0, "   7"), (999.4, " 999"), (999.6, "1.00k"), (12345, "12.3k"), (123456, " 123k"),
     (9.996e3, "10.0k"), (4.12e14, " 412T"), (5e21, "5000E")],
)  # fmt: skip
def test_a_number_gets_the_prefix_of_its_unit(value: float, text: str) -> None:
    assert "".join(with_prefix(value)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (58.2, "59s"), (59.5, "1m00s"), (185, "3m05s"), (3599.2, "1h00m"), (7620, "2h07m"), (1.05e6, "12d03h")],
)
def test_a_time_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_time_left_is_of_steps_with_all_that_is_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0, 14.0, 22.0])  # an evaluation before the last
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    pace = Pace()
    pace.add_step()
    assert pace.seconds_for(100) is None
    for _ in range(3):
        pace.add_step()
    assert pace.seconds_for(100) == pytest.approx(400.0)
