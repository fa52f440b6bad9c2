"""Tests of the training loop and its hooks: order, votes, states, and what hooks learn of an error."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from jobs import run_job, state_of, tiny, train_on_ranks
from ranks import run_ranks

from megatronish.core.layout import Layout
from megatronish.engine.engine import Engine
from megatronish.engine.results import StepResult, Votes
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS
from megatronish.optim.schedules import BatchSizeSchedule, LearningRateSchedule
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, Mesh, leave
from megatronish.report.plot import read_lines
from megatronish.train.hooks.stop import REASONS, SAVE, Stopper
from megatronish.train.trainer import Hook, Progress, StepRecord, Trainer, TrainingSchedule


class Diary(Hook):
    """Writes down what it is called with, under its name."""

    def __init__(self, lines: list[str], name: str = "diary") -> None:
        self.lines, self.name, self.loaded = lines, name, {}  # type: ignore[misc]

    def _note(self, *words: object) -> None:
        self.lines.append(" ".join(map(str, (self.name, *words))))

    def start(self, trainer: Trainer) -> None:
        self._note("start")

    def before_step(self, trainer: Trainer) -> None:
        self._note("before", trainer.progress.step + 1)

    def votes(self, step: int) -> dict[str, float]:
        return {f"{self.name} at": float(step)}

    def decided(self, trainer: Trainer, sums: dict[str, float]) -> None:
        self._note("decided", *sums.values())

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._note("after", record.step)

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._note("error", error)
        if self.name == "clumsy":
            raise KeyError("mine")

    def finish(self, trainer: Trainer) -> None:
        self._note("finish")

    def state(self) -> dict[str, Any]:
        return {"pages": len(self.lines)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.loaded = state


def trainer_of(
    *hooks: Hook, num_steps: int = 2, step: Callable[[], None] = lambda: None, world: Axis | None = None
) -> Trainer:
    """A trainer of an engine that computes nothing."""

    axis = world or Axis("world")

    def compute(_micro_batches: list[MicroBatch], *, votes: Votes, **_: Any) -> StepResult:
        step()
        cast_here = votes()
        sums = comm.all_reduce(torch.tensor(list(cast_here.values()), dtype=torch.float64), axis).tolist()
        return StepResult({LOSS: 1.0}, 1.0, num_loss_tokens=1, votes=dict(zip(cast_here, sums, strict=True)))

    rates = SimpleNamespace(
        learning_rate=lambda _: 0.1, weight_decay=lambda _: 0.0, momentum=lambda _: None, decoupled=None
    )
    engine = SimpleNamespace(step=compute, mesh=SimpleNamespace(world=axis))
    sizes = BatchSizeSchedule.of(None, global_batch_size=4)
    return Trainer(
        engine=cast(Engine, engine),
        schedule=TrainingSchedule(cast(LearningRateSchedule, rates), sizes, num_steps),
        prepare=lambda *_: [],
        num_ahead=0,
        hooks=hooks,
        progress=Progress(),
    )


def test_hooks_are_called_in_their_order_and_all_have_decided_before_one_looks_at_the_step() -> None:
    lines: list[str] = []
    trainer_of(Diary(lines, "a"), Diary(lines, "b")).run()
    steps = [
        *("a start", "b start"),
        *("a before 1", "b before 1", "a decided 1.0 1.0", "b decided 1.0 1.0", "a after 1", "b after 1"),
        *("a before 2", "b before 2", "a decided 2.0 2.0", "b decided 2.0 2.0", "a after 2", "b after 2"),
        *("a finish", "b finish"),
    ]
    assert lines == steps


def fail() -> None:
    raise OSError("a peer is lost")


def test_an_error_is_shown_to_every_hook_and_raised_again() -> None:
    lines: list[str] = []
    with pytest.raises(OSError, match="a peer is lost") as caught:
        trainer_of(Diary(lines, "clumsy"), Diary(lines, "b"), step=fail).run()
    assert lines[2:] == ["clumsy before 1", "b before 1", "clumsy error a peer is lost", "b error a peer is lost"]
    assert caught.value.__notes__ == ["Diary.on_error failed too: KeyError('mine')"]


class FailsAtTheEnd(Hook):
    """A hook that raises in `finish`."""

    def finish(self, trainer: Trainer) -> None:
        fail()


def test_an_error_of_the_ending_is_shown_too() -> None:
    lines: list[str] = []
    with pytest.raises(OSError, match="a peer is lost"):
        trainer_of(Diary(lines, "a"), FailsAtTheEnd()).run()
    assert lines[-2:] == ["a finish", "a error a peer is lost"]


def test_hooks_without_a_name_or_a_state_keep_nothing_and_unknown_names_are_left_aside() -> None:
    named, nameless = Diary(["one line"], "a"), Diary([], "")
    trainer = trainer_of(named, nameless, Hook())
    assert trainer.hook_states() == {"a": {"pages": 1}}
    trainer.load_hook_states({"a": {"pages": 7}, "gone": {"pages": 8}})
    assert (named.loaded, nameless.loaded) == ({"pages": 7}, {})


def test_steps_are_counted_from_1_in_records_and_the_engine_is_told_how_many_are_done() -> None:
    done: list[int] = []
    trainer = trainer_of()
    compute = trainer.engine.step

    def counted(*batches: Any, num_steps_done: int, **options: Any) -> StepResult:
        done.append(num_steps_done)
        return compute(*batches, num_steps_done=num_steps_done, **options)

    trainer.engine.step = counted  # type: ignore[method-assign]
    assert [trainer.step([]).step for _ in range(3)] == [1, 2, 3]
    assert (done, trainer.progress) == ([0, 1, 2], Progress(step=3, consumed_samples=12))


class Records(Hook):
    """A hook that keeps the records of all steps."""

    def __init__(self) -> None:
        self.kept: list[StepRecord] = []

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self.kept.append(record)


@pytest.mark.long
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_the_time_that_a_step_waits_for_its_batch_is_not_of_its_update(num_ahead: int) -> None:
    records = Records()
    trainer = trainer_of(records, num_steps=3, step=lambda: time.sleep(0.02))

    def slow(*_: int) -> list[MicroBatch]:
        time.sleep(0.2)
        return []

    trainer.prepare, trainer.num_ahead = slow, num_ahead
    trainer.run()
    for record in records.kept:
        assert record.data_seconds >= 0.2 - 0.1 * num_ahead and 0.02 <= record.seconds < 0.15


@pytest.fixture
def signals() -> Iterator[None]:
    """The handlers of this process stay what they are."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_a_signal_during_a_step_is_acted_upon_after_that_step(signals: None) -> None:
    stopper = Stopper(exit_interval=None, exit_duration_in_mins=None)
    trainer = trainer_of(stopper, num_steps=5, step=lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer.run()
    assert (trainer.progress.step, trainer.stop_reason) == (1, REASONS["stop_on_signal"])


def test_the_exit_interval_is_exact(signals: None) -> None:
    trainer = trainer_of(Stopper(exit_interval=3, exit_duration_in_mins=None), num_steps=7)
    trainer.run()
    assert (trainer.progress.step, trainer.stop_reason) == (3, REASONS["stop_on_interval"])


def test_of_several_reasons_the_first_is_told_and_saving_is_no_reason_to_stop(signals: None) -> None:
    stopper = Stopper(exit_interval=2, exit_duration_in_mins=None)
    trainer = trainer_of()
    stopper.decided(trainer, dict.fromkeys(REASONS, 0.0) | {SAVE: 3.0})
    assert (stopper.save_now, trainer.stop_reason) == (True, None)
    stopper.decided(
        trainer, {"stop_on_signal": 0.0, "stop_on_time": 1.0, "stop_on_interval": 8.0, "stop_on_file": 1.0, SAVE: 0.0}
    )
    assert (stopper.save_now, trainer.stop_reason) == (False, REASONS["stop_on_time"])


def vote(place: Place) -> tuple[list[str], int]:
    """Rank 1 alone is told to leave, in its second step."""
    mesh = Mesh.start(Layout(dp=2), rank=place.rank, init_method=place.rendezvous)
    lines: list[str] = []
    trainer = trainer_of(
        Stopper(exit_interval=None, exit_duration_in_mins=None), Diary(lines), num_steps=9, world=mesh.world
    )

    def step() -> None:
        if place.rank == 1 and trainer.progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.engine = trainer_of(step=step, world=mesh.world).engine
    trainer.run()
    leave()
    return [line for line in lines if "decided" in line], trainer.progress.step


def test_one_rank_that_wants_to_leave_takes_all_along() -> None:
    expected = ["diary decided 0.0 0.0 0.0 0.0 0.0 2.0", "diary decided 1.0 0.0 0.0 0.0 0.0 4.0"]
    assert run_ranks(2, vote) == [(expected, 2)] * 2


def test_counts_since_the_last_line_go_on_over_a_resume(tmp_path: Path) -> None:
    """fp16 with too large a scale: the first steps overflow. A line is written every fourth step."""
    flags = "--fp16 --initial-loss-scale 1e30 --hysteresis 1 --log-interval 4 --train-iters 4 --lr-decay-style constant"
    at_once = train_on_ranks(tiny(tmp_path / "at_once", flags))
    first = train_on_ranks(tiny(tmp_path / "parts", f"{flags} --exit-interval 3"))
    assert "iteration " not in first
    assert state_of(tmp_path / "parts", 3)["hooks"] == {"log": {"skipped": 3, "nan": 0, "without_room": 0}}
    then = train_on_ranks(tiny(tmp_path / "parts", flags), world_size=1)
    assert all("number of skipped iterations:   4 |" in output for output in (at_once, then))


def test_rows_without_room_are_counted_since_the_last_line(tmp_path: Path) -> None:
    rooms = "--dp 2 --ep 2 --num-experts 4 --moe-ffn-hidden-size 16 --moe-expert-rank-capacity-factor 1 --train-iters 4"
    rows = dict[int, list[float]]()
    for interval in (1, 4):
        train_on_ranks(tiny(tmp_path / str(interval), f"{rooms} --log-interval {interval}"), world_size=2)
        lines = read_lines(tmp_path / str(interval) / "metrics.jsonl")
        rows[interval] = [line.get("rows_without_room", 0) for line in lines]
    assert len(rows[1]) == 4 and sum(each > 0 for each in rows[1]) > 1
    assert rows[4] == [sum(rows[1])]


def plant_error() -> None:
    """Every rank says that its hooks were told, and of what."""

    def tell(hook: Hook, trainer: Trainer, error: BaseException) -> None:
        print(type(hook).__name__, "was told of", error)

    step = Engine.step

    def failing(engine: Engine, *args: Any, **options: Any) -> StepResult:
        if engine.mesh.world.rank == 1:
            raise RuntimeError("planted")
        return step(engine, *args, **options)

    Hook.on_error, Engine.step = tell, failing  # type: ignore[method-assign]


def test_the_hooks_of_the_rank_that_fails_are_told_before_it_leaves(tmp_path: Path) -> None:
    ended = run_job(tiny(tmp_path / "run", "--dp 2"), tmp_path, plant=plant_error)
    assert ended.status == 1 and "planted" in ended.errors
    told = [
        line for line in (tmp_path / "run/logs/rank_1.log").read_text().splitlines() if "was told of planted" in line
    ]
    assert told.index("Log was told of planted") < told.index("Save was told of planted")
