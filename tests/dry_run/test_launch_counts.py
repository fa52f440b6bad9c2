"""Tests of how many kernels a layer launches: the table of docs/BENCHMARKS.md is what the dry run counts."""

import json
import os
import re
import subprocess
import sys

import pytest
from paths import ROOT, TESTS

from megatronish.ops.build import BuildError, find_compiler

AIMS = {"GPT 1.3B with dropout": 60, "Llama 8B": 60, "QLoRA 8B": 150, "Qwen3-30B-A3B": 100}
"""Launches of a layer with kernels that are too many, whatever the table says."""


def in_table() -> dict[str, dict[str, list[int]]]:
    """Launches of a layer and of the rest, by kernels (assumed, triton or 0) and model, as the document has them."""
    text = (ROOT / "docs/BENCHMARKS.md").read_text().partition("## Launches of kernels\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?)" + 6 * r" \| ([\d,]+)" + r" \|$", text, re.MULTILINE)
    numbers = {name: [int(cell.replace(",", "")) for cell in cells] for name, *cells in rows}
    return {
        kernels: {name: each[2 * place : 2 * place + 2] for name, each in numbers.items()}
        for place, kernels in enumerate(("assumed", "triton", "0"))
    }


@pytest.mark.parametrize(
    "kernels", ["assumed", *(pytest.param(each, marks=pytest.mark.sweep) for each in ("triton", "0"))]
)
def test_the_table_of_launches_is_what_the_dry_run_counts(kernels: str) -> None:
    """A change that adds a launch changes the table, where a reader sees it."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"fake CUDA is C++: {error}")
    path = os.pathsep.join([str(ROOT), str(TESTS / "support")])
    environment = os.environ | {"MEGATRONISH_KERNELS": kernels, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TESTS / "support" / "launch_counts.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    counted = dict(json.loads(line) for line in done.stdout.splitlines())
    assert counted == in_table()[kernels]


@pytest.mark.parametrize("kernels", ["assumed", "triton"])
def test_a_layer_with_kernels_launches_few(kernels: str) -> None:
    layers = {name: layer for name, (layer, _) in in_table()[kernels].items()}
    assert layers.keys() == AIMS.keys()
    assert all(layers[name] < aim for name, aim in AIMS.items()), layers
