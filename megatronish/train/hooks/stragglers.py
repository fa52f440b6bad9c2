"""The Stragglers hook: ranks that compute slower than those that do the same work.

All ranks finish a step together, the quick ones having waited for the slow ones. So a rank's own time is that of its
step less what it waited for collectives. The ranks of one pipeline stage do the same work (dp x cp x tp); of each, the
median own time of a window is compared with the lower median of its stage. A stage of one rank has no peers: it is
compared with its own windows before, in seconds and in its share of the step, for all stages take longer together when
the batch grows.

On a GPU waiting is no time of the host: the device waits, so events around each wait are recorded in the last step of a
window, and read after it. What `fully_shard` sends (ZeRO-3) is not seen, so there waiting counts as computing.

A rank on which this fails sends no number in the place of its own time, and all ranks compare no more.
"""

import json
import socket
from collections import defaultdict, deque
from math import isnan, nan
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from megatronish.core.aside import Aside
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh
from megatronish.train.trainer import Hook, StepRecord, Trainer
from megatronish.watch.record import RankRecord

WINDOWS = 2
"""Windows in a row in which a rank is slow before it is reported, and quick before that is: one may be an accident.

A rank's own time has what other programs of its host take from it. On a busy host that changes from window to window.
"""
KEPT_WINDOWS, FEWEST_WINDOWS = 20, 3
"""Windows of its own that a stage of one rank is compared with."""
FEWEST_SECONDS = 1e-3
"""Own times below this are noise of the host."""


class RankAtWork(NamedTuple):
    """A rank, where it is, and the stage whose work it does."""

    rank: int
    host: str
    stage: int
    coordinates: str


class StageHistory:
    """What a stage of one rank took so far: the median of its windows is what it should take."""

    def __init__(self) -> None:
        self._windows: deque[tuple[float, float]] = deque(maxlen=KEPT_WINDOWS)  # own seconds, and those of the others

    def usual(self, others: float) -> float | None:
        """Seconds that the stage should take now that the others take so many; None before enough is known."""
        if len(self._windows) < FEWEST_WINDOWS:
            return None
        seconds = median(own for own, _ in self._windows)
        share = median(own / max(theirs, FEWEST_SECONDS) for own, theirs in self._windows)
        return max(seconds, share * others)

    def add(self, own: float, others: float) -> None:
        """Keep a window in which the stage was not slow."""
        self._windows.append((own, others))


