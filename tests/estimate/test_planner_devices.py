"""Tests of the planner's devices: the table, TOML files, and the network's units."""

import contextlib
import io
from pathlib import Path

import pytest

from megatronish.commands.plan import main
from megatronish.core.errors import UserError
from megatronish.estimate.planner.devices import device_of, device_table, find_device, network_gb_s, peak_tflops


def printed(arguments: list[str], *, status: int = 0) -> str:
    """What a plan prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        assert main(arguments, program="megatronish plan") == status
    return out.getvalue() + errors.getvalue()


def test_every_row_has_a_source_and_a_possible_rate() -> None:
    names = {"a100-sxm": "NVIDIA A100-SXM4-80GB", "h100-sxm": "NVIDIA H100 80GB HBM3", "b200": "NVIDIA B200"}
    for name, device in device_table().items():
        assert device.source, name
        assert (device.achievable_tflops or 0) <= device.bf16_tflops, name
    for name, by_torch in names.items():
        assert find_device(name).bf16_tflops == peak_tflops(by_torch, "bf16")
        assert device_of(by_torch) == find_device(name)
    assert device_of("NVIDIA A100-SXM4-40GB") == find_device("a100-sxm-40")


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"),
        *("NVIDIA A10G", "NVIDIA GeForce RTX 3090 Ti", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB"),
        *("NVIDIA A100-PCIE-40GB", "NVIDIA GH200 480GB", "cpu"),
    ],
)
def test_a_board_without_a_row_does_not_get_that_of_another(name: str) -> None:
    assert device_of(name) is None


@pytest.mark.parametrize(
    ("by_torch", "name"),
    [
        *(("Tesla T4", "t4"), ("Tesla V100-SXM2-32GB", "v100-sxm"), ("NVIDIA A10", "a10"), ("NVIDIA H20", "h20")),
        *(("NVIDIA RTX A6000", "a6000"), ("NVIDIA GeForce RTX 3090", "rtx-3090")),
    ],
)
def test_devices_of_small_machines_have_rows(by_torch: str, name: str) -> None:
    device = find_device(name)
    assert device_of(by_torch) == device
    assert device.bf16_tflops == peak_tflops(by_torch, "fp16")
    assert device.fp32_tflops == pytest.approx(peak_tflops(by_torch, "fp32") or 0)
    assert device.has_bf16 == (peak_tflops(by_torch, "bf16") is not None)


def test_boards_of_little_power_sustain_less_than_others() -> None:
    sustained = {name: device.sustained for name, device in device_table().items()}
    assert {name for name, part in sustained.items() if part < 0.88} == {"t4", "a10"}  # 70 and 150 W
    assert find_device("a10").flops("fp16") < find_device("a6000").flops("fp16") / 1.5  # one chip, half of the power


def test_a_plan_in_bf16_of_a_device_without_it_is_refused() -> None:
    arguments = ["--config", "llama-8b-8gpu", "--vocab-size", "128256", "--gpus", "8", "--device"]
    said = "--device v100-sxm: v100-sxm has no bf16, which it would emulate many times slower; use --fp16"
    assert said in printed([*arguments, "v100-sxm"], status=2)


@pytest.mark.parametrize(
    ("given", "gb_s"), [("50GB/s", 50), ("400Gb/s", 50), ("400 Gbps", 50), ("200Gbit/s", 25), ("2500MB/s", 2.5)]
)
def test_a_network_has_its_unit(given: str, gb_s: float) -> None:
    assert network_gb_s(given) == pytest.approx(gb_s)


@pytest.mark.parametrize("given", ["50", "50 GiB/s", "fast", "0GB/s", "1.2.3GB/s"])
def test_a_network_without_a_unit_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="write --network 50GB/s"):
        network_gb_s(given)


def test_a_device_of_ones_own_takes_the_rest_from_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[mine]\nlike = "h100-sxm"\nmemory_gib = 94\n')
    device = find_device(str(path))
    assert (device.name, device.memory_gib, device.bf16_tflops) == ("mine", 94, 989)


def test_a_figure_of_ones_own_is_not_overruled_by_what_was_measured_of_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[mine]\nlike = "h100-sxm"\nnode_gb_s = 100\nbf16_tflops = 500\n')
    device, other = find_device(str(path)), find_device("h100-sxm")
    assert device.ring_bytes_per_second < 0.3 * other.ring_bytes_per_second
    assert 0.4 < device.flops("bf16") / other.flops("bf16") < 0.6


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[mine]\nbf16_tflops = 5\n", "mine lacks fp32_tflops"),
        ('[mine]\nlike = "h100-sxm"\nmemory = 5\n', "memory is not a key of a device; did you mean memory_gib"),
        ('[mine]\nlike = "h100-sxm"\nmemory_gib = -5\n', "must be a number above 0"),
        ("memory_gib = 5\n", "must have one table"),
        ("[mine", "is not TOML"),
        ('[mine]\nlike = "mine.toml"\n', "like='mine.toml' of mine is no row of the table; use one of"),
        ("[mine]\nlike = 7\n", "like=7 of mine is no row of the table"),
        (
            '[mine]\nlike = "h100-sxm"\nmemory_gib = inf\n',
            "memory_gib=inf of mine must be a number above 0, and at most",
        ),
        ('[mine]\nlike = "h100-sxm"\nmemory_gib = 1e308\n', "must be a number above 0, and at most"),
        ('[mine]\nlike = "h100-sxm"\nnode_gb_s = nan\n', "must be a number above 0, and at most"),
        ('[mine]\nlike = "h100-sxm"\nsms = inf\n', "must be a number above 0, and at most"),
        ('[mine]\nlike = "h100-sxm"\nsms = 0.3\n', "sms=0.3 of mine must be a whole number"),
        ('[mine]\nlike = "h100-sxm"\ngpus_per_node = 8.5\n', "must be a whole number"),
        ('[mine]\nlike = "h100-sxm"\nsustained = 7\n', "is a part of what is achievable, at most 1"),
        (
            '[mine]\nlike = "h100-sxm"\nachievable_tflops = 2000\n',
            "achievable_tflops=2000 of mine is above bf16_tflops=989",
        ),
        (
            '[mine]\nlike = "h100-sxm"\nall_reduce_gb_s = 600\n',
            "all_reduce_gb_s=600 of mine is over 1.3 times node_gb_s=450",
        ),
        ('[mine]\nlike = "h100-sxm"\nnetwork_all_reduce_gb_s = 400\n', "over 1.3 times network_gb_s=50, which no coll"),
        ('[mine]\nlike = "h100-sxm"\nhas_bf16 = 1\n', "has_bf16=1 of mine must be true or false"),
        ('[mine]\nlike = "h100-sxm"\ncalibrated = 7\n', "calibrated=7 of mine must be a text"),
    ],
)
def test_a_wrong_file_of_a_device_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        find_device(str(path))
