"""Tests of perplexity: every token is predicted once, against a loop that runs the model anew for each token."""

import json
import math
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import to_ours
from jobs import run_job, tiny, train_on_ranks, write_tokens
from paths import GOLDEN
from ranks import run_ranks

from megatronish.commands.inference_flags import EvaluateArguments as Arguments
from megatronish.commands.main import COMMANDS
from megatronish.commands.perplexity import be_rank, prepare, run, sequence_pieces, start_mesh, tell_of_short_windows
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.errors import UserError
from megatronish.core.remote import RemotePath
from megatronish.data.indexed import IndexedWriter
from megatronish.data.text import Windows
from megatronish.engine.engine import Engine
from megatronish.inference.load import find_trained, load_engine, load_model
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT

HF_LLAMA = GOLDEN / "hf" / "llama"
S = 16
EOD = 256
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --window-size 5 "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4"
)
TEXTS = ["Zoë met a fox.", "", "x", "the quick brown fox jumps over the lazy dog, again and again", "end"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of two models that have learned for three steps."""
    folder = tmp_path_factory.mktemp("runs")
    prefix = write_tokens(folder / "bytes", vocab_size=257)
    flags = "--vocab-size 300 --train-iters 3 --make-vocab-size-divisible-by 128"
    data = f"--tokenizer-type bytes --split 1,0,0 --data-path {prefix}"
    for kind, model in (("gpt2", ""), ("llama", LLAMA)):
        train_on_ranks(tiny(folder / kind, f"{flags} {model}", data=data))
    return {kind: folder / kind for kind in ("gpt2", "llama")}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TEXTS as JSON lines."""
    path = tmp_path_factory.mktemp("lines") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS))
    return path


def documents_of(texts: Sequence[str]) -> list[list[int]]:
    return [[*text.encode(), EOD] if text else [] for text in texts]


def joined(documents: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(documents))


