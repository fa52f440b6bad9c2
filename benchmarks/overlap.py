"""Recorder of communication overlap on the data axis: two steps of two ranks on the CPU, drawn as a timeline.

What a rank computes is noted by hooks of the layers. What it exchanges is noted at the collectives: from the call that
starts one until it has arrived, for which a thread of its own waits, so that the thread that computes need not; and
when that one began to wait.

    python benchmarks/overlap.py --png docs/pictures/overlap.png -- --zero-stage 1
"""

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatronish.config.read import read_config
from megatronish.engine.engine import Engine
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.parallel import comm
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

COLLECTIVES = {"start_all_reduce": "reduce", "start_reduce_scatter": "reduce", "start_all_gather": "gather"}
COLOURS = {"forward": "#4a7fcb", "backward": "#58ad5f", "update": "#b7b7b7", "reduce": "#e9b33f", "gather": "#c2607c"}
FLAGS = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 64 --micro-batch-size 4 --vocab-size 1024 "
    "--global-batch-size 8 --train-iters 4 --lr 1e-3 --mock-data --device cpu --dp 2 --ddp-bucket-size 3000000 "
    "--hidden-dropout 0 --attention-dropout 0"
)


@dataclass
class Exchange:
    """A collective over the data axis, with the times of its start, wait and end."""

    kind: str
    started: float
    arrived: threading.Event = field(default_factory=threading.Event)
    arrived_at: float = 0.0
    waited_at: float | None = None


