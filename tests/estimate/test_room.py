"""Tests of room for a run: a start that this machine has no memory for is refused in seconds, with what would fit."""

import shlex
from pathlib import Path

import pytest
from jobs import call_main, run_job, tiny
from machine_speed import units_of
from paths import ROOT

from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.estimate import room
from megatronish.estimate.costs.candidate import UNASKED
from megatronish.estimate.links import facts
from megatronish.estimate.room import RankRoom, sentence
from megatronish.train import setup

GIB = 2**30
MODEL = f"--config {ROOT}/configs/llama-8b-8gpu.toml --mock-data --vocab-size 128256"
ALONE = f"{MODEL} --tp 1 --pp 1 --no-sequence-parallel"
HUGE = "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672"


def config_of(flags: str) -> Config:
    return read_config(shlex.split(flags), unasked=UNASKED).config


def said_of(flags: str, found: RankRoom) -> str | None:
    config = config_of(flags)
    return sentence(config, [found] * config.layout.world_size, vocab_size=128256)


def gpu(gib: float) -> RankRoom:
    return RankRoom("node7 boot", 2000 * GIB, ("NVIDIA H100", int(gib * GIB)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "gib"),
    [
        (f"{ALONE} --dp 8", 80),
        (f"{ALONE} --dp 1", 80),
        (f"{ALONE} --dp 4 --zero-stage 1 --micro-batch-size 4", 80),
        (MODEL, 20),
        (f"{ALONE} --dp 1 --adapter-type lora --load x --micro-batch-size 4", 24),
    ],
)
def test_each_remedy_lets_the_run_fit(flags: str, gib: float) -> None:
    found: list[str | None] = []
    assert units_of(lambda: found.append(said_of(flags, gpu(gib)))) < 30  # 5 s of a busy slow core
    (said,) = found
    assert said is not None and "the device of rank 0 (NVIDIA H100), which has " in said, said
    remedies = said.partition("it would fit with ")[2].split(" or with ")
    assert all(remedies), said
    for remedy in remedies:
        assert said_of(f"{flags} {remedy}", gpu(gib)) is None, remedy


def test_what_fits_is_not_refused_and_what_is_near_neither() -> None:
    config = config_of(MODEL)
    needs = room.fullest(config, [gpu(80)] * 8, vocab_size=128256).needs
    assert said_of(MODEL, gpu(80)) is None
    assert said_of(MODEL, gpu(0.95 * needs / GIB)) is None  # expectations are near, not exact
    assert said_of(MODEL, gpu(0.85 * needs / GIB)) is not None


def test_ranks_of_a_machine_count_together_and_each_machine_by_itself() -> None:
    config = config_of(MODEL)
    one = RankRoom("node1 boot", 300 * GIB, None)
    assert sentence(config, [one] * 8, vocab_size=128256) is None
    few = [one._replace(available=150 * GIB), one._replace(machine="node2 boot", available=150 * GIB)]
    assert sentence(config, few * 4, vocab_size=128256) is None
    said = sentence(config, [few[0]] * 8, vocab_size=128256)
    assert said is not None and "on node1 (8 ranks), which has 150.0 GiB; it would fit with --recompute" in said
    assert "use more machines or a smaller model (with " in str(said_of(MODEL, one._replace(available=GIB)))


def test_offloaded_states_count_against_the_machine_of_a_gpu() -> None:
    flags = f"{ALONE} --dp 1 --zero-stage 1 --optimizer-cpu-offload"
    said = said_of(flags, gpu(80)._replace(available=20 * GIB))
    assert said is not None and "on node7 (1 rank), which has 20.0 GiB" in said
    assert said_of(f"{flags} --recompute-granularity full", gpu(80)) is None


def test_limits_of_control_groups_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "bytes_within_limits", lambda: 3.0 * 2**20)
    assert facts.available_memory() == 3 * 2**20


@pytest.mark.parametrize("flags", ["", "--dp 2"])
def test_a_start_beyond_the_machine_is_refused_before_the_model_is_built(tmp_path: Path, flags: str) -> None:
    ended = run_job(tiny(tmp_path / "run", f"{HUGE} {flags}"), tmp_path)
    assert ended.status == 2, ended.errors
    assert ended.errors.count("the run expects ") == 1 and "iB of memory on " in ended.errors
    assert "--no-check-memory starts it none the less" in ended.errors
    assert "Traceback" not in ended.errors
    assert not list((tmp_path / "run").rglob("*.distcp"))


def without_memory() -> None:
    """Planted in a job: its machine has next to none."""
    room.available_memory = lambda: 2**20  # type: ignore[attr-defined]
    room.free_swap = lambda: 0  # type: ignore[attr-defined]


def test_a_flag_starts_it_none_the_less(tmp_path: Path) -> None:
    refused = run_job(tiny(tmp_path / "one", "--train-iters 1"), tmp_path, plant=without_memory)
    assert refused.status == 2 and "which has 1.0 MiB" in refused.errors, refused.errors
    flags = "--train-iters 1 --no-check-memory"
    assert run_job(tiny(tmp_path / "two", flags), tmp_path, plant=without_memory).status == 0


def test_a_dry_run_says_it_in_a_line() -> None:
    ended = call_main(tiny(Path("never-written"), f"{HUGE} --dry-run"))
    assert ended.status == 0, ended.errors
    assert ended.output.count("note: a start of all ranks here would be refused: the run expects ") == 1
    ended = call_main(tiny(Path("never-written"), "--dry-run"))
    assert ended.status == 0 and "would be refused" not in ended.output


def without_memory_and_data() -> None:
    """Planted in a job: no memory, and a fault of its own where it opens the data."""
    without_memory()
    setup.build_datasets = without_memory_and_data  # type: ignore[assignment]


def test_room_is_asked_for_before_the_data_are_read(tmp_path: Path) -> None:
    ended = run_job(tiny(tmp_path / "run", "--train-iters 1"), tmp_path, plant=without_memory_and_data)
    assert ended.status == 2 and "which has 1.0 MiB" in ended.errors, ended.errors
