"""Tests of --dry-run --rank: a rank's engine and step without a GPU, its report, and what cannot be asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_lines import problems, small
from paths import ROOT
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.dry_run.recorder import StepRecorder
from megatronish.dry_run.run import notes_of_left_out
from megatronish.launch.place import Place
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh, leave

SIZES = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --tp 2 --pp 2"
STEP = "--micro-batch-size 1 --global-batch-size 16 --train-iters 10 --lr 1e-3 --bf16 --mock-data --dry-run"
TINY = [*SIZES.split(), *STEP.split()]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--rank 3", "rank=3 plan a run that is not started; add --dry-run"),
        ("--world-size 8", "world_size=8 plan a run that is not started; add --dry-run"),
        (
            "--dry-run --world-size 8 --tp 2 --rank 8",
            "rank=8 is no rank of 8; use a number from 0 to 7, or all-stages",
        ),
        ("--dry-run --tp 2 --rank 2", "or say with --world-size how many ranks there are"),
        ("--dry-run --world-size 8 --rank -1", "rank=-1 is no rank of 8"),
        ("--dry-run --world-size 8 --rank all", "rank=all is no rank of 8"),
        ("--dry-run --world-size 7 --tp 2 --rank 0", "world size 7 must be divisible by tp 2 x pp 1 x cp 1 = 2"),
        ("--dry-run --world-size 0 --rank 0", "world_size=0 must be at least 1"),
        ("--dry-run --dry-run-report x.json", "dry_run_report=x.json is of single ranks; add --rank all-stages"),
        ("--dry-run --rank 0 --objective dpo", "objective=dpo learns from pairs; leave --rank out"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(flags: str, complaint: str) -> None:
    found = problems(small("--mock-data", *flags.split()))
    assert [each for each in found if complaint in each], found


def dry_run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *TINY, *flags]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_one_rank_of_each_stage_is_reported_as_text_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = dry_run("--compile", "--world-size", "16", "--rank", "all-stages", "--dry-run-report", str(path))
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert [(each["rank"], each["stage"]) for each in report["ranks"]] == [(0, 0), (8, 1)]
    for each in report["ranks"]:
        assert f"rank {each['rank']} of 16 (stage {each['stage']}): 2 layers" in done.stdout
        assert sum(each["owners"].values()) == each["peak_bytes"]
        assert each["micro_batches_run"] == 3 and report["micro_batches"] == 4
        assert sum(each["host_waits"].values()) == 1
        assert all(sent["bytes"] == sent["expected"] for sent in each["traffic"])
    assert "the host waits for the device 1 times a step" in done.stdout
    assert done.stdout.count("note: the config asks for --compile, which is left out: ") == 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("flag", "layout"),
    [("--compile", ""), ("--cuda-graph", "--tp 1 --pp 1 --hidden-dropout 0 --attention-dropout 0")],
)
def test_what_is_left_out_is_said_where_the_config_asks_for_it(flag: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = dry_run(flag, *layout.split(), "--world-size", "4", "--rank", "0", "--dry-run-report", str(path))
    assert done.returncode == 0, done.stderr
    said = f"the config asks for {flag}, which is left out: "
    assert f"note: {said}" in done.stdout
    assert [note for note in json.loads(path.read_text())["notes"] if note.startswith(said)]
    assert done.stdout.count("which is left out") == 1


def test_deep_ep_is_left_out_where_it_would_send_something() -> None:
    config = Config(model=ModelConfig(num_experts=4))
    for ep, number in ((2, 1), (1, 0)):
        asks = config.with_fields(moe_token_dispatcher_type="deepep", expert_model_parallel_size=ep)
        assert sum("by all-to-all, a row for each choice" in note for note in notes_of_left_out(asks)) == number


def test_a_rank_outside_of_the_world_ends_with_status_2() -> None:
    done = dry_run("--world-size", "16", "--rank", "16")
    assert done.returncode == 2
    assert "rank=16 is no rank of 16; use a number from 0 to 15, or all-stages" in done.stderr


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    done = dry_run("--world-size", "4", "--rank", "0", "--dry-run-report", str(tmp_path))
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"--dry-run-report {tmp_path} cannot be written: Is a directory; choose another\n"


def test_a_tensor_of_the_cpu_is_not_sent_over_an_axis_of_gpus() -> None:
    """NCCL would refuse it; a group that sends nothing has to be asked."""
    parallel, place = ParallelConfig(tensor_model_parallel_size=2), Place(0, 2, 0, 1)
    mesh = Mesh.of(parallel, place, device=torch.device("meta"), backend="fake", store=FakeStore())
    try:
        with StepRecorder("meta", number=1, references={}).watching():
            comm.all_reduce(torch.ones(2, device="meta"), mesh.tp)
            comm.all_reduce(torch.ones(2), mesh.world)
            with pytest.raises(RuntimeError, match="all-reduce over tp of a tensor on cpu, where this axis only moves"):
                comm.all_reduce(torch.ones(2), mesh.tp)
    finally:
        leave()


@pytest.mark.sweep
def test_a_reader_that_leaves_ends_a_dry_run_without_a_message() -> None:
    command = f"{sys.executable} {ROOT / 'pretrain_gpt.py'} {' '.join(TINY)} --world-size 4 --rank all-stages"
    done = subprocess.run(f"{command} | head -n 1", shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1 and not done.stderr


def test_without_a_compiler_the_meta_device_says_so(tmp_path: Path) -> None:
    done = dry_run("--world-size", "4", "--rank", "1", PATH=str(tmp_path), CXX="")
    assert done.returncode == 0, done.stderr
    assert "note: on the meta device, without kernels, flash attention and waits of a GPU, because there is no C++" in (
        done.stdout
    )
    assert "rank 1 of 4 (stage 0): 2 layers" in done.stdout
