"""Tests of the record: what ranks of a sound run have noted agrees, and outlives them."""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any

import pytest
import torch
from jobs import be_rank, tiny
from ranks import run_ranks, wait_until
from sweeps import some_of

from megatronish.checkpoint.save import in_background
from megatronish.core.layout import Layout
from megatronish.data.loader import Prefetcher
from megatronish.launch.place import Place
from megatronish.launch.pulse import Pulses
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh
from megatronish.watch.hang_diagnosis import RanksSeen, different
from megatronish.watch.heartbeat import Beat, Collective, OwnBoard, bare_beat
from megatronish.watch.observer import MAIN, HangLimits, Observer
from megatronish.watch.record import PhaseName, RankRecord, RunPhase
from megatronish.watch.shared_ring import RING, SharedRing, read_ring
from megatronish.watch.watchdog import Watchdog

EXPERTS = "--num-experts 4 --moe-router-topk 2 --ep 2"
LAYOUTS = [
    "--tp 2 --pp 2",
    "--tp 2 --dp 2 --sequence-parallel --zero-stage 1",
    "--cp 2 --dp 2",
    f"--tp 2 --dp 2 {EXPERTS}",
    "--dp 4 --zero-stage 3",
]


def train_and_read(place: Place, argv: list[str]) -> dict[str, list[Collective]]:
    """What the ring of this rank has after a run."""
    be_rank(place, argv)
    assert place.rendezvous is not None
    return read_ring(Path(place.rendezvous.removeprefix("file://") + ".watch") / f"ring_{place.rank}", place.rank)


@pytest.mark.parametrize("layout", some_of(LAYOUTS, LAYOUTS[3:]))
def test_ranks_of_a_sound_run_have_made_the_same_collectives(tmp_path: Path, layout: str) -> None:
    argv = tiny(tmp_path, f"{layout} --train-iters 2")
    rings = run_ranks(4, train_and_read, argv)
    assert all({"world", "checkpoint"} <= {line.partition(":")[0] for line in ring} for ring in rings)
    beats = {rank: bare_beat(rank, ring) for rank, ring in enumerate(rings)}
    assert different(RanksSeen(4, beats)) == []


def test_a_ring_keeps_the_newest_collectives_and_what_they_were(tmp_path: Path) -> None:
    record = RankRecord()
    record.shared = SharedRing(tmp_path / "ring")
    line = record.line("tp", [2, 3])
    for _ in range(RING + 10):
        line.enter("all_reduce", torch.zeros(3, 4))
    line.enter_objects("all_gather_object")
    (found,) = read_ring(tmp_path / "ring", 2).values()
    assert [each.number for each in found] == list(range(12, RING + 12))
    assert (found[0].name, found[0].kind) == ("all_reduce 12 of tp", ("all_reduce", (3, 4), "float32"))
    assert found[-1].kind == ("all_gather_object",)
    assert read_ring(tmp_path / "none", 0) == {}


