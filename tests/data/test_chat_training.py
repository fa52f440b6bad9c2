"""Tests of training on chats: packed rows equal one chat a row in every layout, losses of files, resuming, audit."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from chat_formats import chatml
from chat_tokenizers import said, save_tokenizer, write_lines
from comparison import assert_close, whole
from jobs import call_main, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from sweeps import some_of
from theorem import Parts, parts

from megatronish.config.config import Config
from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.data.chat.dataset import ChatDataset
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.report.plot import read_lines
from megatronish.train.setup import TrainingJob

S = 128
IM = ("<|im_start|>", "<|im_end|>")
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    ffn_hidden_size=32,
    position_embedding_type="rope",
)
LAYOUTS = {
    "dp 2": ParallelConfig(data_parallel_size=2),
    "cp 2": ParallelConfig(context_parallel_size=2),
    "pp 2": ParallelConfig(pipeline_model_parallel_size=2),
    "tp 2": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "dp 2, ZeRO 3": ParallelConfig(data_parallel_size=2, zero_stage=3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of chats and a tokenizer; their epoch is an even number of rows."""
    found = tmp_path_factory.mktemp("chats")
    save_tokenizer(found / "tokenizer", IM, template=chatml())
    stream = np.random.default_rng(1)
    for name, count in (("a", 22), ("b", 8)):
        sizes = stream.integers(1, 20, (count, 4)).tolist()
        texts = [[name * size for size in each[: 2 if number % 3 else 4]] for number, each in enumerate(sizes)]
        write_lines(found / f"{name}.jsonl", [said(*each) for each in texts])
    return found


class Seen(NamedTuple):
    """Metrics of a step, its gradient norm, and this rank's gradients."""

    metrics: dict[str, float]
    grad_norm: float
    num_tokens: int
    gradients: Parts
    rows: int


def one_step(place: Place, parallel: ParallelConfig, folder: str, pack: bool) -> Seen:
    """Gradients of the first epoch as one step."""
    data = DataConfig(
        train_data_path=(f"{folder}/a.jsonl", f"{folder}/b.jsonl"),
        dataset_type="chat",
        tokenizer_type="huggingface",
        tokenizer_model=f"{folder}/tokenizer",
    )
    config = Config(
        model=MODEL,
        parallel=parallel,
        training=TrainingConfig(seq_length=S, micro_batch_size=1),
        optimizer=OptimizerConfig(optimizer="sgd"),
        data=data,
        chat=ChatConfig(pack_samples=pack),
    )
    mesh = Mesh.of(parallel, place)
    job = TrainingJob.open(config, mesh)
    engine = job.build_engine()
    rows = job.datasets.train.num_samples
    assert isinstance(job.datasets.train, ChatDataset) and rows is not None
    result = engine.gradients(job.batches_of(job.datasets.train)(0, rows), num_steps_done=0)
    gradients = parts(engine, engine.data_parallel.gradients)
    return Seen(dict(result.metrics), result.grad_norm, result.num_loss_tokens, gradients, rows)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Seen:
    """One process with one chat a row."""
    return one_step(Place(), ParallelConfig(), str(folder), False)


def assert_equal(found: list[Seen], alone: Seen) -> None:
    for each in found:
        assert each.metrics == pytest.approx(alone.metrics, rel=1e-5)
        assert each.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        assert each.num_tokens == alone.num_tokens
    expected = whole([alone.gradients])
    for name, gradient in whole([each.gradients for each in found]).items():
        assert_close(name, gradient, expected[name])


@pytest.mark.long
def test_packed_rows_are_the_same_chats_one_a_row(folder: Path, alone: Seen) -> None:
    packed = one_step(Place(), ParallelConfig(), str(folder), True)
    assert (packed.rows, alone.rows) == (14, 30)
    assert set(packed.metrics) == {"loss", "loss/a", "loss/b"}
    assert_equal([packed], alone)


@pytest.mark.parametrize("layout", some_of(LAYOUTS, ["cp 2", "dp 2, ZeRO 3"]))
def test_packed_rows_in_a_layout_are_the_same_chats_one_a_row(layout: str, folder: Path, alone: Seen) -> None:
    assert_equal(run_ranks(2, one_step, LAYOUTS[layout], str(folder), True), alone)


def test_the_losses_of_files_are_means_over_their_own_tokens(folder: Path, alone: Seen) -> None:
    """Of the 30 chats, those of a alone and of b alone, weighed by their trained tokens, are all."""
    data = [one_file(folder, name) for name in "ab"]
    total = sum(alone.metrics[f"loss/{name}"] * tokens for name, tokens in zip("ab", data, strict=True))
    assert total / sum(data) == pytest.approx(alone.metrics["loss"], rel=1e-6)