class Recorder:
    """Records the communication and the computation of one process, in seconds of one clock."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.spans: list[tuple[str, str, float, float]] = []  # (kind, name, start, end)
        self._open: dict[tuple[str, str], float] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record the collectives started within the context, except those of scalars."""
        plain = {name: getattr(comm, name) for name in COLLECTIVES}
        try:
            for name, start in plain.items():
                setattr(comm, name, partial(self._start, start, COLLECTIVES[name]))
            yield
        finally:
            for name, start in plain.items():
                setattr(comm, name, start)

    def _start(
        self, start: Callable[..., comm.Pending], kind: str, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> comm.Pending:
        exchange = Exchange(kind, time.perf_counter())
        pending = start(x, *args, **kwargs)
        works = [work for work in pending._works if work is not None]
        if x.numel() > 1 and works:
            self.exchanges.append(exchange)
            threading.Thread(target=self._arrive, args=(exchange, works[0]), daemon=True).start()
            pending.wait = partial(self._wait, pending.wait, exchange)  # type: ignore[method-assign]
        return pending

    def _arrive(self, exchange: Exchange, work: dist.Work) -> None:
        work.wait()
        exchange.arrived_at = time.perf_counter()
        exchange.arrived.set()

    def _wait(self, wait: Callable[[], torch.Tensor], exchange: Exchange) -> torch.Tensor:
        exchange.waited_at = time.perf_counter()
        return wait()

    def watch(self, engine: Engine) -> None:
        """Record forward and backward of each layer, and the optimizer's update."""
        for name, layer in engine.stage.model.get_submodule("layers").named_children():
            layer.register_forward_pre_hook(partial(self._begin, "forward", name))
            layer.register_forward_hook(partial(self._end, "forward", name))
            layer.register_full_backward_pre_hook(partial(self._begin, "backward", name))
            layer.register_full_backward_hook(partial(self._end, "backward", name))
        engine.optimizer.step = partial(self._update, engine.optimizer.step)  # type: ignore[method-assign]

    def _begin(self, kind: str, name: str, *_: object) -> None:
        self._open[kind, name] = time.perf_counter()

    def _end(self, kind: str, name: str, *_: object) -> None:
        self.spans.append((kind, name, self._open.pop((kind, name)), time.perf_counter()))

    def _update(self, step: Callable[..., None], **rates: float) -> None:
        self._begin("update", "")
        step(**rates)
        self._end("update", "")


def open_engine(place: Place, flags: str) -> tuple[TrainingJob, Engine]:
    """The engine of this rank."""
    config, _ = read_config(flags.split())
    job = TrainingJob.open(config, start_mesh(config, place))
    return job, job.build_engine()


def take_step(job: TrainingJob, engine: Engine, step: int) -> None:
    """One training step on random tokens."""
    batch = job.config.global_batch_size
    micro_batches = job.batches_of(job.datasets.train)(step * batch, batch)
    engine.step(micro_batches, num_steps_done=step, learning_rate=1e-4, weight_decay=0.0)


def record(place: Place, flags: str, folder: Path) -> int:
    """Run one rank: a warm-up step, then two steps that are recorded in a file."""
    job, engine = open_engine(place, flags)
    recorder = Recorder()
    recorder.watch(engine)
    take_step(job, engine, 0)
    recorder.spans.clear()
    with recorder.listening():
        for step in (1, 2):
            take_step(job, engine, step)
    for exchange in recorder.exchanges:
        exchange.arrived.wait()
    exchanges = [(each.kind, each.started, each.arrived_at) for each in recorder.exchanges]
    (folder / f"{place.rank}.json").write_text(json.dumps({"spans": recorder.spans, "exchanges": exchanges}))
    return 0


def draw(ranks: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw for each rank a row of computation, and below it a line for each collective in flight."""
    starts, ends = zip(*(window(recorded["spans"]) for recorded in ranks), strict=True)
    start, end = min(starts), max(ends)
    figure = Figure(figsize=(14, 2.6 * len(ranks) + 1), layout="constrained")
    several = figure.subplots(len(ranks), sharex=True, squeeze=False)[:, 0]
    for rank, (axes, recorded) in enumerate(zip(several, ranks, strict=True)):
        draw_rank(axes, recorded, start=start, end=end)
        axes.set_ylabel(f"rank {rank}")
    several[-1].set_xlabel("ms")
    several[0].set_title(title)
    handles = [legend_of(kind) for kind in COLOURS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=100)


def legend_of(kind: str) -> Patch:
    """Colour and name of a collective."""
    names = {"reduce": "exchange of gradients", "gather": "gather of parameters"}
    return Patch(facecolor=COLOURS[kind], label=names.get(kind, kind))


def window(spans: list[tuple[str, str, float, float]]) -> tuple[float, float]:
    """The interval from the first backward to the end of the next forward."""
    backward = next(start for kind, _, start, _ in spans if kind == "backward")
    update = next(end for kind, _, _, end in spans if kind == "update")
    forward = [end for kind, _, start, end in spans if kind == "forward" and start > update]
    last = sum(1 for kind, _, start, _ in spans if kind == "forward" and start < backward)
    return backward, forward[:last][-1]


def draw_rank(axes: Axes, recorded: dict[str, Any], *, start: float, end: float) -> None:
    """Draw the rows of a rank, in milliseconds from the start."""
    for kind, name, begin, stop in recorded["spans"]:
        if stop > start and begin < end:
            axes.barh(0, 1e3 * (stop - begin), left=1e3 * (begin - start), height=0.9, color=COLOURS[kind], ec="white")
            axes.text(1e3 * ((begin + stop) / 2 - start), 0, name, ha="center", va="center", fontsize=8)
    under_way = [each for each in recorded["exchanges"] if each[2] > start and each[1] < end]
    for line, (kind, begin, stop) in enumerate(under_way, 1):
        axes.barh(0.2 + 0.5 * line, 1e3 * (stop - begin), left=1e3 * (begin - start), height=0.4, color=COLOURS[kind])
    axes.set_xlim(0, 1e3 * (end - start))
    axes.set_ylim(0.6 + 0.5 * len(under_way), -0.6)
    axes.set_yticks([0, 0.45 + 0.25 * len(under_way)], ["computes", "exchanges"])


def main() -> int:
    """Record on as many ranks as the flags say, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, default=Path("overlap.png"))
    parser.add_argument("flags", nargs="*", help="flags of the run, after --: they override those of a small GPT")
    arguments = parser.parse_args()
    told = arguments.flags or ["--zero-stage", "1"]
    config, _ = read_config(flags := [*FLAGS.split(), *told])
    world_size = config.layout.world_size
    with tempfile.TemporaryDirectory() as folder:
        status = launch(partial(record, flags=" ".join(flags), folder=Path(folder)), world_size=world_size)
        if status == 0:
            ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]
            draw(ranks, arguments.png, " ".join(told))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