def test_a_ring_has_all_its_room_from_the_start_or_is_not_there(tmp_path: Path) -> None:
    SharedRing(tmp_path / "ring")
    file = (tmp_path / "ring").stat()
    assert 512 * file.st_blocks >= file.st_size  # a full disk under a page that is not there yet would be SIGBUS
    record, layout = RankRecord(), Layout(dp=2)
    limits = HangLimits.of(step=1.0, start=None, evaluation=None, save=None, timeout=600.0)
    watchdog = Watchdog(record, limits, layout, rank=0, leave=lambda _report, _prints: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        watchdog.share_ring(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert record.shared is None
    assert list((tmp_path / "full").iterdir()) == []


def test_a_backward_names_the_layer_of_its_forward() -> None:
    record = RankRecord()
    line = record.line("tp", [0, 1])
    record.layer = 3
    assert line.enter("all_reduce", torch.zeros(2)).layer == 3
    record.layer = None
    assert line.enter("all_reduce", torch.zeros(2), 3).layer == 3


def wait_in_backward(place: Place) -> tuple[float, float, float]:
    """Seconds that this rank has waited for: after a forward, a backward of another thread, and its plain wait."""
    mesh = Mesh.start(Layout(tp=2), rank=place.rank, init_method=place.rendezvous)
    record, x = mesh.record, torch.ones(2, requires_grad=True)
    y = comm.copy_to(x, mesh.tp).sum()
    seen = [record.seconds_waited]
    for work in (y.backward, lambda: comm.all_reduce(torch.ones(2), mesh.tp)):
        thread = Thread(target=work)
        thread.start()
        thread.join()
        seen.append(record.seconds_waited)
    return seen[0], seen[1], seen[2]


def test_waits_of_a_backward_count_in_whichever_thread_it_runs() -> None:
    """On GPUs autograd has a thread of its own; those of loaders and checkpoints are not the step's."""
    for forward, backward, apart in run_ranks(2, wait_in_backward):
        assert forward == 0.0 < backward == apart


def test_lines_of_one_name_have_keys_of_their_own() -> None:
    record = RankRecord()
    assert [record.line("shard", [0, 1]).key for _ in range(3)] == ["shard:0+2", "shard:0+2#1", "shard:0+2#2"]


def test_bytes_are_counted_from_zero_while_they_are_asked_for() -> None:
    record = RankRecord()
    line = record.line("tp", [0, 1])
    line.enter("all_reduce", torch.zeros(8))
    record.count_bytes()
    line.enter("all_reduce", torch.zeros(2))
    line.enter_peer("send", torch.zeros(3, dtype=torch.bfloat16), 1)
    line.count("all_gather", torch.zeros(1))
    record.counts_bytes = False
    line.enter("all_reduce", torch.zeros(8))
    assert line.sent == {"all_reduce": 8, "send": 6, "all_gather": 4}
    record.count_bytes()
    assert not line.sent


class NeverWithout(dict[int, RunPhase]):
    """Phases of threads from which none may be taken."""

    def pop(self, *_: Any) -> Any:
        raise AssertionError("a watchdog that looks now would find no phase, and put no pulse")


def test_a_thread_that_changes_its_phase_is_never_without_one() -> None:
    record = RankRecord()
    record.phases = NeverWithout()
    names: list[PhaseName] = ["start", "data", "step"]
    for name in names:
        record.enter_phase(name)
        assert [phase.name for phase in record.phases.values()] == [name]
    assert list(record.seconds_by_phase()) == names


def test_a_guard_gets_the_limit_of_a_step_soon_after_the_start_although_it_ends_during_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, pulses = RankRecord(), Pulses(1)
    limits = HangLimits.of(step=9.0, start=60.0, evaluation=60.0, save=60.0, timeout=600.0)
    look, main = Observer.look, get_ident()

    def and_then_a_step_ends(observer: Observer, **options: Any) -> Beat:
        beat = look(observer, **options)
        if beat.number == 3:
            record.phases[main] = RunPhase("step", "", time.monotonic())
            record.finished_step(0.01)
        return beat

    monkeypatch.setattr(Observer, "look", and_then_a_step_ends)
    watchdog = Watchdog(record, limits, Layout(), rank=0, leave=lambda _report, _prints: None)
    watchdog.pulse_to(pulses, 0)
    record.enter_phase("start")
    with watchdog:
        began = time.monotonic()
        while (pulse := pulses.get(0)) is None or pulse.limit > 9.0:
            assert time.monotonic() - began < 30.0
            time.sleep(0.01)
        assert pulse.number <= 6


def wait_for_data(work: Callable[[], Any]) -> None:
    """Wait for the thread of a loader, which does this."""
    with Prefetcher(lambda *_: work(), consumed_samples=0, global_batch_size=lambda _: 1, num_ahead=1) as batches:
        next(batches)


def wait_for_a_save(work: Callable[[], Any]) -> None:
    """Wait for the thread of a save in the background, which does this."""
    in_background(work).result()


@pytest.mark.parametrize(("phase", "wait"), [("data", wait_for_data), ("save", wait_for_a_save)])
def test_a_main_thread_that_waits_for_another_one_has_the_stack_of_that(
    phase: PhaseName, wait: Callable[..., None]
) -> None:
    record, is_over = RankRecord(), Event()

    def stand_still() -> None:
        is_over.wait()

    def main() -> None:
        record.enter_phase(phase)
        wait(stand_still)

    thread = Thread(target=main)
    thread.start()
    assert thread.ident is not None
    limits = HangLimits.of(step=9.0, start=9.0, evaluation=9.0, save=9.0, timeout=600.0)
    observer = Observer(record, limits, rank=0, main=thread.ident)

    def is_shown() -> bool:
        beat = observer.look().thread(MAIN)
        return beat is not None and any(line.endswith(" stand_still") for line in beat.helper_stack)

    try:
        assert wait_until(is_shown)
    finally:
        is_over.set()
        thread.join()


class BoardOfAStoppedProcess(OwnBoard):
    """Board that does not answer."""

    def put(self, name: str, text: str) -> None:
        raise RuntimeError("the store does not answer")


def test_a_rank_that_reaches_no_other_one_ends_the_run_and_names_who_keeps_the_board(tmp_path: Path) -> None:
    told = list[str]()
    limits = HangLimits.of(step=0.3, start=0.3, evaluation=0.3, save=0.3, timeout=600.0)
    record = RankRecord()
    watchdog = Watchdog(record, limits, Layout(dp=2), rank=1, leave=lambda report, _prints: told.append(report))
    watchdog.share(BoardOfAStoppedProcess(), kept_by="rank 0, whose process has the store of the run,")
    record.enter_phase("step")
    with watchdog:
        assert wait_until(lambda: bool(told))
    assert told[0].startswith(
        "the run hangs: rank 0, whose process has the store of the run, does not answer: it is stopped"
    )
    assert "rank 1 (dp 1)" in told[0]