class DeviceWaits:
    """Seconds that a GPU's stream waited for collectives, by events around each wait."""

    def __init__(self, record: RankRecord) -> None:
        self._record, self._pairs = record, list[tuple[Any, Any]]()

    def begin(self) -> None:
        """Record events from now on."""
        self._record.clock = self._event
        self._record.waits = lambda start, end: self._pairs.append((start, end))

    def end(self) -> float:
        """Record no more; the seconds waited since `begin`. The device must have finished the step."""
        self._record.clock, self._record.waits = RankRecord().clock, self._record._add_wait
        seconds = sum(start.elapsed_time(end) for start, end in self._pairs) / 1000
        self._pairs.clear()
        return seconds

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Stragglers(Hook):
    """Report of ranks that are slower than their peers, printed when it begins and when it ends.

    Own times of all ranks become a line of `file` on the main rank.
    """

    def __init__(self, mesh: Mesh, *, interval: int, ratio: float, file: Path | None = None) -> None:
        self.mesh, self.interval, self.ratio, self.file = mesh, interval, ratio, file
        self.slow: dict[int, int] = {}
        """The step since which a rank is slow, by rank; the same on every rank."""
        self._own: list[float] = []
        self._num_steps = 0  # of this window
        self._suspects: dict[int, int] = {}  # windows in a row, by rank
        self._since: dict[int, int] = {}  # first step of the first of them
        self._quick: dict[int, int] = {}  # windows in a row in which a rank that was reported is quick
        self._histories: dict[int, StageHistory] = defaultdict(StageHistory)  # of ranks without peers
        self._waited = 0.0
        self._workers: list[RankAtWork] = []
        self._device = DeviceWaits(mesh.record) if mesh.device.type == "cuda" else None
        self._aside = Aside("the comparison of ranks' own times")
        self._is_off = False  # on all ranks: one of them has stepped aside

    def start(self, trainer: Trainer) -> None:
        """Learn which ranks do the same work."""
        mine = None
        with self._aside.guard():
            mine = self._at_work()
        workers = comm.all_gather_object(mine, self.mesh.world)
        self._workers = [worker for worker in workers if worker is not None]
        if len(self._workers) < len(workers):
            self._leave_out()

    def _at_work(self) -> RankAtWork:
        coordinates = ", ".join(f"{axis.name} {axis.rank}" for axis in (self.mesh.tp, self.mesh.dp) if axis.size > 1)
        return RankAtWork(self.mesh.world.rank, socket.gethostname(), self.mesh.pp.rank, coordinates)

    def _leave_out(self) -> None:
        """Compare no more, on any rank."""
        self._is_off = True
        self._aside.step("it failed on another rank, whose log says why", tells=self.mesh.is_main)

    def before_step(self, trainer: Trainer) -> None:
        """Note what was waited so far."""
        self._waited = self.mesh.record.seconds_waited
        self._num_steps += 1
        if self._device is not None and self._num_steps == self.interval and not self._aside.is_off:
            with self._aside.guard():
                self._device.begin()

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Note the rank's own time of the step, and compare those of a window at its end."""
        if self._is_off:
            return
        is_last = self._num_steps == self.interval
        own = nan
        with self._aside.guard():
            self._note(record, is_last=is_last)
            if is_last and not self._aside.is_off:
                own = median(self._own)
        if not is_last:
            return
        self._num_steps = 0
        self._own.clear()
        mine = torch.tensor([own], dtype=torch.float64)
        times = comm.start_all_gather(mine, self.mesh.world).wait().tolist()
        if any(map(isnan, times)):
            self._leave_out()
            return
        with self._aside.guard():
            if self.file is not None:
                with self.file.open("a") as lines:
                    lines.write(json.dumps({"step": record.step, "seconds": [round(own, 6) for own in times]}) + "\n")
            for line in self.compare(times, step=record.step):
                if self.mesh.is_main:
                    tqdm.write(line)

    def _note(self, record: StepRecord, *, is_last: bool) -> None:
        """Note this rank's own time of a step; on a GPU that of the last step of a window."""
        if self._device is None:
            self._own.append(record.seconds - (self.mesh.record.seconds_waited - self._waited))
        elif is_last:
            torch.cuda.synchronize(self.mesh.device)
            self._own.append(record.seconds - self._device.end())

    def compare(self, times: list[float], *, step: int) -> list[str]:
        """Sentences about ranks that are slow now, or are no longer: own seconds of a step by rank, up to `step`."""
        told = []
        for worker in self._workers:
            own, rank = times[worker.rank], worker.rank
            usual, has_peers = self._usual(worker, times)
            if usual is not None and own > max(self.ratio * usual, usual + FEWEST_SECONDS):
                self._quick.pop(rank, None)
                self._suspects[rank] = self._suspects.get(rank, 0) + 1
                since = self._since.setdefault(rank, step - self.interval + 1)
                if self._suspects[rank] == WINDOWS:
                    self.slow[rank] = since
                    told.append(self._slow(worker, own, usual, since, has_peers=has_peers))
                continue
            if not has_peers:
                self._histories[rank].add(own, self._of_others(worker, times))
            self._quick[rank] = self._quick.get(rank, 0) + 1
            if rank in self.slow and self._quick[rank] < WINDOWS:
                continue
            for known in (self._suspects, self._since, self._quick):
                known.pop(rank, None)
            if self.slow.pop(rank, None) is not None:
                as_before = "as its peers again" if has_peers else "again as it was"
                told.append(f" rank {rank} is as quick {as_before}, at step {step}")
        return told

    def _usual(self, worker: RankAtWork, times: list[float]) -> tuple[float | None, bool]:
        """Seconds that a rank should take, if they are known, and whether it has peers to be compared with."""
        peers = [times[each.rank] for each in self._workers if each.stage == worker.stage]
        if len(peers) > 1:
            return median_low(peers), True
        return self._histories[worker.rank].usual(self._of_others(worker, times)), False

    def _of_others(self, worker: RankAtWork, times: list[float]) -> float:
        return median(times[each.rank] for each in self._workers if each.rank != worker.rank)

    def _slow(self, worker: RankAtWork, own: float, usual: float, since: int, *, has_peers: bool) -> str:
        compared = "of its peers" if has_peers else "that its stage took before"
        where = f"{worker.host}; {worker.coordinates}" if worker.coordinates else worker.host
        return (
            f" rank {worker.rank} ({where}) is slow since step {since}: it computes {1000 * own:.3g} ms a step, "
            f"{own / usual:.2g} times the {1000 * usual:.3g} ms {compared}, and all others wait for it"
        )
