"""Tests of models with experts from and to Hugging Face: every bit comes back, every layout loads the same model."""

import json
from pathlib import Path

import pytest
import torch
from conversions import to_hf, to_ours
from engines import world_size_of
from expert_models import CONFIGS, tensors_of_family, write_family
from jobs import tiny
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

from megatronish.config.read import read_config
from megatronish.formats.fill import open_hf
from megatronish.formats.hf import tensors as hf
from megatronish.formats.hf.config import hf_config_of
from megatronish.formats.safetensors import FILE
from megatronish.formats.start import read_start
from megatronish.launch.place import Place
from megatronish.sharding import Piece
from megatronish.train.build import build_engine
from megatronish.train.job import TrainingJob
from megatronish.train.resume import begin
from megatronish.train.run import start_mesh
from megatronish.train.state import tensors_of

FAMILIES = tuple(CONFIGS)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_trip_keeps_every_bit_and_publishes_single_experts(tmp_path: Path, name: str, is_packed: bool) -> None:
    theirs = write_family(tmp_path / "theirs", name, is_packed=is_packed)
    report = to_ours(theirs, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert report.unmatched_in == report.unmatched_out == ()
    assert_same(load_file(tmp_path / "back" / FILE), tensors_of_family(name))
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: value for key, value in back.items() if key != "torch_dtype"} == CONFIGS[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_written_anew_means_the_same(tmp_path: Path, name: str) -> None:
    before = hf.describe(write_family(tmp_path / "theirs", name))
    written = hf_config_of(before.model, vocab_size=101, seq_length=16, eos_token_id=100)
    assert written["model_type"] == name
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.json").write_text(json.dumps(written))
    assert hf.describe(tmp_path / "again").model == before.model


def loaded(place: Place, folder: Path, flags: str) -> dict[str, float]:
    """Compare the masters of this rank with the folder, bit for bit; the metrics of a step."""
    argv = tiny(Path("never-written"), flags)
    drops = {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--ffn-hidden-size",
        "--vocab-size",
        "--seq-length",
    }
    kept = [word for pair in zip(argv[::2], argv[1::2], strict=False) if pair[0] not in drops for word in pair]
    config, _ = read_config([*kept, "--load-hf", str(folder)], read_start=read_start)
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(config, mesh, vocab_size=job.vocab_size)
    begin(job, engine, lambda _line: None)
    expected = open_hf(folder).tensors
    for name, mine in tensors_of(engine, with_optimizer=False).items():
        whole = expected[name.removeprefix("model.")].read()
        for piece in mine.pieces:
            part = Piece((), piece.global_offset, piece.sizes).view(whole)
            assert torch.equal(piece.view(mine.local), part), name
    batches = job.batches_of(job.datasets.train)
    result = engine.step(batches(0, 4), num_steps_done=0, learning_rate=1e-2, weight_decay=0.1)
    return {**result.metrics, "grad_norm": result.grad_norm}


LAYOUTS = [
    "--dp 2 --ep 2",
    "--dp 4 --ep 4 --zero-stage 1",
    "--pp 2 --tp 2 --etp 2 --sequence-parallel",
    "--dp 2 --tp 2 --ep 2 --etp 2 --zero-stage 3",
    "--cp 2 --tp 2 --ep 4 --etp 1",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_loads_and_trains_the_same_model(tmp_path: Path, name: str) -> None:
    folder = write_family(tmp_path / "theirs", name)
    common = "--mock-data --optimizer sgd"
    (serial,) = run_ranks(1, loaded, folder, common)
    for layout in LAYOUTS:
        for found in run_ranks(world_size_of(layout), loaded, folder, f"{common} {layout}"):
            assert found == pytest.approx(serial, rel=1e-5), layout