def one_file(folder: Path, name: str) -> int:
    """Trained tokens of a file."""
    text = (folder / f"{name}.jsonl").read_text()
    answers = re.findall(r'"assistant", "content": "(\w+)"', text)
    return sum(len(answer) + 1 for answer in answers)


# whole runs


def flags(folder: Path, more: str = "") -> str:
    data = f"--data-path 0.6 {folder / 'a.jsonl'} 0.4 {folder / 'b.jsonl'} --dataset-type chat --split 1"
    return f"{data} --tokenizer-model {folder / 'tokenizer'} --vocab-size 264 --seq-length 64 {more}"


def test_a_run_that_stops_in_the_middle_of_an_epoch_resumes_with_the_same_rows(folder: Path, tmp_path: Path) -> None:
    whole_run, parted = tmp_path / "whole", tmp_path / "parted"
    train_on_ranks(tiny(whole_run, "--train-iters 9", data=flags(folder)))
    train_on_ranks(tiny(parted, "--train-iters 9 --exit-interval 5", data=flags(folder)))
    assert len(steps_of(parted)) == 5
    train_on_ranks(tiny(parted, "--train-iters 9", data=flags(folder)))
    assert steps_of(parted) == steps_of(whole_run)


def test_validation_files_of_their_own_have_no_names_of_training_files(folder: Path, tmp_path: Path) -> None:
    data = flags(folder).replace("--data-path", "--train-data-path").replace(" --split 1", "")
    for run, files in (("other", [folder / "b.jsonl"]), ("more", [folder / "b.jsonl", folder / "a.jsonl"])):
        more = f"--train-iters 1 --eval-iters 1 --valid-data-path {' '.join(map(str, files))}"
        train_on_ranks(tiny(tmp_path / run, more, data=data))
        (line,) = read_lines(tmp_path / run / "evaluations.jsonl")
        assert line["loss"] > 0 and not {"loss/a", "loss/b"} & line.keys()
    parts = "--train-iters 1 --eval-iters 4 --split 50,50,0"
    train_on_ranks(tiny(tmp_path / "parts", parts, data=flags(folder).replace(" --split 1", "")))
    (line, *_) = read_lines(tmp_path / "parts" / "evaluations.jsonl")
    assert line["loss/a"] > 0 and line["loss/b"] > 0


def test_dp_changes_no_row(folder: Path, tmp_path: Path) -> None:
    both = []
    for size in (1, 2):
        run = tmp_path / f"dp_{size}"
        train_on_ranks(tiny(run, f"--dp {size} --train-iters 5", data=flags(folder)), world_size=size)
        both.append(np.array(list(steps_of(run).values())))
    assert both[1] == pytest.approx(both[0], rel=1e-5)


def test_the_audit_is_printed_before_the_first_step_and_kept(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    output = train_on_ranks(tiny(run, "--train-iters 1", data=flags(folder)))
    text, page = (run / "audit.txt").read_text(), (run / "audit.html").read_text()
    assert output.index("trained tokens") < output.index("iteration")
    assert "a: 22 lines, format openai, chat template of " in text
    assert text.count("--- sample") == page.count("<h2>") == 3
    assert "\u27e6" in text and "<mark>" in page and "&lt;|im_end|&gt;</mark>" in page
    assert text.strip() in output


def test_other_chats_are_another_run(folder: Path, tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path / "run", "--train-iters 1", data=flags(folder)))
    for changed, name in (
        (flags(folder).replace("0.6", "0.5"), "data.data_path was"),
        (flags(folder, "--train-on last"), "chat.train_on was assistant and is last"),
        (flags(folder, "--no-pack-samples"), "chat.pack_samples was True and is False"),
    ):
        found = call_main(tiny(tmp_path / "run", "--train-iters 2", data=changed))
        assert found.status == 2
        assert f"the run in this folder was started with other settings: {name}" in found.errors


def test_what_is_wrong_with_chats_ends_a_run_with_one_sentence(folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", [said("q", " ")])
    data = flags(folder).replace(f"0.6 {folder / 'a.jsonl'} 0.4 {folder / 'b.jsonl'}", str(path))
    found = call_main(tiny(tmp_path / "run", data=data))
    assert found.status == 2
    assert f"{path}:1: message 2 of the assistant is empty" in found.errors
    assert "Traceback" not in found.errors
