"""Tests of files of measurements: a sentence for each line that says what no machine does."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatronish.core.errors import UserError
from megatronish.estimate.planner.calibrate import calibrated
from megatronish.estimate.planner.devices import find_device

FIT = {"alpha_s": 6e-5, "bandwidth_bytes_per_s": 160e9, "mean_error": 0.05, "accepted": True}
LINK = {"collective": "all_reduce", "bytes": 2**20, "ranks": 8, "nodes": 1, "axis": "tp", "fit": FIT}


def link(**changes: Any) -> str:
    fit = FIT | {name: value for name, value in changes.items() if name in FIT}
    return json.dumps(LINK | {name: value for name, value in changes.items() if name not in FIT} | {"fit": fit})


def probed(**values: Any) -> str:
    return json.dumps({"probe": values})


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"probe": 5}', "probe=5 is no object"),
        ('{"probe": null}', "probe=None is no object"),
        ('{"probe": {}}', "the probe has neither tflops nor host_seconds_a_layer"),
        (probed(tflops="abc"), "tflops=abc must be a number above 0"),
        (probed(tflops=[1]), "tflops=.1. must be a number above 0"),
        (probed(tflops=-5), "tflops=-5 must be a number above 0"),
        (probed(tflops=0), "tflops=0 must be a number above 0"),
        (probed(tflops=float("nan")), "tflops=nan must be a number above 0"),
        (probed(tflops=float("inf")), "tflops=inf must be a number above 0"),
        (probed(tflops={}), "tflops={} must be a number above 0"),
        (probed(tflops=2000), "tflops=2000 is above the peak of h100-sxm, 989"),
        (probed(tflops=600, memory_gb_s=4000), "memory_gb_s=4000 is above hbm_gb_s of h100-sxm, 3350"),
        (probed(tflops=600, attention_tflops=0), "attention_tflops=0 must be a number above 0"),
        (probed(host_seconds_a_layer=-1), "host_seconds_a_layer=-1 must be a number above 0"),
        (probed(device="NVIDIA A100-SXM4-80GB", tflops=200), "which is a100-sxm, and --device is h100-sxm"),
        (probed(device="x86_64", type="cpu", tflops=0.1), "measured cpu, which is cpu, and --device is h100-sxm"),
        ('{"collective": "all_reduce", "fit": {"accepted": true}}', "ranks=None must be a whole number above 0"),
        (link(device="NVIDIA A100-SXM4-80GB"), "which is a100-sxm, and --device is h100-sxm"),
        (link(device="cpu"), "measured cpu, which is cpu, and --device is h100-sxm"),
        (link(bandwidth_bytes_per_s=400e9), "measured 700 GB/s, and a device of h100-sxm has 450 GB/s in its node"),
        (link(nodes=4, bandwidth_bytes_per_s=160e9), "140 GB/s.*50 GB/s to other nodes; .*--network 140GB/s"),
        (link(ranks="8"), "ranks=8 must be a whole number above 0"),
        (link(collective=["x"]), "is no name"),
        (link(nodes=0), "nodes=0 must be a whole number above 0"),
        (link(bandwidth_bytes_per_s=float("nan")), "bandwidth_bytes_per_s=nan must be a number above 0"),
        (link(bandwidth_bytes_per_s=-3e11), "bandwidth_bytes_per_s=-3.*must be a number above 0"),
        (link(bandwidth_bytes_per_s=0), "bandwidth_bytes_per_s=0 must be a number above 0"),
        (link(alpha_s="x"), "alpha_s=x must be a number from 0 on"),
        (link(accepted="no"), "has no probe and no accepted fit"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("9" * 5_000, "line 1 is not JSON"),
    ],
)
def test_a_line_that_no_machine_would_give_is_refused(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=sentence) as refused:
        calibrated(find_device("h100-sxm"), [path])
    assert ";" in str(refused.value)


def test_links_of_the_device_itself_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    named = {"collective": "all_reduce", "axis": "tp", "ranks": 8, "nodes": 1, "device": "NVIDIA H100 80GB HBM3"}
    path.write_text(json.dumps({"fit": named | FIT}) + "\n")  # as bench-collectives writes it
    assert calibrated(find_device("h100-sxm"), [path]).all_reduce_gb_s == pytest.approx(280)
    with pytest.raises(UserError, match="which is h100-sxm, and --device is a100-sxm"):
        calibrated(find_device("a100-sxm"), [path])


def test_a_probe_of_a_machine_without_a_sheet_may_be_above_its_row(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_text(probed(device="x86_64", tflops=1.5))
    assert calibrated(find_device("cpu"), [path]).flops("bf16") == 1.5e12
