"""Dry runs of large models: the largest stage in less than a minute each, and every stage of a model of 405B.

The suite runs the smallest model, `pytest --all-layouts` (and `make dry-runs`) all of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from sweeps import some_of

from megatronish.ops.build import BuildError, find_compiler

SECONDS = 60  # of a dry run on two cores, with its start
STEP = "--mock-data --dry-run --bf16 --micro-batch-size 1 --train-iters 10 --lr 1e-4 --sequence-parallel --zero-stage 1"
PLAIN = f"{STEP} --hidden-dropout 0 --attention-dropout 0"
OF_1T = (  # Narayanan et al. 2021, table 1
    f"{PLAIN} --num-layers 128 --hidden-size 25600 --num-attention-heads 160 --seq-length 2048 --vocab-size 51200 "
    "--tp 8 --pp 64 --dp 6 --global-batch-size 3072 --recompute-granularity full --recompute-num-layers 1"
)
OF_405B = (
    f"{PLAIN} --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 8 --untie-embeddings-and-output-weights --seq-length 8192 --vocab-size 128256 --tp 8"
)
BALANCED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
CONFIG = "--mock-data --dry-run --config {root}/configs/{name}.toml --vocab-size"
RUNS = {
    "Llama-3 8B": f"{CONFIG.format(root=ROOT, name='llama-8b-8gpu')} 128256 --rank 0",
    "Llama-3 70B": f"{CONFIG.format(root=ROOT, name='llama-70b')} 128256 --rank 0",
    "GPT-3 175B": f"{CONFIG.format(root=ROOT, name='gpt3-175b')} 50257 --rank 0",
    "1T of SC21": f"{OF_1T} --rank 17",
}
"""Each with a rank of the first stage, which holds most micro-batches, and as many layers as any."""
STAGES = {
    "405B in a pipeline": f"{OF_405B} {BALANCED} --pp 16 --dp 8 --global-batch-size 128 --rank all-stages",
    "405B by ZeRO-3": f"{OF_405B} --zero-stage 3 --dp 64 --global-batch-size 64 --rank 0",
}


def dry_run(flags: str, path: Path) -> dict[str, Any]:
    """The report; a run that takes more than its minute is ended."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"fake CUDA is C++: {error}")
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags.split(), "--dry-run-report", str(path)]
    limit = SECONDS if "all-stages" not in flags else 10 * SECONDS
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False, timeout=limit)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    for rank in report["ranks"]:
        print(f"rank {rank['rank']}: {sum(rank['seconds'].values()):.1f} s, {rank['peak_bytes'] / 2**30:.1f} GiB")
    return report


def assert_as_expected(rank: dict[str, Any]) -> None:
    assert rank["peak_bytes"] == pytest.approx(rank["expected_memory"]["total"], rel=0.05), rank["rank"]
    assert all(sent["bytes"] == sent["expected"] for sent in rank["traffic"]), rank["traffic"]


@pytest.mark.parametrize("name", some_of(RUNS, ["Llama-3 8B"]))
def test_the_largest_stage_of_a_large_model_takes_less_than_a_minute(name: str, tmp_path: Path) -> None:
    (rank,) = dry_run(RUNS[name], tmp_path / "report.json")["ranks"]
    assert_as_expected(rank)


@pytest.mark.sweep
@pytest.mark.parametrize("name", STAGES)
def test_every_stage_of_a_model_of_405b_is_built_without_a_whole_copy(name: str, tmp_path: Path) -> None:
    ranks = dry_run(STAGES[name], tmp_path / "report.json")["ranks"]
    assert sum(rank["layers"] for rank in ranks) == 126
    for rank in ranks:
        assert_as_expected(rank)
        # Nothing is whole on the device before it is shared: building takes no more than what is held afterwards.
        state = sum(rank["owners"].get(owner, 0) for owner in ("weights", "gradients", "optimizer"))
        assert rank["build_peak_bytes"] < 1.1 * state + 2**30
