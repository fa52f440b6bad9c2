"""Tests of --profile and --record-memory-history: traces, tables, the window of Nsight Systems, memory snapshots."""

import gzip
import json
import re
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engines import open_job
from jobs import call_main, run_job, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from sweeps import further

from megatronish.config.sections.run import LogConfig
from megatronish.launch.place import Place
from megatronish.parallel.comm import start_all_gather
from megatronish.report.plot import read_lines
from megatronish.train.hooks.profiler import (
    MeetStages,
    MemoryHistory,
    NsightWindow,
    OperatorProfile,
    StepWindow,
    snapshot_path,
    step_profiler,
)
from megatronish.train.trainer import Hook, StepRecord, Trainer
from megatronish.watch.record import RankRecord

TIMES = ("step_seconds", "data_seconds")
WINDOW = (
    "--profile --profile-step-start 2 --profile-step-end 4 --train-iters 4 --hidden-dropout 0 --attention-dropout 0"
)


def names_in(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}


def test_a_profile_is_a_trace_a_table_and_the_slowest_operators_and_changes_no_loss(tmp_path: Path) -> None:
    output = train_on_ranks(tiny(tmp_path / "run", f"{WINDOW} --pp 2 --profile-ranks 0 1"), world_size=2)
    folder = tmp_path / "run" / "profile"
    for rank in (0, 1):
        names = names_in(folder / f"rank_{rank}_step_2_to_3.trace.json.gz")
        assert {"step 2", "step 3", "aten::addmm"} <= names or {"step 2", "step 3", "aten::mm"} <= names
        assert not {"step 1", "step 4"} & names
        assert "aten::" in (folder / f"rank_{rank}_step_2_to_3.txt").read_text()
    assert f" profile of steps 2 to 3: {folder}/rank_0_step_2_to_3.trace.json.gz\n" in output
    rows = re.findall(r"^ +([\d.]+) ms +([\d.]+)% +\d+  \S", output, re.MULTILINE)
    assert len(rows) == 10
    assert [float(time) for time, _ in rows] == sorted((float(time) for time, _ in rows), reverse=True)
    assert sum(float(share) for _, share in rows) <= 100.5
    train_on_ranks(
        tiny(tmp_path / "plain", "--pp 2 --train-iters 4 --hidden-dropout 0 --attention-dropout 0"), world_size=2
    )
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "plain")


COMMUNICATION = {f"communication {axis}" for axis in ("tp", "cp", "dp", "pp", "ep")}


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        pytest.param("", 1, set(), marks=pytest.mark.sweep),
        further(("--tp 2 --sequence-parallel", 2, {"communication tp"})),
        pytest.param("--dp 2 --use-distributed-optimizer", 2, {"communication dp"}, marks=pytest.mark.sweep),
        pytest.param("--dp 2 --zero-stage 3", 2, {"communication dp"}, marks=pytest.mark.sweep),
        ("--pp 2 --pipeline-schedule 1f1b", 2, {"communication pp", "pipeline bubble"}),
        pytest.param("--cp 2", 2, {"communication cp", "communication dp"}, marks=pytest.mark.sweep),
        further(("--dp 2 --ep 2 --num-experts 4 --moe-router-topk 2", 2, {"communication ep", "communication dp"})),
    ],
    ids=["one process", "tp sp", "zero 1", "zero 3", "1f1b", "cp", "ep"],
)
def test_the_rows_of_a_profile_are_the_time_of_the_step(
    flags: str, world_size: int, expected: set[str], tmp_path: Path
) -> None:
    ranks = " ".join(map(str, range(world_size)))
    window = f"--profile --profile-step-start 2 --profile-step-end 5 --profile-ranks {ranks}"
    flags += f" --hidden-dropout 0 --attention-dropout 0 --train-iters 5 {window}"
    output = train_on_ranks(tiny(tmp_path / "run", flags), world_size=world_size)
    lines = {line["step"]: line for line in read_lines(tmp_path / "run" / "metrics.jsonl")}
    for rank in range(world_size):
        path = tmp_path / "run" / "profile" / f"rank_{rank}_step_2_to_4.breakdown"
        found = json.loads(path.with_suffix(".breakdown.json").read_text())
        assert [step["step"] for step in found["steps"]] == [2, 3, 4]
        rows = found["mean"]
        assert rows.keys() & {*COMMUNICATION, "pipeline bubble"} == expected, rows
        assert {"matrix products", "attention", "other compute", "optimizer", "data", "host"} <= rows.keys()
        assert path.with_suffix(".breakdown.png").read_bytes().startswith(b"\x89PNG")
        table = path.with_suffix(".breakdown.txt").read_text()
        assert table.startswith(f" where a step of rank {rank} went: ")
        if rank == 0:
            assert table in output
            # The clock of the loop. A busy machine may take the processor away between the two: the median counts.
            errors = [
                abs(step["seconds"] - step["rows"]["hooks"] - sum(lines[step["step"]][name] for name in TIMES))
                / step["seconds"]
                for step in found["steps"]
            ]
            assert statistics.median(errors) < 0.03, errors


