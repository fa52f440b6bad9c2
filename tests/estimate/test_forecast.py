"""Tests of forecast.json: what a run expects of itself, and what it measured at its end."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import tiny, train_on_ranks
from sweeps import some_of

from megatronish.commands.configuration import read_config
from megatronish.core.errors import UserError
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.planner.forecast import forecast
from megatronish.parallel.stages import Stages
from megatronish.report.forecast_page import page

VOCABULARY = 101


def test_a_forecast_has_the_interval_of_a_known_device_and_none_of_an_unknown_one() -> None:
    config = read_config(tiny(Path("never-written"), "--pp 2 --tp 2 --sequence-parallel")).config
    sizes = {"vocab_size": VOCABULARY, "device_type": "cuda"}
    known = forecast(config, device_name="NVIDIA H100 80GB HBM3", **sizes)
    assert 0 < known["step_seconds"]["low"] <= known["step_seconds"]["high"]
    assert known["step_seconds"]["calibrated"].startswith("no")
    unknown = forecast(config, device_name="cpu", **sizes)
    assert "step_seconds" not in unknown
    assert unknown["no_time"].startswith("cpu is not calibrated")
    stages = Stages.of(config.parallel, config.model, vocab_size=VOCABULARY, seq_length=16)
    expected = expected_memory(config, stages.loads(4), vocab_size=VOCABULARY)
    assert unknown["memory"]["bytes"] == max(each.total for each in expected)


def test_a_forecast_of_adapters_says_what_of_its_time_is_not_confirmed() -> None:
    config = read_config(tiny(Path("never-written"), "--pp 2 --adapter-type lora --load x")).config
    found = forecast(config, vocab_size=VOCABULARY, device_name="NVIDIA H100 80GB HBM3", device_type="cuda")
    assert found["step_seconds"]["low"] > 0
    (said,) = found["step_seconds"]["reservations"]
    assert said.startswith("adapters: ")


def test_a_device_that_does_not_exist_is_refused_before_a_run_starts() -> None:
    with pytest.raises(UserError, match="--forecast-device h1000 is not known"):
        read_config(tiny(Path("never-written"), "--forecast-device h1000"))


def test_a_run_ends_with_what_was_expected_and_measured(tmp_path: Path) -> None:
    said = train_on_ranks(tiny(tmp_path / "run", "--pp 2 --forecast-device cpu"), world_size=2)
    written = json.loads((tmp_path / "run" / "forecast.json").read_text())
    expected, measured = written["expected"], written["measured"]
    assert expected["layout"].startswith("tp 1 pp 2 dp 1")
    assert expected["step_seconds"]["device"] == "cpu"
    assert measured["steps"] == 6
    assert 0 < measured["step_seconds"] < 60
    assert measured["peak_memory_bytes"] > expected["memory"]["bytes"]
    (line,) = (line for line in said.splitlines() if line.startswith(" forecast: step "))
    assert len(line) <= 120 and " (of tensors " in line and line.endswith(", bytes as expected")
    report = (tmp_path / "run" / "report.md").read_text()
    assert report == page(expected, measured)
    low, high = expected["step_seconds"]["low"], expected["step_seconds"]["high"]
    assert f"| seconds a step | {low:.4g} to {high:.4g} | {measured['step_seconds']:.4g} (" in report
    assert "| weights |" in report
    assert "| F up | send | " in report and " | equal |" in report


def test_a_page_says_what_was_not_expected_and_what_differs() -> None:
    memory = {"stage": 1, "bytes": 2048, "by_owner": {"weights": 2048}}
    expected = {"layout": "tp 2", "global_batch_size": 4, "memory": memory, "no_time": "cpu is not calibrated"}
    measured = {"steps": 6, "step_seconds": 0.5, "peak_memory_bytes": 4096, "memory_of": "the main rank's device"}
    text = page(expected | {"no_traffic": "completions differ in length"}, measured)
    assert "| seconds a step | not known | 0.5 |" in text
    assert "| peak memory | 2.0 KiB | 4.0 KiB |" in text
    assert "No time was expected: cpu is not calibrated." in text
    assert "None were expected: completions differ in length." in text
    sent = {"tp": {"all-reduce": 8}}
    text = page(expected | {"traffic": sent}, measured | {"traffic": {"tp": {"all-reduce": 9}}})
    assert "| tp | all-reduce | 8 | 9 | differs |" in text


@pytest.mark.parametrize(
    "flags",
    some_of(
        ["--zero-stage 1 --sequence-parallel", "--zero-stage 3", "--optimizer muon"],
        ["--zero-stage 3"],
    ),
)
def test_bytes_by_axis_of_a_real_run_are_the_expected_ones(tmp_path: Path, flags: str) -> None:
    said = train_on_ranks(tiny(tmp_path / "run", f"--tp 2 --dp 2 {flags}"), world_size=4)
    written = json.loads((tmp_path / "run" / "forecast.json").read_text())
    assert {"tp", "world"} < written["expected"]["traffic"].keys()
    assert written["measured"]["traffic"] == written["expected"]["traffic"]
    assert re.search(r" forecast: step .* s \(none expected\), .*, bytes as expected\n", said)


@pytest.mark.parametrize(("factor", "is_counted"), [(1, False), (2, True)])
def test_bytes_of_a_step_that_was_computed_again_are_not_compared(
    tmp_path: Path, factor: int, is_counted: bool
) -> None:
    """Where rows of experts found no room: here in every step, or in none."""
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --hidden-dropout 0 --attention-dropout 0"
    flags = f"{experts} --dp 2 --ep 2 --moe-expert-rank-capacity-factor {factor}"
    said = train_on_ranks(tiny(tmp_path / "run", flags), world_size=2)
    assert said.count(", computed again |") == (0 if is_counted else 6)
    measured = json.loads((tmp_path / "run" / "forecast.json").read_text())["measured"]
    assert ("traffic" in measured, ", bytes as expected\n" in said) == (is_counted, is_counted)
    assert "bytes differ" not in said


def test_one_process_has_sent_nothing(tmp_path: Path) -> None:
    """Votes of hooks are taken off what was sent, and one process sends no votes."""
    said = train_on_ranks(tiny(tmp_path / "run", ""), world_size=1)
    assert ", bytes as expected\n" in said


def test_bytes_are_not_expected_of_what_the_formulas_do_not_cover() -> None:
    config = read_config(tiny(Path("never-written"))).config
    pairs = replace(config, training=replace(config.training, objective="simpo"))
    found = forecast(pairs, vocab_size=VOCABULARY, device_name="cpu", device_type="cpu")
    assert found["no_traffic"].startswith("completions differ in length")
    assert "traffic" not in found
