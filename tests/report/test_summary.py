"""Tests of the first lines of a run: which attention and which activation run, and why."""

import re
from pathlib import Path

import pytest
from jobs import tiny

from megatronish.config.read import read_config
from megatronish.estimate.costs.layout_costs import LayoutCosts
from megatronish.ops.native import Native
from megatronish.report.first_lines import first_lines

DROPOUT = "dropout block by block, by masks that do not depend on the layout; no probabilities are kept"
RING = "ring attention over cp, "
NO_DROPOUT = "--attention-dropout 0"
NONE = f"{NO_DROPOUT} --hidden-dropout 0"


def lines_of(flags: str) -> str:
    config, notes = read_config(tiny(Path("never-written"), flags))
    costs = LayoutCosts.of(config, vocab_size=101, device="cpu", kernels=True)
    return first_lines(config, costs, device="cpu", notes=notes)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", DROPOUT),
        (NO_DROPOUT, "scaled_dot_product_attention (flash where the device has it)"),
        (f"{NO_DROPOUT} --cp 2", f"{RING}scaled_dot_product_attention's flash operations"),
        (f"{NO_DROPOUT} --softmax-type learnable", "scaled_dot_product_attention's flash operations"),
        (
            f"{NO_DROPOUT} --position-embedding-type alibi",
            "scaled_dot_product_attention (flash where the device has it)",
        ),
        ("--position-embedding-type alibi --attention-backend flash", DROPOUT),
        (
            f"{NO_DROPOUT} --softmax-type off-by-one --attention-backend fused_softmax",
            "explicit probabilities by torch's softmax (the fused one has no sinks)",
        ),
        ("--softmax-type learnable --cp 2", f"{RING}{DROPOUT}"),
        (
            f"{NO_DROPOUT} --attention-pattern sliding --attention-block-size 1 --attention-local-blocks 1",
            "scaled_dot_product_attention (flash where the device has it); sliding blocks of 1, ",
        ),
        (f"{NO_DROPOUT} --attention-backend unfused", "explicit probabilities by torch's softmax, as requested"),
        (
            f"{NO_DROPOUT} --attention-backend fused_softmax",
            "explicit probabilities by the fused softmax, as requested",
        ),
    ],
)
def test_the_attention_that_runs_is_told_with_its_reason(flags: str, told: str) -> None:
    lines = lines_of(flags)
    assert f"\nattention: {told}" in lines
    assert "--attention-pattern" in flags or f"\nattention: {told}; optimizer: " in lines


EXPERTS = f"{NO_DROPOUT} --num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-layer-freq [0,1]"


def test_the_first_lines_know_experts() -> None:
    lines = lines_of(f"{EXPERTS} --dp 2 --tp 2 --ep 2 --etp 1 --micro-batch-size 2").splitlines()
    assert lines[0] == "megatronish on 4 ranks: dp 2 x tp 2 x pp 1, experts ep 2 x etp 1 x edp 2"
    (parameters,) = [line for line in lines if line.startswith("parameters: ")]
    total, active = (int(word.replace(",", "")) for word in re.findall(r"[\d,]{4,}\d", parameters)[:2])
    assert total - active == 6 * 2 * 24 * 24
    (experts,) = [line for line in lines if line.startswith("experts: ")]
    assert experts.startswith(
        "experts: 8 in 1 of 2 layers, 4 on a device, 2 a token; of a micro-batch a device computes 32 rows a layer "
        "where the load is even, as the memory above, and at most 64 (for each mean load more, "
    )
    assert "expert" not in lines_of("").partition("\nnote")[0]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (f"{NONE}", "this runs on cpu"),
        (f"{NONE} --swiglu", "this runs on cpu"),
        (f"{NONE} --xielu", "this runs on cpu; xielu by torch, as it has no kernel"),
        (f"{NONE} --squared-relu", "this runs on cpu; squared_relu by torch, as it has no kernel"),
        (f"{NONE} --quick-geglu", "this runs on cpu; quick_geglu by torch, as it has no kernel"),
        (
            f"{NONE} --swiglu --activation-func-clamp-value 7",
            "this runs on cpu; swiglu with offset or clamp by torch, as it has no kernel",
        ),
    ],
)
def test_an_activation_without_a_kernel_is_told(flags: str, told: str) -> None:
    assert f"{told}\nparameters: " in lines_of(flags)


def test_windows_are_told_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatronish.ops.windowed.native", lambda _: Native(None, "there is no C++ compiler here"))
    told = "; windowed attention by torch, because there is no C++ compiler here\n"
    lines = lines_of(f"{NONE} --window-size 4")
    assert told in lines
    assert "in layers with a window or pattern, blocks of queries with the keys that they see; optimizer" in lines
    for flags in ("", "--reset-attention-mask", "--attention-backend unfused"):
        flags = flags and f"--window-size 4 {flags}"
        assert "windowed attention" not in lines_of(f"{NONE} {flags}")


def test_dropout_is_told_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatronish.ops.native.native", lambda: Native(None, "there is no C++ compiler here"))
    for flags in ("", NO_DROPOUT, "--hidden-dropout 0"):
        assert "; dropout by torch, because there is no C++ compiler here\n" in lines_of(flags)
    assert "dropout" not in lines_of(NONE).partition("fused operations")[2].partition("\n")[0]
