"""Tests of what a run meets on its machine: odd files in its folder, impossible paths and places, full disks."""

import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import call_main, run_job, tiny, write_tokens

from megatronish.commands.generate import read_prompts
from megatronish.commands.import_config import import_config
from megatronish.config.dump import section_of
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError, WholeRunError
from megatronish.core.files import naming
from megatronish.data.chat.setup import read_template
from megatronish.formats.hf.family import read_json
from megatronish.formats.peft import config as peft
from megatronish.formats.safetensors import read_file
from megatronish.launch.os_errors import is_lost_rank, mishap
from megatronish.launch.patience import apart, within
from megatronish.launch.place import Place
from megatronish.launch.rank import run_rank
from megatronish.launch.slurm import expand_hosts
from megatronish.launch.terminal import patient
from megatronish.parallel.schedules.recorded import Recorded
from megatronish.tokenizer.build import build_tokenizer
from megatronish.train.folder import make_writable
from megatronish.train.run import draw_curves, lost_rank
from megatronish.watch.record import RankRecord

MAKE: dict[str, Callable[[Path], None]] = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/full"),
}


@pytest.mark.parametrize("kind", list(MAKE))
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "loss.png", ".lock", "checkpoints/.lock"])
def test_an_odd_file_is_refused_before_training(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    MAKE[kind](path)
    ended = call_main(tiny(tmp_path / "run"))
    assert ended.status == 2 and "Traceback" not in ended.errors
    assert f"{path} is {'a folder' if kind == 'folder' else 'no ordinary file'}, and the run writes its" in ended.errors


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_state_that_never_ends_is_a_damaged_checkpoint(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    state = folder / "state.json"
    if kind == "pipe":
        os.mkfifo(state)
    else:
        state.symlink_to("/dev/zero")
    ended = call_main(tiny(tmp_path / "run"))
    assert ended.status != 0 and "Traceback" not in ended.errors and "step_00000001" in ended.errors


@pytest.mark.parametrize("path", ["x" * 300, "a/" * 2500 + "x"])
def test_a_path_that_no_system_takes_is_a_sentence(tmp_path: Path, path: str) -> None:
    ended = call_main(tiny(tmp_path / "run", "--tokenizer-type bytes", data=f"--data-path {path}"))
    assert ended.status == 2 and f"a path of {len(path)} characters is too long" in ended.errors


def test_a_folder_in_the_place_of_data_is_told(tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"x{end}").mkdir()
    ended = call_main(tiny(tmp_path / "run", "--tokenizer-type bytes", data=f"--data-path {tmp_path}/x"))
    assert ended.status == 2 and f"{tmp_path}/x.bin is no file but a folder, a pipe or a device" in ended.errors


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda path: read_json(path.parent),
    "model.safetensors": read_file,
    "adapter_config.json": peft.read_config,
    "ds_config.json": lambda path: import_config("deepspeed", path),
    "template.jinja": read_template,
    "prompts.txt": read_prompts,
    "words.tiktoken": lambda path: build_tokenizer(DataConfig(tokenizer_type="tiktoken", tokenizer_model=str(path))),
    "tokenizer.json": lambda path: build_tokenizer(DataConfig(tokenizer_type="huggingface", tokenizer_model=str(path))),
    "a.model": lambda path: build_tokenizer(DataConfig(tokenizer_type="sentencepiece", tokenizer_model=str(path))),
    "recorded.json": Recorded.read,
}


@pytest.mark.parametrize("name", list(READERS))
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=name):
        READERS[name](tmp_path / name)


def test_a_pipe_of_the_shell_is_read_as_a_file() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        stream.write("a prompt")
    try:
        assert read_prompts(Path(f"/dev/fd/{read}")) == ("a prompt",)
    finally:
        os.close(read)


def test_links_that_go_round_hold_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    ended = call_main(tiny(tmp_path / "run", f"--load {tmp_path}/circle"))
    assert ended.status == 2 and f"{tmp_path}/circle holds no checkpoint" in ended.errors


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_folder_whose_modes_allow_what_its_file_system_refuses_is_told() -> None:
    with pytest.raises(UserError, match=r"--save /proc/self/fdinfo cannot be written: .*; choose another"):
        make_writable(Path("/proc/self/fdinfo"), flag="--save")