def stop_while_a_peer_is_late(place: Place, folder: Path) -> tuple[int, int]:
    """Transfers in progress before and after a recording ends, while rank 1 is late for one that it has recorded."""
    job = open_job(place, "--dp 2")
    record, axis = job.mesh.record, job.mesh.dp
    hook = OperatorProfile(
        folder, log=LogConfig(profile_step_start=1, profile_step_end=2), rank=1, device=torch.device("cpu")
    )
    trainer = cast(Trainer, SimpleNamespace(progress=SimpleNamespace(step=0), record=record))
    if place.rank == 1:
        time.sleep(0.3)
        start_all_gather(torch.ones(4), axis).wait()
        return 0, 0
    hook.before_step(trainer)
    pending = start_all_gather(torch.ones(4), axis)
    before = len(record.recorded)
    hook.after_step(trainer, cast(StepRecord, SimpleNamespace(step=1)))
    after = len(record.recorded)
    assert pending.wait().tolist() == [1.0] * 8
    return before, after


def test_a_recording_ends_when_every_transfer_in_it_has_ended(tmp_path: Path) -> None:
    # The profiler's stop gives memory back into which the thread that ends a transfer writes: SIGSEGV, now and then.
    assert run_ranks(2, stop_while_a_peer_is_late, tmp_path)[0] == (1, 0)


def test_stages_meet_at_the_end_of_recorded_steps_alone() -> None:
    hook = MeetStages(LogConfig(profile=True, profile_step_start=2, profile_step_end=4))
    engine = SimpleNamespace(meets_stages=False)
    seen = []
    for done in range(5):
        hook.before_step(cast(Trainer, SimpleNamespace(engine=engine, progress=SimpleNamespace(step=done))))
        seen.append(engine.meets_stages)
    assert seen == [False, True, True, False, False]


def test_a_profile_has_shapes_and_lines_of_python_where_asked(tmp_path: Path) -> None:
    flags = f"{WINDOW} --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack"
    train_on_ranks(tiny(tmp_path / "run", f"{flags} --num-layers 1 --micro-batch-size 4"))
    trace = tmp_path / "run" / "profile" / "rank_0_step_2_to_3.trace.json.gz"
    assert any("engine.py" in name for name in names_in(trace))
    with gzip.open(trace, "rt") as file:
        assert any("Input Dims" in event.get("args", {}) for event in json.load(file)["traceEvents"])


def test_a_profile_goes_over_the_end_of_a_run_and_a_start_beyond_it_says_so(tmp_path: Path) -> None:
    flags = WINDOW.replace("--profile-step-end 4", "--profile-step-end 9")
    first = train_on_ranks(tiny(tmp_path / "run", f"{flags} --exit-interval 3"))
    assert "profile of steps 2 to 8" in first
    assert "step 3" in names_in(tmp_path / "run" / "profile" / "rank_0_step_2_to_8.trace.json.gz")
    beyond = train_on_ranks(tiny(tmp_path / "run", WINDOW))
    assert "--profile records nothing: steps 2 to 3 were before this start" in beyond
    early = train_on_ranks(tiny(tmp_path / "early", f"{WINDOW} --exit-interval 1"))
    assert "--profile recorded nothing: the run ended before steps 2 to 3; set --profile-step-start" in early


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--profile --profile-ranks 0 2", r"profile_ranks=2 is no rank of this run; use numbers from 0 to 1$"),
        ("--profile --profile-ranks=-1", r"profile_ranks=-1 is no rank of this run"),
        ("--profile --profile-ranks first", r"profile_ranks must be a list of whole numbers"),
        ("--profile --profile-step-start 9", r"profile_step_start=9 is after the last step, train_iters=6"),
        ("--profile --profile-step-end 2", r"profile_step_end=2 must be greater than profile_step_start=10"),
    ],
)
def test_steps_and_ranks_that_cannot_be_recorded_are_refused(tmp_path: Path, flags: str, message: str) -> None:
    ended = call_main(tiny(tmp_path / "run", f"--dp 2 {flags}"))
    assert ended.status == 2
    assert re.search(message, ended.errors, re.MULTILINE), ended.errors


def test_options_without_what_they_belong_to_are_idle(tmp_path: Path) -> None:
    flags = "--profile-ranks 0 --wandb-exp-name n --mlflow-run-name n --memory-snapshot-path s --use-pytorch-profiler"
    output = call_main([*tiny(tmp_path / "run", flags), "--dry-run"]).output
    for name, needed in (
        *(("wandb_exp_name=n", "wandb-project"), ("mlflow_run_name=n", "mlflow-experiment")),
        *(("memory_snapshot_path=s", "record-memory-history"), ("use_pytorch_profiler=True", "profile")),
        ("profile_ranks=(0,)", "profile"),
    ):
        assert f"note: {name} is idle without --{needed}\n" in output, output


