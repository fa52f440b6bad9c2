"""Tests of DeepSpeed's formulas against what its own estimators print for t5-3b."""

import pytest
from paths import ROOT

from megatronish.config.read import read_config
from megatronish.estimate.costs.candidate import UNASKED
from megatronish.estimate.planner.estimators import (
    GIB,
    Cluster,
    Estimate,
    deepspeed_report,
    largest_module,
    zero2,
    zero3,
)
from megatronish.estimate.planner.workload import Workload

PARAMETERS, LARGEST = 2_851_598_336, 32_899_072  # t5-3b


def printed(estimates: list[Estimate]) -> list[str]:
    return [f"{each.cpu / GIB:.2f}|{each.gpu / GIB:.2f}" for each in estimates]


def test_rows_of_t5_3b_on_eight_devices() -> None:
    found = printed(list(zero3(PARAMETERS, LARGEST, Cluster(8))))
    assert found == ["71.71|0.12", "127.48|0.12", "63.74|0.79", "127.48|0.79", "1.47|6.10", "127.48|6.10"]
    assert printed(list(zero2(PARAMETERS, Cluster(8)))) == ["127.48|5.31", "127.48|11.29", "127.48|15.93"]


def test_rows_of_t5_3b_on_one_device() -> None:
    both, _, optimizer, _, neither, _ = printed(list(zero3(PARAMETERS, LARGEST, Cluster(1))))
    assert (both, optimizer, neither) == ("71.71|0.12", "63.74|5.43", "0.18|47.93")


def test_the_largest_layer_decides_what_a_device_holds() -> None:
    (first, *_) = printed(list(zero3(PARAMETERS, 65_798_144, Cluster(8))))
    assert first.endswith("|0.25")


def test_more_nodes_share_the_cpus_part() -> None:
    one, two = (next(zero3(PARAMETERS, LARGEST, Cluster(8, nodes))).cpu for nodes in (1, 2))
    assert one == pytest.approx(2 * two)


def test_the_report_has_both_tables() -> None:
    text = deepspeed_report(PARAMETERS, LARGEST, Cluster(8))
    assert "   127.48 |   11.29 | offload_optimizer=none\n" in text
    assert "    63.74 |    0.79 | offload_param=none offload_optimizer=cpu  zero_init=1\n" in text


@pytest.mark.parametrize(
    ("name", "vocab_size", "largest"), [("gpt3-175b", 50257, 617_558_016), ("qwen3-30b-a3b", 151936, 311_164_928)]
)
def test_the_largest_module_is_the_one_with_most_parameters_of_its_own(
    name: str, vocab_size: int, largest: int
) -> None:
    config = read_config(["--config", str(ROOT / f"configs/{name}.toml")], unasked=UNASKED).config
    assert largest_module(Workload.of(config, vocab_size)) == largest
