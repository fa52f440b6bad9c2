"""Tests of the first lines of a run: which attention and which activation run, and why."""

from pathlib import Path

import pytest
from jobs import tiny

from megatronish.config.read import read_config
from megatronish.train.summary import first_lines

DROPOUT = "because attention dropout is above 0 and its masks must not depend on the layout"
RING = "ring attention over cp, "
NO_DROPOUT = "--attention-dropout 0"


def lines_of(flags: str) -> str:
    config, notes = read_config(tiny(Path("never-written"), flags))
    return first_lines(config, vocab_size=101, device="cpu", notes=notes)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", f"explicit probabilities by the fused softmax, {DROPOUT}"),
        (NO_DROPOUT, "scaled_dot_product_attention (flash where the device has it)"),
        (f"{NO_DROPOUT} --cp 2", f"{RING}scaled_dot_product_attention's flash operations"),
        (f"{NO_DROPOUT} --softmax-type learnable", "scaled_dot_product_attention's flash operations"),
        (
            f"{NO_DROPOUT} --position-embedding-type alibi",
            "scaled_dot_product_attention (flash where the device has it)",
        ),
        (
            "--position-embedding-type alibi",
            f"explicit probabilities by torch's softmax (the fused one has no ALiBi), {DROPOUT}",
        ),
        (
            f"{NO_DROPOUT} --softmax-type off-by-one --attention-backend fused_softmax",
            "explicit probabilities by torch's softmax (the fused one has no sinks)",
        ),
        ("--softmax-type learnable --cp 2", f"{RING}explicit probabilities block by block, {DROPOUT}"),
        (f"{NO_DROPOUT} --attention-backend unfused", "explicit probabilities by torch's softmax, as requested"),
        (
            f"{NO_DROPOUT} --attention-backend fused_softmax",
            "explicit probabilities by the fused softmax, as requested",
        ),
    ],
)
def test_the_attention_that_runs_is_told_with_its_reason(flags: str, told: str) -> None:
    assert f"\nattention: {told}; optimizer: " in lines_of(flags)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", "this runs on cpu"),
        ("--swiglu", "this runs on cpu"),
        ("--squared-relu", "this runs on cpu; squared_relu by torch, as it has no kernel"),
        ("--quick-geglu", "this runs on cpu; quick_geglu by torch, as it has no kernel"),
        (
            "--swiglu --activation-func-clamp-value 7",
            "this runs on cpu; swiglu with offset or clamp by torch, as it has no kernel",
        ),
    ],
)
def test_an_activation_without_a_kernel_is_told(flags: str, told: str) -> None:
    assert f"{told}\nparameters: " in lines_of(flags)
