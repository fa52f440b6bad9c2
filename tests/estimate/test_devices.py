"""Tests of peak FLOP/s by device name."""

import pytest

from megatronish.estimate.planner.devices import peak_tflops


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989, 989, 67),
        ("NVIDIA H100 PCIe", 756, 756, 51),
        ("NVIDIA H200", 989, 989, 67),
        ("NVIDIA A10", 125, 125, 31.2),
        ("NVIDIA A10G", 70, 70, 35),
        ("NVIDIA L4", 121, 121, 30.3),
        ("NVIDIA L40S", 362, 362, 91.6),
        ("Tesla V100-SXM2-32GB", None, 125, 15.7),
        ("Tesla V100-PCIE-16GB", None, 112, 14),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("NVIDIA GH200 480GB", 989, 989, 67),
        ("NVIDIA B200", 2250, 2250, 75),
        ("AMD Instinct MI300X", 1307, 1307, 163.4),
        ("NVIDIA RTX A1000", None, None, None),
        ("cpu", None, None, None),
    ],
)
def test_peaks_are_found_by_torchs_name_of_a_device(
    name: str, bf16: float | None, fp16: float | None, fp32: float | None
) -> None:
    assert (peak_tflops(name, "bf16"), peak_tflops(name, "fp16"), peak_tflops(name, "fp32")) == (bf16, fp16, fp32)
