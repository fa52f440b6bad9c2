"""Tests of the layout that `make pretrain` takes on a machine with GPUs."""

import subprocess
from pathlib import Path

import pytest
from paths import ROOT

from megatronish.config.read import read_config
from megatronish.core.layout import Layout
from megatronish.launch.fit import fitted, fitted_experts, flags_for

DEMO = ROOT / "configs" / "demo.toml"


@pytest.mark.parametrize(
    ("num_devices", "sizes"),
    [(1, (1, 1, 1)), (2, (1, 2, 1)), (3, (1, 2, 1)), (4, (1, 2, 2)), (7, (1, 2, 2)), (8, (2, 2, 2)), (16, (2, 2, 2))],
)
def test_the_demo_gives_up_copies_first(num_devices: int, sizes: tuple[int, int, int]) -> None:
    layout = fitted(Layout(dp=2, tp=2, pp=2), num_devices)
    assert (layout.dp, layout.tp, layout.pp) == sizes


def test_a_size_becomes_a_divisor_of_itself() -> None:
    assert fitted(Layout(dp=6, tp=3), 10).sizes == (1, 3, 1, 3)
    assert fitted(Layout(cp=4, tp=3, pp=5), 4).sizes == (1, 1, 1, 3)


@pytest.mark.parametrize("num_devices", range(10))
def test_the_demo_runs_on_any_number_of_gpus(num_devices: int) -> None:
    flags = flags_for(DEMO, [], num_devices=num_devices)
    config = read_config(["--config", str(DEMO), "--mock-data", *flags]).config
    assert config.layout.world_size <= num_devices or num_devices == 0
    assert (flags == []) == (num_devices in (0, 8, 9))


@pytest.mark.parametrize("argv", [["--tp", "4"], ["--data-parallel-size=1"], ["--device", "cpu"], ["--ep", "1"]])
def test_a_layout_or_device_that_is_asked_for_stays(argv: list[str]) -> None:
    assert flags_for(DEMO, ["--train-iters", "20", *argv], num_devices=1) == []
    assert flags_for(DEMO, ["--train-iters", "20"], num_devices=1) != []


def test_what_changes_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags_for(DEMO, [], num_devices=2) == ["--dp", "1", "--tp", "2", "--pp", "1", "--cp", "1"]
    assert capsys.readouterr().err == f"2 GPUs: dp 1 x tp 2 x pp 1 instead of dp 2 x tp 2 x pp 2 of {DEMO}\n"


def test_make_pretrain_takes_it() -> None:
    def recipe(flags: str) -> str:
        words = [
            "make",
            "--no-print-directory",  # which a make that runs these tests would have it print
            "-n",
            "-o",
            "demo/python_text_document.idx",
            "pretrain",
            "RUN=python",
            f"PRETRAIN_FLAGS={flags}",
        ]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]

    fit = "$(python -m megatronish.launch.fit configs/demo.toml"
    assert recipe("--lr 1") == f"python pretrain_gpt.py --config configs/demo.toml {fit} --lr 1) --lr 1"
    other = "--config configs/demo-moe.toml"
    assert recipe(other) == f"python pretrain_gpt.py  {fit} {other}) {other}"


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 7])
def test_another_config_takes_the_place_of_the_demo_and_its_experts_fit_too(num_devices: int) -> None:
    path = str(ROOT / "configs" / "demo-moe.toml")
    for words in (["--config", path], [f"--config={path}"], ["--config", "demo-moe"]):
        flags = flags_for(DEMO, words, num_devices=num_devices)
        config = read_config([*words, "--mock-data", *flags]).config
        assert config.layout.world_size <= num_devices and config.model.num_experts == 8
    assert flags_for(DEMO, ["--config", "no-such-file"], num_devices=1) == []


@pytest.mark.parametrize(
    "text", ["[parallel", "parallel = 3", "[parallel]\ndata_parallel_size = -2", "a" * 2**22 + "\0"]
)
def test_a_config_that_is_wrong_is_left_to_who_reads_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert flags_for(tmp_path / "config.toml", [], num_devices=2) == []


@pytest.mark.parametrize(
    ("layout", "ep", "etp"),
    [(Layout(), 1, 1), (Layout(tp=2), 1, 2), (Layout(dp=2, tp=2), 2, 2), (Layout(dp=4), 2, 1), (Layout(dp=3), 1, 1)],
)
def test_a_grid_of_experts_becomes_one_that_divides_the_ranks(layout: Layout, ep: int, etp: int) -> None:
    parallel = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    assert fitted_experts(parallel, layout) == ["--etp", str(etp), "--ep", str(ep)]
    assert fitted_experts({}, layout) == []