def test_a_config_with_a_number_of_thousands_of_digits_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"[model]\nnum_layers = {'1' * 5000}\n")
    ended = call_main(tiny(tmp_path / "run", f"--config {tmp_path}/a.toml"))
    assert ended.status == 2 and f"--config {tmp_path}/a.toml is not TOML" in ended.errors


def test_a_saved_config_with_values_of_other_types_is_refused() -> None:
    assert section_of(ModelConfig, {"num_layers": 2, "rotary_base": 10}).num_layers == 2
    with pytest.raises(TypeError, match="num_layers=two must be a whole number"):
        section_of(ModelConfig, {"num_layers": "two"})
    with pytest.raises(TypeError, match="there is no layers"):
        section_of(ModelConfig, {"layers": 2})


@pytest.mark.parametrize(
    "values", [{"r": "x"}, {"r": 0}, {"lora_alpha": "x"}, {"lora_dropout": "x"}, {"rank_pattern": 3}]
)
def test_numbers_of_an_adapter_that_are_none_are_told(tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(UserError, match="fetch it again"):
        peft.our_config(tmp_path / "adapter_config.json", {"peft_type": "LORA", **values})


def plant_memory_error() -> None:
    """Planted in a job: the first step cannot have its memory."""
    from megatronish.engine.engine import Engine

    def step(*_: object, **__: object) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:135] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 99 bytes. Error code 12 (Cannot allocate memory)"
        )

    Engine.step = step  # type: ignore[assignment, method-assign]


def test_too_little_memory_is_a_sentence(tmp_path: Path) -> None:
    ended = run_job(tiny(tmp_path / "run", "--dp 2"), tmp_path, plant=plant_memory_error)
    assert ended.status == 1 and "Traceback" not in ended.errors
    assert "failed: the memory of this rank is full (err == 0. DefaultCPUAllocator" in ended.errors


def test_mishaps_have_remedies_and_bugs_keep_their_tracebacks() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    assert mishap(full) == (
        "/data/x: No space left on device; free space there, and start again; a training run resumes from its newest "
        "checkpoint"
    )
    limit = "File too large; raise the limit on the size of a file (ulimit -f unlimited)"
    assert mishap(torch.distributed.DistStoreError("File too large")) == limit  # the file in which ranks meet
    assert mishap(MemoryError()) is not None
    assert mishap(RuntimeError("shapes differ")) is None
    assert mishap(FileNotFoundError(errno.ENOENT, "none", "x")) is None


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libscipy_openblas64_.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_limit_on_the_address_space_is_named_where_there_is_one(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ulimit -v" not in (mishap(error) or "")
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (500 << 20, 500 << 20))
    said = mishap(error)
    assert said is not None
    assert said.startswith("the limit on the address space of a process is 500 MiB (ulimit -v), and libraries")
    assert said.endswith(": ulimit -v unlimited")


