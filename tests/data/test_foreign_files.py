"""Tests of files of strangers and odd values that would fill the memory or take for ever: each is one sentence."""

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatronish.commands.draw import DrawArguments, refuse_arguments, report
from megatronish.commands.draw import planned as planned_drawing
from megatronish.config.check import missing_files
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.training import parse_batch_sizes
from megatronish.core.errors import UserError, shown
from megatronish.data import readers
from megatronish.formats import safetensors
from megatronish.formats.megatron.values import value_of
from megatronish.formats.torch_file.archive import TorchFile
from megatronish.formats.torch_file.unpickler import Storage, Stored
from megatronish.launch.os_errors import mishap


@pytest.mark.parametrize("text", ["", ".", "/", "..", "a\0b", "x" * 5000, "a/" * 2500, "x" * 250])
def test_a_data_path_that_is_none_is_one_sentence(text: str) -> None:
    (complaint,) = missing_files(DataConfig(data_path=(text,)))
    assert complaint.startswith("data_path=")
    assert len(complaint) < 300


def test_a_line_of_gigabytes_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    path = tmp_path / "long.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "a"}\n{"text": "')
        for _ in range(32):
            file.write(b"a" * (1 << 20))
    with pytest.raises(UserError, match=r"long\.jsonl\.gz: line 2 has more than 1,048,576 bytes"):
        list(readers.read_batches(path, ("text",)))


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n"])
def test_lines_of_any_length_are_cut_at_their_ends(end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH_BYTES", 64)
    written = [json.dumps({"text": "a" * length}).encode() for length in (0, 1, 50, 51, 52, 53, 63, 64, 200, 3, 1)]
    (tmp_path / "lines.jsonl").write_bytes(b"\n".join(written) + end)
    read = {}
    for batch in readers.read_batches(tmp_path / "lines.jsonl", ("text",)):
        read |= dict(enumerate(batch.lines, batch.first_line))
    assert [read[number].strip() for number in range(1, 12)] == written


def test_a_header_of_a_million_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MOST_TENSORS", 10)
    header = json.dumps({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(11)}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="it names 11 tensors, and no model has more than 10"):
        safetensors.read_file(tmp_path / "a.safetensors")


def test_shapes_of_a_pickle_that_are_none_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    file = TorchFile(tmp_path / "a.pt")
    storage, nested = Storage("0", torch.float32, 2), ()
    for _ in range(60):
        nested = (nested, nested)  # type: ignore[assignment]
    for shape in (5, None, "ab", nested, (nested,), (True,), (-1,), (2.0,), (2**70,), (1,) * 100, {1: 1}):
        for stored in (
            Stored(storage, torch.float32, 0, shape, (1,)),
            Stored(storage, torch.float32, 0, (2,), shape),
            Stored(storage, torch.float32, nested, (2,), (1,)),  # type: ignore[arg-type]
        ):
            with pytest.raises(UserError, match="is damaged"):
                file.tensor(stored)


def test_an_argument_of_a_checkpoint_has_the_bounds_of_its_flag() -> None:
    with pytest.raises(UserError, match="its argument num_layers is 1000000000, and must be at most 100000"):
        value_of({"num_layers": 10**9}, "num_layers")


@pytest.mark.parametrize(
    "flags", [{"stages": 100_000, "microbatches": 2}, {"stages": 2, "microbatches": 2, "chunks": 10**9}]
)
def test_a_drawing_is_bounded_by_its_cells(flags: dict[str, int]) -> None:
    with pytest.raises(UserError, match="is a table of more than 1,000,000 cells"):
        refuse_arguments(DrawArguments(**flags))


def test_times_of_very_different_size_are_drawn_in_a_bounded_table() -> None:
    arguments = DrawArguments(stages=4, microbatches=4, forward=1e9, weight=1e-9)
    refuse_arguments(arguments)
    assert len(report(planned_drawing(arguments)[1], is_real=False)) < 50_000_000
    with pytest.raises(UserError, match=r"forward=1e\+300 must not be negative or above 1e\+12"):
        refuse_arguments(DrawArguments(forward=1e300))


def test_a_number_of_thousands_of_digits_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="has a number of 5,000 digits"):
        parse_batch_sizes([f"0:{'9' * 5000}"], seq_length=16)


def test_what_is_shown_moves_no_cursor_and_fills_no_screen() -> None:
    assert shown("a\x1b[31m\r\u202eb\tc\nd") == r"a\x1b[31m\r\u202eb" + "\tc\nd"
    assert len(str(UserError("x" * 1_000_000 + "; use another"))) < 2500
    assert str(UserError("x" * 1_000_000 + "; use another")).endswith("; use another")
    assert len(shown("line\n" * 100_000)) < 10_000


def test_too_few_open_files_are_told_before_ranks_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatronish", "pretrain", "--num-layers", "2"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "the limit of open files is 48, and ranks need 128 each: ulimit -n 4096\n"
    said = mishap(RuntimeError("[enforce fail at loop.cc:105] fd_ != -1. epoll_create: Too many open files"))
    assert said == "Too many open files; raise the limit of open files: ulimit -n 4096"
