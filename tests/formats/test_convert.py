"""Tests of conversion for its user: accepted inputs, errors, messages, and bounded memory."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conversions import logits_of, to_hf, to_ours
from jobs import run_job, started, state_of, tiny, train_on_ranks
from paths import GOLDEN, ROOT
from ranks import wait_until
from safetensors.torch import load_file
from scripts import run_file

from megatronish.commands.convert import ConvertArguments as Arguments
from megatronish.commands.convert import main, run
from megatronish.config.sections.data import DataConfig
from megatronish.core import foreign
from megatronish.core.errors import RunError, UserError
from megatronish.formats import native, tokenizer_files
from megatronish.formats.convert import FORMATS, convert
from megatronish.formats.hf import tensors as hf
from megatronish.formats.hf.family import HEAD
from megatronish.formats.safetensors import FILE, nbytes_of
from megatronish.formats.weights import LazyTensor, Model, from_ours
from megatronish.train.checkpoint_state import FACTS, POSITION

HF = GOLDEN / "hf"
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4 --window-size 6"
)
TOKENS = torch.arange(12).view(1, 12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks with checkpoints of two steps."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    train_on_ranks(tiny(run_dir, f"{LLAMA} --tp 2 --pp 2 --train-iters 2 --save-interval 1"), world_size=4)
    return run_dir


def test_what_a_run_has_trained_goes_to_hugging_face_and_back(tmp_path: Path, trained: Path) -> None:
    report = to_hf(trained, tmp_path / "theirs")
    assert (report.tensors_in, report.tensors_out) == (15, 21)
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "mistral"
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    first, again = native.read(trained), native.read(tmp_path / "ours")
    assert first.tensors.keys() == again.tensors.keys()
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor.read(), again.tensors[name].read()), name
    assert torch.equal(logits_of(trained, TOKENS, tp=1), logits_of(tmp_path / "ours", TOKENS, tp=1))


def test_the_step_that_is_asked_for_is_taken(tmp_path: Path, trained: Path) -> None:
    for step, load in ((1, trained), (2, trained / "checkpoints"), (None, trained / "checkpoints" / "step_00000001")):
        reading = {} if step is None else {"step": step}
        save = tmp_path / f"{step}"
        convert(load, save, source="megatronish", target="megatronish", reading=reading)
        wanted = native.read(trained, step=step or 1)
        assert all(torch.equal(t.read(), wanted.tensors[name].read()) for name, t in native.read(save).tensors.items())
    with pytest.raises(UserError, match="the steps there: 1, 2"):
        convert(trained, tmp_path / "no", source="megatronish", target="hf", reading={"step": 3})
    with pytest.raises(UserError, match="holds no checkpoint"):
        convert(tmp_path / "nothing", tmp_path / "no", source="megatronish", target="hf")


def test_a_converted_checkpoint_says_what_a_run_s_says(tmp_path: Path) -> None:
    to_ours(HF / "llama3", tmp_path / "checkpoints")
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000000\n"
    state = state_of(tmp_path, 0)
    assert {*FACTS, *POSITION} <= state.keys()
    assert (state["step"], state["has_optimizer"], state["weights_only"]) == (0, False, True)
    assert state["origin"]["hf"] == json.loads((HF / "llama3" / "config.json").read_text())
    assert native.read(tmp_path).tensors["final_norm.weight"].dtype == torch.float32


def test_a_run_starts_from_converted_weights_wherever_they_lie_and_whatever_their_type(
    tmp_path: Path, trained: Path
) -> None:
    for save, flags in ((tmp_path / "half", f"--load {tmp_path / 'half'}"), (tmp_path / "run" / "checkpoints", "")):
        convert(trained, save, source="megatronish", target="megatronish", dtype=torch.bfloat16)
        # A step so small that no weight moves.
        flags += f" {LLAMA} --tp 2 --train-iters 1 --lr 1e-30"
        output = train_on_ranks(tiny(tmp_path / "run", flags), world_size=2)
        assert f"took the weights of {save}" in output
        found = native.read(tmp_path / "run").tensors
        for name, tensor in native.read(trained).tensors.items():
            assert torch.equal(found[name].read(), tensor.read().bfloat16().float()), name
        shutil.rmtree(tmp_path / "run")


def test_nothing_is_written_over(tmp_path: Path, trained: Path) -> None:
    before = sorted(trained.rglob("*"))
    for target in FORMATS:
        with pytest.raises(UserError, match=r"already"):
            convert(HF / "llama", trained / "checkpoints", source="hf", target=target)
    assert sorted(trained.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    to_ours(HF / "llama", tmp_path / "empty")
    with pytest.raises(UserError, match="holds latest already"):
        to_ours(HF / "llama", tmp_path / "empty")


@pytest.mark.parametrize("target", FORMATS)
def test_a_folder_may_be_empty_and_here_and_reached_by_a_link(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    monkeypatch.chdir(tmp_path / "here")
    for save in (Path(), tmp_path / "link"):
        convert(HF / "llama", save, source="hf", target=target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "linked"]
    assert len(list((tmp_path / "linked").iterdir())) == 2


def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in FORMATS:
        with pytest.raises((RunError, UserError), match=r"(?i)not a directory|exists"):
            convert(HF / "llama", tmp_path / "file", source="hf", target=target)
        with pytest.raises(UserError, match="Not a directory"):
            convert(HF / "llama", tmp_path / "file" / "save", source="hf", target=target)


def fails() -> torch.Tensor:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("target", FORMATS)
def test_a_full_disk_leaves_nothing(tmp_path: Path, target: str) -> None:
    description, theirs = hf.read(HF / "llama")
    full = {name: LazyTensor(tensor.shape, tensor.dtype, fails) for name, tensor in theirs.items()}
    source = FORMATS["hf"]._replace(read=lambda _load: Model(description, full))
    with patch.dict(FORMATS, hf=source), pytest.raises(RunError, match="No space left on device"):
        convert(HF / "llama", tmp_path / "save", source="hf", target=target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", FORMATS)
def test_a_folder_that_exists_is_filled_and_not_replaced_for_it_may_be_the_root_of_a_disk(
    tmp_path: Path, target: str
) -> None:
    disk = tmp_path / "disk"
    (disk / "lost+found").mkdir(parents=True)
    (disk / ".partial").mkdir()  # of a conversion that was killed
    number, rename, moved = disk.stat().st_ino, Path.rename, list[str]()

    def rename_and_tell(path: Path, to: Path) -> Path:
        if to.parent == disk:
            moved.append(to.name)
        return rename(path, to)

    def rename_and_fail(path: Path, to: Path) -> Path:
        if to == disk / moved[-1]:
            raise OSError(28, "No space left on device")
        return rename(path, to)

    with patch.object(Path, "rename", rename_and_tell):
        convert(HF / "llama", disk, source="hf", target=target)
    assert disk.stat().st_ino == number
    assert sorted(path.name for path in disk.iterdir()) == sorted(["lost+found", *moved])
    assert moved[-1] == {"hf": "config.json", "megatronish": "latest"}.get(target, "latest_checkpointed_iteration.txt")
    for name in moved:
        shutil.rmtree(disk / name) if (disk / name).is_dir() else (disk / name).unlink()
    with patch.object(Path, "rename", rename_and_fail), pytest.raises(RunError, match="no partial file is left"):
        convert(HF / "llama", disk, source="hf", target=target)
    assert [path.name for path in disk.iterdir()] == ["lost+found"]


def test_a_value_that_the_asked_type_cannot_hold_is_told_with_its_name(tmp_path: Path) -> None:
    description, theirs = hf.read(HF / "llama")
    name = "model.norm.weight"
    values = theirs[name].read()
    values[3] = -7e4
    tensors = {**theirs, name: LazyTensor(tuple(values.shape), values.dtype, values.clone)}
    source = FORMATS["hf"]._replace(read=lambda _load: Model(description, tensors))
    with patch.dict(FORMATS, hf=source):
        for target, place in (("hf", name), ("megatronish", "final_norm.weight")):
            with pytest.raises(UserError, match=f"{place} holds 70000, .* float16; .* bfloat16 or float32"):
                convert(tmp_path, tmp_path / target, source="hf", target=target, dtype=torch.float16)
            assert not (tmp_path / target).exists()
        values[3] = float("-inf")  # is none that becomes infinite
        convert(tmp_path, tmp_path / "infinite", source="hf", target="hf", dtype=torch.float16)
    assert load_file(tmp_path / "infinite" / FILE)[name][3] == float("-inf")


def test_a_tensor_that_the_target_has_no_place_for_is_left_out_where_that_is_allowed(tmp_path: Path) -> None:
    format_ = FORMATS["hf"]
    fewer = format_._replace(rules=lambda description: format_.rules(description)[:-1])
    to_ours(HF / "llama", tmp_path / "ours")
    with patch.dict(FORMATS, hf=fewer):
        with pytest.raises(UserError, match=r"hf has no place for head.weight"):
            to_hf(tmp_path / "ours", tmp_path / "theirs")
        report = convert(
            tmp_path / "ours", tmp_path / "theirs", source="megatronish", target="hf", allow_unmatched=True
        )
    assert report.unmatched_out == ("head.weight",)
    assert HEAD not in load_file(tmp_path / "theirs" / FILE)


def test_the_tokenizer_that_a_run_names_travels_along_under_the_name_that_others_look_for(tmp_path: Path) -> None:
    for name in ("demo.model", "bpe.json", "tokenizer_config.json", "vocab.bpe"):
        (tmp_path / name).touch()
    cases = {
        "demo.model": DataConfig(tokenizer_type="sentencepiece", tokenizer_model=str(tmp_path / "demo.model")),
        "bpe.json": DataConfig(tokenizer_type="huggingface", tokenizer_model=str(tmp_path / "bpe.json")),
        "vocab.bpe": DataConfig(
            tokenizer_type="huggingface", vocab_file=str(tmp_path / "bpe.json"), merge_file=str(tmp_path / "vocab.bpe")
        ),
        "": DataConfig(tokenizer_type="bytes"),
    }
    found = {name: sorted(tokenizer_files.files_of(data)) for name, data in cases.items()}
    assert found == {
        "demo.model": ["tokenizer.model"],
        "bpe.json": ["tokenizer.json", "tokenizer_config.json"],
        "vocab.bpe": ["merges.txt", "vocab.json"],
        "": [],
    }


def told(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 0
    return capsys.readouterr().out


def test_the_tool_tells_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, sharded = tmp_path / "ours", tmp_path / "sharded"
    output = told(Arguments("hf", "megatronish", HF / "llama", ours, dtype="bfloat16"), capsys)
    assert "21 tensors in, 15 tensors out: 1,688 parameters, 3.4 kB in" in output
    assert re.search(r"^  in +21\n  out +15\n  left out on purpose +0\n  unused +0\n  unset +0$", output, re.MULTILINE)
    assert "the optimizer's state and the order of the data start from the beginning" in output
    assert f"saved {ours}" in output
    told(Arguments("megatronish", "hf", ours, sharded, ckpt_step=0, max_shard_bytes=2000), capsys)
    assert len(list(sharded.glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"target_tensor_parallel_size": 2}, "--target-tensor-parallel-size says nothing about how megatronish is w"),
        ({"ckpt_step": 3}, "--ckpt-step says nothing about how hf is read"),
        ({"max_shard_bytes": 3}, "--max-shard-bytes says nothing about how megatronish is written"),
        ({"target": "hf", "max_shard_bytes": 0}, "--max-shard-bytes 0 must be at least 1"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    arguments = {"source": "hf", "target": "megatronish", "load": HF / "llama", "save": tmp_path / "save"} | options
    with pytest.raises(UserError, match=why):
        run(Arguments(**arguments))
    assert not (tmp_path / "save").exists()


def test_what_the_user_can_mend_ends_with_one_sentence_and_status_2(tmp_path: Path) -> None:
    words = ["--from", "hf", "--to", "megatronish", "--load", str(tmp_path), "--save", str(tmp_path / "save")]
    done = run_job(words, tmp_path, main=main)
    assert done.status == 2
    assert done.errors.strip().count("\n") == 0
    assert "holds no config.json" in done.errors


def _read_pipes() -> None:
    """Of the process: a pipe, which is refused otherwise, is what the tool waits for."""
    foreign.ordinary = lambda path: path  # type: ignore[attr-defined]


def _is_read(pipe: Path) -> bool:
    """Whether somebody has the pipe open. Ours stays open: without a writer, he would find the end."""
    try:
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("target", ["megatronish", "hf", "megatron-dist"])
def test_ctrl_c_while_tensors_are_written_leaves_nothing(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch wraps whatever ends a write of its checkpoints, an interrupt too."""

    def interrupted(tensor: LazyTensor, _bar: Any) -> LazyTensor:
        def press(_values: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

        return tensor.mapped(press)

    monkeypatch.setattr("megatronish.formats.convert._counted", interrupted)
    words = ["--from", "hf", "--to", target, "--load", str(HF / "llama"), "--save", str(tmp_path / "save")]
    assert main(words) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_without_a_traceback(tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    words = ["--from", "hf", "--to", "hf", "--load", str(tmp_path), "--save", str(tmp_path / "save")]
    tool = partial(run_file, str(ROOT / "tools" / "convert_checkpoint.py"))
    with started(words, tmp_path / "printed", main=tool, plant=_read_pipes) as job:
        # It opens once the tool begins to read, which then waits for what never comes.
        assert wait_until(lambda: _is_read(pipe) or not job.process.is_alive(), timeout=60), job.told
        # A signal that comes after Python's last look at signals and before read() begins does not interrupt read().
        for _ in range(60):
            job.signal(signal.SIGINT)
            if wait_until(lambda: not job.process.is_alive(), timeout=1):
                break
        assert (job.wait(), job.errors) == (130, "interrupted\n")


# Memory: a process may hold twice the largest tensor beyond what it holds before, and some buffers.

BIG = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
LARGEST = 8192 * 256 * 4  # bytes of the embedding
BUFFERS = 16 * 2**20
IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from megatronish.formats.convert import convert

def there_and_back(theirs, folder):
    convert(theirs, folder / "ours", source="hf", target="megatronish")
    for name in ("megatron", "megatron-dist"):
        convert(folder / "ours", folder / name, source="megatronish", target=name)
        convert(folder / name, folder / f"again {name}", source=name, target="megatronish")
    convert(folder / "ours", folder / "theirs", source="megatronish", target="hf")

small, big, folder = map(Path, sys.argv[1:4])
there_and_back(small, folder / "small")  # what is loaded once is loaded now
held = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
limit = held + int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
there_and_back(big, folder / "big")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux limits what a process may hold")
def test_a_model_larger_than_the_memory_that_is_allowed_is_converted(tmp_path: Path) -> None:
    big = tmp_path / "theirs"
    write_zeros(big)
    assert (big / FILE).stat().st_size > 5 * LARGEST
    for name in ("small", "big"):
        (tmp_path / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY, HF / "llama", big, tmp_path, str(2 * LARGEST + BUFFERS)],
        # glibc gives blocks of more than 32 MB back when they are freed; here those of 1 MB, for tensors are small.
        env=os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "big" / "theirs" / FILE).stat().st_size > 5 * LARGEST


def write_zeros(folder: Path) -> None:
    """A model of zeros, which take no place on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BIG))
    description = hf.describe(folder)
    ours = {name: LazyTensor(s.shape, torch.float32, fails) for name, s in description.shardings().items()}
    header, end = {}, 0
    for name, tensor in from_ours(ours, hf.rules(description)).tensors.items():
        start, end = end, end + nbytes_of(tensor)
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