class Calls:
    """Functions that note their names when they are called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def function(self, name: str) -> Callable[..., None]:
        return lambda *args, **_: self.names.append(" ".join([name, *map(str, args)]))

    def context(self, name: str) -> Callable[..., Any]:
        @contextmanager
        def noted(*args: Any, **_: Any) -> Any:
            self.names.append(" ".join(["enter", name, *map(str, args)]))
            yield
            self.names.append(f"leave {name}")

        return noted


def walk(hook: Hook, steps: range, *, before: int = 0) -> None:
    trainer = SimpleNamespace(progress=SimpleNamespace(step=before), record=RankRecord())
    hook.start(cast(Trainer, trainer))
    for step in steps:
        hook.before_step(cast(Trainer, trainer))
        trainer.progress.step = step
        hook.after_step(cast(Trainer, trainer), cast(StepRecord, SimpleNamespace(step=step)))
    hook.finish(cast(Trainer, trainer))


def test_under_nsight_systems_a_gpu_gets_its_window_and_its_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, log = Calls(), LogConfig(profile=True, profile_step_start=2, profile_step_end=4)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert isinstance(step_profiler(log, Path(), rank=0, device=cuda), OperatorProfile)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    assert isinstance(step_profiler(log, Path(), rank=0, device=cpu), OperatorProfile)
    forced = LogConfig(profile=True, use_pytorch_profiler=True)
    assert isinstance(step_profiler(forced, Path(), rank=0, device=cuda), OperatorProfile)
    monkeypatch.setattr(torch.cuda.profiler, "start", calls.function("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", calls.function("stop"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", calls.context("nvtx"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", calls.context("range"))
    window = step_profiler(log, Path(), rank=0, device=cuda)
    assert isinstance(window, NsightWindow)
    walk(window, range(1, 7))
    assert calls.names == [
        *("start", "enter nvtx", "enter range step 2", "leave range", "enter range step 3", "leave range"),
        *("leave nvtx", "stop"),
    ]


def test_the_memory_history_is_written_at_the_end_and_at_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", calls.function("record"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.function("dump"))
    path = tmp_path / "new" / "rank_3_memory.pickle"
    ended = MemoryHistory(path, device=torch.device("cuda"), is_main=False)
    walk(ended, range(1, 3))
    ended.on_error(cast(Trainer, None), RuntimeError("a later hook failed"))
    failing = MemoryHistory(path, device=torch.device("cuda"), is_main=False)
    failing.start(cast(Trainer, None))
    failing.on_error(cast(Trainer, None), torch.OutOfMemoryError())
    assert calls.names == ["record", f"dump {path}", "record"] * 2
    assert capsys.readouterr().out == f" memory history: {path}; https://pytorch.org/memory_viz shows it\n" * 2


def test_on_a_cpu_the_memory_history_is_idle_and_says_so(tmp_path: Path) -> None:
    output = train_on_ranks(tiny(tmp_path / "run", "--record-memory-history --train-iters 1 --dp 2"), world_size=2)
    assert output.count("--record-memory-history is idle") == 1
    assert not (tmp_path / "run" / "profile").exists()


def test_a_snapshot_goes_where_it_is_told_and_every_rank_has_its_own() -> None:
    assert snapshot_path(None, Path("run/profile"), rank=2) == Path("run/profile/rank_2_memory.pickle")
    assert snapshot_path("there/snapshot.pickle", Path("run"), rank=0) == Path("there/snapshot.pickle")
    assert snapshot_path("there/snapshot.pickle", Path("run"), rank=2) == Path("there/snapshot_rank_2.pickle")


def test_a_recording_that_fails_to_start_leaves_nothing_open() -> None:
    class Failing(StepWindow):
        def begin(self, stack: Any) -> None:
            stack.callback(lambda: closed.append(True))
            raise RuntimeError("no profiler")

    closed: list[bool] = []
    with pytest.raises(RuntimeError, match="no profiler"):
        walk(Failing(first=1, last=1, is_main=True), range(1, 2))
    assert closed == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_leaves_a_snapshot_and_a_profile_of_its_kernels(tmp_path: Path) -> None:
    flags = f"{WINDOW} --record-memory-history --device cuda"
    ended = run_job(tiny(tmp_path / "run", flags), tmp_path)
    assert ended.status == 0, ended
    assert (tmp_path / "run" / "profile" / "rank_0_memory.pickle").stat().st_size > 1000
    assert len(re.findall(r"^ +([\d.]+) ms +([\d.]+)% +\d+  \S", ended.output, re.MULTILINE)) == 10