def with_small_files(num_bytes: int) -> None:
    """Planted in a job: no file of it can be larger, as by `ulimit -f`; Python would keep bytecode that is cut."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def test_the_first_file_beyond_a_limit_of_sizes_is_named_with_the_limit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = run_job(tiny(run), tmp_path, plant=with_small_files, plant_args=(700,))
    assert ended.status == 1
    assert ended.errors.endswith(
        f"{run}/config.toml: File too large; raise the limit on the size of a file (ulimit -f unlimited), and start "
        "again; a training run resumes from its newest checkpoint\n"
    )
    assert not list(run.glob("config.*"))


def test_a_full_disk_is_told_with_the_first_file_that_has_no_room(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(OSError, match=r"No space left on device: '.*/config\.toml'") as caught, naming(path):
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    assert str(mishap(caught.value)).startswith(f"{path}: No space left on device; free space there, and start again")


def test_a_file_system_without_inodes_has_a_remedy_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=found.f_files or 1, f_favail=0))
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))
    assert "remove files there, because its file system can have no more of them (df -i), and" in str(mishap(full))


def test_what_another_start_would_meet_again_has_status_2(tmp_path: Path) -> None:
    def fail(_place: Place) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/data/x")

    ending = run_rank(fail, Place(0, 1, 0, 1), tmp_path)
    assert ending.status == 2 and str(ending.message).startswith("/data/x: Permission denied; change its permissions")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_data_that_the_disk_does_not_give_are_told_and_may_be_there_at_the_next_start(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "x")
    (tmp_path / "x.idx").unlink()
    (tmp_path / "x.idx").symlink_to("/proc/self/mem")  # its first page cannot be read: EIO
    ended = call_main(tiny(tmp_path / "run", "--tokenizer-type null", data=f"--data-path {prefix}"))
    assert ended.status == 1, ended.errors
    assert f"the data {prefix} cannot be read: Input/output error; let this user read it, or copy it" in ended.errors


def without_threads(_thread: object) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_its_work_is_done_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threading.Thread, "start", without_threads)
    assert within(1.0, lambda: 3, otherwise=0) == 3
    with (tmp_path / "out").open("w") as out, patient(out) as (stream,):
        stream.write("a line")
    assert (tmp_path / "out").read_text() == "a line"
    assert mishap(RuntimeError("unable to start watchdog thread")) == mishap(RuntimeError("can't start new thread"))


@pytest.mark.processes
def test_a_call_in_a_process_of_its_own_is_given_up() -> None:
    assert apart(10.0, lambda: (3, [Path("x")]), otherwise=None) == (3, [Path("x")])
    with pytest.raises(ZeroDivisionError):
        apart(10.0, lambda: 1 // 0, otherwise=7)
    assert apart(0.1, lambda: time.sleep(60), otherwise=7) == 7


@pytest.mark.processes
def test_handlers_of_this_process_do_not_run_in_a_call_of_its_own(tmp_path: Path) -> None:
    own = os.getpid()

    def end_itself() -> int:
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGTERM)
        return 5  # of the second call, here: a child that was killed says nothing

    before = signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "handled").touch())
    try:
        assert apart(10.0, end_itself, otherwise=7) == 5
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "handled").exists()


def test_a_collective_that_lost_its_rank_is_known_by_what_the_backend_says() -> None:
    assert is_lost_rank(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"))
    assert not is_lost_rank(RuntimeError("shapes differ")) and not is_lost_rank(BrokenPipeError("Broken pipe"))


def test_curves_that_cannot_be_drawn_fail_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tokens": 1, "learning_rate": 1}\n')
    (tmp_path / "loss.png").mkdir()
    draw_curves(tmp_path)
    assert "the curves were not drawn: " in capsys.readouterr().err


def test_a_list_of_a_billion_hosts_is_refused() -> None:
    with pytest.raises(Exception, match="names more than 1,000,000 hosts"):
        expand_hosts("n[1-999999999]")


def plant_move(after_step: int) -> None:
    """Planted in a job: the run folder is moved away after that step."""
    from megatronish.train.trainer import Trainer

    step = Trainer.step

    def stepped(self: Trainer, *args: object) -> object:
        record = step(self, *args)  # type: ignore[arg-type]
        if record.step == after_step and torch.distributed.get_rank() == 0:
            folder = self.hooks[-1].path.parent  # type: ignore[attr-defined]
            folder.rename(folder.with_name("moved"))
        return record

    Trainer.step = stepped  # type: ignore[assignment, method-assign]


def test_a_run_folder_that_is_moved_away_is_not_made_again(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", "--dp 2 --save-interval 4")
    ended = run_job(argv, tmp_path, plant=plant_move, plant_args=(3,))
    assert ended.status == 1 and "Traceback" not in ended.errors
    assert "it was moved or removed while the run was in it; move it back" in ended.errors
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_rank_that_lost_another_says_in_which_collective_and_with_whom() -> None:
    record = RankRecord()
    record.step = 9
    record.line("dp", [0, 2]).enter("all_reduce", torch.zeros(3))
    error = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711\nmore")
    told = lost_rank(record, error)
    assert "\n" not in told
    assert "all_reduce 1 of dp (ranks 0, 2) failed in step 9 (Connection closed by peer [10.0.0.2]:4711)" in told


def test_a_sentence_about_the_whole_run_accuses_no_rank(tmp_path: Path) -> None:
    def fail(_place: Place) -> int:
        raise WholeRunError("the ranks 2, 3 differ")

    ending = run_rank(fail, Place(0, 4, 0, 4), tmp_path)
    assert (ending.status, ending.message, ending.is_of_run) == (1, "the run failed: the ranks 2, 3 differ", True)