def write(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    with IndexedWriter(prefix, dtype=np.dtype("uint16")) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


@torch.no_grad()
def loss_of(model: GPT, seen: Sequence[int], token: int) -> float:
    """Of one prediction, from the tokens seen alone."""
    ids = torch.tensor([seen])
    places = torch.arange(len(seen))[None]
    batch = MicroBatch(ids, ids, torch.ones_like(ids, dtype=torch.bool), places, torch.zeros(1).long())
    logits = model.logits(model.hidden(None, batch, step=None))[-1, 0, : model.vocab_size]
    return -float(logits.double().log_softmax(-1)[token])


def by_hand(model: GPT, spans: Sequence[Sequence[int]], *, seq_length: int = S, stride: int = S) -> tuple[int, float]:
    """Predictions and the mean loss, one token after another."""
    losses = []
    for tokens in spans:
        for place in range(1, len(tokens)):
            start = max(0, -(-(place - seq_length) // stride)) * stride
            losses.append(loss_of(model, tokens[start:place], tokens[place]))
    return len(losses), math.fsum(losses) / len(losses)


def found_by(tmp_path: Path, **arguments: Any) -> dict[str, Any]:
    output = tmp_path / "found.json"
    assert run(Arguments(**arguments, output=output, device="cpu")) == 0
    return json.loads(output.read_text())


def random_document(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 257, length).tolist()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("length", [2, 7, S, S + 1, S + 2, 3 * S, 3 * S + 1, 3 * S + 2])
def test_every_token_but_the_first_is_predicted_once(runs: dict, tmp_path: Path, kind: str, length: int) -> None:
    tokens = random_document(length)
    prefix = write(tmp_path / "text", [tokens])
    found = found_by(tmp_path, load=runs[kind], data_path=prefix, micro_batch_size=2)
    num, loss = by_hand(load_model(runs[kind]).model, [tokens])
    assert found["tokens"] == num == length - 1
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["bits_per_byte"] is None


@pytest.mark.parametrize(("seq_length", "stride"), [(16, 4), (16, 1), (9, 9), (9, 5)])
def test_windows_overlap_and_no_prediction_counts_twice(
    runs: dict, tmp_path: Path, seq_length: int, stride: int
) -> None:
    documents = [random_document(length) for length in (29, 0, 3, 1, 17)]
    prefix = write(tmp_path / "text", documents)
    model = load_model(runs["llama"]).model
    for per_document, spans in ((False, [joined(documents)]), (True, documents)):
        asked = {"seq_length": seq_length, "stride": stride}
        found = found_by(tmp_path, load=runs["llama"], data_path=prefix, per_document=per_document, **asked)
        num, loss = by_hand(model, spans, **asked)
        assert (found["tokens"], found["documents"]) == (num, 5)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_windows_cover_any_text_and_show_enough() -> None:
    tokens = np.arange(1000)
    for length in (*range(2, 40), 200):
        for stride in (1, 3, 8):
            windows = Windows(tokens[:length], np.array([0, length]), seq_length=8, stride=stride)
            predicted = []
            for number in range(len(windows)):
                sample = windows.sample(number)
                assert sample.loss_mask is not None
                for place in sample.loss_mask.nonzero()[0].tolist():
                    assert sample.tokens[place] == sample.tokens[0] + place
                    assert place > 8 - stride or sample.tokens[0] == 0
                    predicted.append(int(sample.tokens[place]))
            assert predicted == list(range(1, length)), (length, stride)
            assert windows.num_predictions == length - 1
            for fill in (windows.sample(number) for number in range(len(windows), len(windows) + 2)):
                assert fill.loss_mask is not None
                assert not fill.loss_mask.any()


@pytest.mark.parametrize("per_document", [False, True])
def test_json_lines_are_the_same_as_the_files_made_of_them(
    runs: dict, lines: Path, tmp_path: Path, per_document: bool
) -> None:
    documents = documents_of(TEXTS)
    prefix = write(tmp_path / "text", documents)
    asked = {"load": runs["gpt2"], "per_document": per_document}
    ours, theirs = (found_by(tmp_path, data_path=path, **asked) for path in (str(lines), prefix))
    assert [ours[name] for name in ("tokens", "documents")] == [theirs[name] for name in ("tokens", "documents")]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    num, loss = by_hand(load_model(runs["gpt2"]).model, documents if per_document else [joined(documents)])
    assert ours["tokens"] == num
    assert ours["loss"] == pytest.approx(loss, rel=1e-5)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert ours["text_bytes"] == num_bytes
    assert ours["bits_per_byte"] == pytest.approx(loss * num / math.log(2) / num_bytes, rel=1e-5)


def test_a_text_on_object_storage_is_read_through_the_cache(runs: dict, lines: Path, tmp_path: Path) -> None:
    prefix, store = write(tmp_path / "text", documents_of(TEXTS)), RemotePath(f"memory://{tmp_path.name}")
    for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), lines):
        with (store / path.name).open("wb") as file:
            file.write(path.read_bytes())
    cache = {"data_store_cache_path": str(tmp_path / "cache"), "data_store_cache_size": 0.001}
    for name, path in (("text", prefix), ("text.jsonl", str(lines))):
        disk, streamed = (
            found_by(tmp_path, load=runs["gpt2"], data_path=place, **cache) for place in (path, f"{store.url}/{name}")
        )
        for number in ("tokens", "documents", "loss", "text_bytes"):
            assert disk[number] == streamed[number]
    assert any((tmp_path / "cache" / "blocks").rglob("00"))


def test_bad_lines_are_named_and_counted(
    runs: dict, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(lines.read_text() + '{"other": 1}\n\nno json\n')
    assert run(Arguments(load=runs["gpt2"], data_path=str(path))) == 0
    told = capsys.readouterr()
    assert f"bad line {path}:6: key 'text' is missing" in told.err
    assert f"bad line {path}:8: " in told.err
    assert f"{path}: 5 documents and 2 bad lines, " in told.out
    assert " bits/byte | " in told.out


def rank_of(place: Place, arguments: Arguments) -> None:
    assert be_rank(prepare(arguments, None), place) == 0


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2 with its sequence cut": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp 2": {"pipeline_model_parallel_size": 2, "micro_batch_size": 1},
    "dp 2 x cp 2": {"data_parallel_size": 2, "context_parallel_size": 2, "micro_batch_size": 1},
    "dp 3 with too few windows": {"data_parallel_size": 3, "micro_batch_size": 4},
    "dp 2 that shares parameters": {"data_parallel_size": 2, "zero_stage": 3, "micro_batch_size": 3},
    "tp 2 x pp 2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_what_one_process_finds(runs: dict, lines: Path, tmp_path: Path, layout: str) -> None:
    kind = "gpt2" if layout in ("pp 2", "dp 2 that shares parameters") else "llama"
    arguments: dict[str, Any] = {"load": runs[kind], "data_path": str(lines), "stride": 7, "device": "cpu"}
    one = found_by(tmp_path, **{name: value for name, value in arguments.items() if name != "device"})
    output = tmp_path / "layout.json"
    spread = Arguments(**arguments, **LAYOUTS[layout], output=output)
    run_ranks(prepare(spread, None).config.layout.world_size, rank_of, spread)
    found = json.loads(output.read_text())
    assert found["tokens"] == one["tokens"]
    assert found["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_documents_see_each_other_as_they_did_in_training(runs: dict, lines: Path, tmp_path: Path) -> None:
    flags = "--vocab-size 300 --train-iters 1 --tokenizer-type bytes --reset-position-ids --reset-attention-mask"
    prefix = write(tmp_path / "train", documents_of(TEXTS * 9))
    train_on_ranks(tiny(tmp_path / "run", flags, data=f"--split 1,0,0 --data-path {prefix}"))
    found = found_by(tmp_path, load=tmp_path / "run", data_path=str(lines))
    model = load_model(tmp_path / "run").model
    tokens = joined(documents_of(TEXTS))
    losses = []
    for place in range(1, len(tokens)):
        start = (place - 1) // S * S
        begins = [start, *(i + 1 for i in range(start, place - 1) if tokens[i] == EOD)]
        losses.append(loss_of(model, tokens[begins[-1] : place], tokens[place]))
    assert found["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)


def converted(folder: Path, **config: Any) -> Path:
    """Golden Llama in our format, its config.json changed."""
    shutil.copytree(HF_LLAMA, folder / "theirs")
    told = json.loads((HF_LLAMA / "config.json").read_text())
    (folder / "theirs" / "config.json").write_text(json.dumps(told | config))
    to_ours(folder / "theirs", folder / "ours")
    return folder / "ours"


def test_no_window_is_wider_than_the_text_and_none_is_empty(tmp_path: Path) -> None:
    load = converted(tmp_path, max_position_embeddings=131072)
    prefix = write(tmp_path / "text", [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]])
    whole = prepare(Arguments(load=load, data_path=prefix), None)
    assert (whole.windows.seq_length, whole.config.training.seq_length) == (10, 10)
    assert whole.config.training.micro_batch_size == len(whole.windows) == 1
    apart = prepare(Arguments(load=load, data_path=prefix, per_document=True), None)
    assert (apart.windows.seq_length, len(apart.windows), apart.windows.num_predictions) == (6, 2, 8)
    cut = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert prepare(Arguments(load=load, data_path=prefix, **cut), None).windows.seq_length == 12  # type: ignore[arg-type]
    num, loss = by_hand(load_model(load).model, [list(range(1, 12))], seq_length=99, stride=99)
    found = found_by(tmp_path, load=load, data_path=prefix)
    assert (found["tokens"], found["loss"]) == (num, pytest.approx(loss, rel=1e-5))
    found = found_by(tmp_path, load=load, data_path=prefix, seq_length=4, micro_batch_size=2)
    assert found["tokens"] == 10


def test_a_window_of_less_than_the_model_was_trained_with_is_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = converted(tmp_path, max_position_embeddings=131072)
    long = write(tmp_path / "long", [[1, 2, 3] * 1400])
    task = prepare(Arguments(load=load, data_path=long), None)
    assert task.windows.seq_length == 4096
    tell_of_short_windows(task)
    assert (
        "windows show 4,096 tokens, though the model was trained with 131,072: --seq-length" in capsys.readouterr().err
    )
    tell_of_short_windows(prepare(Arguments(load=load, data_path=long, seq_length=4096), None))
    assert not capsys.readouterr().err


def test_documents_end_with_the_models_token_whatever_the_tokenizer_puts_there(tmp_path: Path) -> None:
    load = converted(tmp_path, eos_token_id=[5, 7])
    lines = tmp_path / "numbers.jsonl"
    lines.write_text('{"text": "1 2"}\n{"text": "3"}\n')
    text = prepare(Arguments(load=load, data_path=str(lines)), None).text
    assert (text.tokens.tolist(), text.eod) == ([1, 2, 5, 3, 5], 5)


def test_an_engine_that_only_evaluates_holds_the_parameters_alone(runs: dict, lines: Path) -> None:
    task = prepare(Arguments(load=runs["gpt2"], data_path=str(lines)), None)
    mesh = start_mesh(task.config, Place())
    engine: Engine = load_engine(find_trained(runs["gpt2"]), task.config, mesh)
    assert not engine.data_parallel.gradients
    assert not engine.optimizer.state
    assert not any(parameter.requires_grad for parameter in engine.stage.model.parameters())


@pytest.mark.parametrize(
    ("layout", "pieces", "of_experts"),
    [((1, 1, False), 1, 1), ((3, 1, False), 1, 3), ((3, 1, True), 3, 3), ((3, 2, False), 4, 12), ((2, 4, True), 8, 8)],
)
def test_windows_are_as_long_as_the_layout_cuts_them(
    layout: tuple[int, int, bool], pieces: int, of_experts: int
) -> None:
    """cp deals chunks out in pairs; tp cuts what routers see, and all of it under sequence parallelism."""
    tp, cp, cuts = layout
    parallel = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=cuts)
    assert sequence_pieces(parallel, has_experts=False) == pieces
    assert sequence_pieces(parallel, has_experts=True) == of_experts


def test_the_program_starts_its_own_ranks(runs: dict, lines: Path, tmp_path: Path) -> None:
    argv = ["--load", str(runs["gpt2"]), "--data-path", str(lines), "--device", "cpu"]
    evaluate = COMMANDS["evaluate"].main()
    one, two = (run_job([*argv, *more], tmp_path, main=evaluate) for more in ((), ("--tp", "2", "--dp", "2")))
    assert (one.status, two.status) == (0, 0), (one, two)
    first, second = (done.output.splitlines()[1].rsplit("|", 2)[0] for done in (one, two))
    assert first == second
    refused = run_job([*argv, "--cp", "3"], tmp_path, main=evaluate)
    assert refused.status == 2
    assert refused.errors == (
        "seq_length=16 must be divisible by 2 x context_parallel_size=3 = 6; use --seq-length 18\n"
    )


def test_mistakes_are_told(runs: dict, lines: Path, tmp_path: Path) -> None:
    load = runs["gpt2"]
    one = write(tmp_path / "one", [[5]])
    short = write(tmp_path / "short", [[5], [6], []])
    foreign = write(tmp_path / "foreign", [[5, 6], [7, 300, 301]])
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"txt": 1}\n')
    for arguments, sentence in (
        (Arguments(load=tmp_path / "none", data_path=one), "none holds no checkpoint; name a run folder"),
        (Arguments(load=load, data_path=str(tmp_path / "no")), "data file .*no.idx does not exist; check the path"),
        (Arguments(load=load, data_path=str(tmp_path / "no.jsonl")), "--data-path .*no.jsonl does not exist; check"),
        (Arguments(load=load, data_path=f"{one}.bin"), "give the prefix without its ending: .*/one"),
        (Arguments(load=load, data_path=str(empty)), r"empty.jsonl holds no document \(1 bad lines\); each line"),
        (Arguments(load=load, data_path=one), "--data-path .*one holds 1 tokens, and perplexity needs at least two"),
        (Arguments(load=load, data_path=short, per_document=True), "has no document of two tokens"),
        (Arguments(load=load, data_path=foreign), "holds token 301 at place 4, but the model's vocabulary has 300"),
        (Arguments(load=load, data_path=str(lines), stride=17), "--stride 17 must be at least 1 and at most --seq-len"),
        (Arguments(load=load, data_path=str(lines), stride=0), "--stride 0 must be at least 1"),
        (Arguments(load=load, data_path=str(lines), seq_length=17), "seq_length=17 exceeds the 16 positions"),
        (Arguments(load=load, data_path=str(lines), micro_batch_size=0), "--micro-batch-size 0 must be at least"),
        (
            Arguments(load=load, data_path=str(lines), seq_length=0),
            "--seq-length 0 must be at least 1; or leave it out",
        ),
        (Arguments(load=load, data_path=str(lines), output=tmp_path / "no" / "x"), "no/x cannot be written: No such"),
        (Arguments(load=load, data_path=str(lines), json_key="txt"), "holds no document .* under txt"),
    ):
        with pytest.raises(UserError, match=sentence):
            run(arguments)
