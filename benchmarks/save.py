"""Benchmark of checkpoint saving: how long training stops for a synchronous and for an asynchronous save.

One run of a GPT of 54 million parameters with Adam's states (0.65 GB a checkpoint) that saves in both ways in turn, so
that both meet the same machine. Measured are the seconds between the end of a step and the beginning of the next, and
how much slower steps are while one is written beside them.

    python benchmarks/save.py --turns 5
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatronish.config.read import read_config
from megatronish.config.sections.run import CheckpointConfig
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.parallel import comm
from megatronish.parallel.mesh import leave
from megatronish.train.hooks.save import Save
from megatronish.train.hooks.stop import Stopper
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh
from megatronish.train.trainer import Hook, Progress, StepRecord, Trainer, TrainingSchedule

FLAGS = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --micro-batch-size 1 "
    "--vocab-size 32000 --global-batch-size 2 --lr 1e-4 --mock-data --device cpu --hidden-dropout 0 "
    "--attention-dropout 0 --eval-iters 0"
)


class InTurn(Hook):
    """Hook that saves every `interval` steps, synchronously and asynchronously in turn, and times the pauses."""

    def __init__(self, ways: dict[str, Save], *, interval: int, warm_up: int) -> None:
        self.ways, self.interval, self.warm_up = ways, interval, warm_up
        self.stalls: dict[str, list[float]] = {way: [] for way in ways}
        self.steps: dict[bool, list[float]] = {True: [], False: []}  # whether one was written beside them
        self._busy = False

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Save after every interval; ranks first wait for each other, so that this wait is not counted."""
        beside = self.ways["async"]
        comm.barrier(trainer.engine.mesh.world)
        turn, rest = divmod(record.step, self.interval)
        measured = turn > self.warm_up
        if measured or (turn == self.warm_up and rest):
            self.steps[self._busy].append(record.seconds)
        if rest:
            beside.after_step(trainer, record)
        else:
            way = ("sync", "async")[turn % 2]
            start = time.perf_counter()
            self.ways[way].after_step(trainer, record)
            if measured:
                self.stalls[way].append(time.perf_counter() - start)
        self._busy = beside.is_writing

    def finish(self, trainer: Trainer) -> None:
        """Wait for the last asynchronous save."""
        self.ways["async"].finish(trainer)


def measure(place: Place, flags: list[str], turns: int, interval: int, folder: Path) -> int:
    """The run of one rank, measured; its exit status."""
    config, _ = read_config(flags)
    job = TrainingJob.open(config, start_mesh(config, place))
    engine = job.build_engine()
    options: dict[str, Any] = {"mesh": engine.mesh, "facts": job.facts}
    options["stopper"] = Stopper(exit_interval=None, exit_duration_in_mins=None)
    ways = {
        way: Save(
            folder / way,
            config=CheckpointConfig(save_interval=interval, async_save=way == "async", keep_last=1),
            **options,
        )
        for way in ("sync", "async")
    }
    warm_up = 2  # one of each: host memory is asked for once
    hook = InTurn(ways, interval=interval, warm_up=warm_up)
    trainer = Trainer(
        engine=engine,
        schedule=TrainingSchedule(job.schedule, job.batch_sizes, interval * (warm_up + 2 * turns)),
        prepare=job.batches_of(job.datasets.train),
        num_ahead=1,
        hooks=[hook],
        progress=Progress(),
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.run()
    if engine.mesh.is_main:
        stored = sum(path.stat().st_size for path in folder.rglob("*.distcp")) // len(ways)
        found = {"stalls": hook.stalls, "steps": [hook.steps[False], hook.steps[True]], "stored": stored}
        (folder / "found.json").write_text(json.dumps(found))
    comm.barrier(engine.mesh.world)
    leave()
    return 0


def spread(values: list[float]) -> str:
    """Median, minimum and maximum as text."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> int:
    """Measure on one rank and on two, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="counted saves in each way")
    parser.add_argument("--interval", type=int, default=8, help="steps between saves")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    parser.add_argument("flags", nargs="*", help="flags of the run, after --: they override those of the small GPT")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}; seconds: median (least to most) of {arguments.turns} saves in each way\n")
    print("| ranks | GB | stands still, sync | stands still, async | ratio | step alone | step beside a save |")
    print("|---|---|---|---|---|---|---|")
    for layout in ("", "--dp 2 --zero-stage 1"):
        steps = arguments.interval * (2 + 2 * arguments.turns)
        flags = [*FLAGS.split(), *layout.split(), "--train-iters", str(steps), *arguments.flags]
        world_size = read_config(flags).config.layout.world_size
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            work = partial(
                measure, flags=flags, turns=arguments.turns, interval=arguments.interval, folder=Path(folder)
            )
            status = launch(work, world_size=world_size)
            if status:
                return status
            found = json.loads((Path(folder) / "found.json").read_text())
        sync, beside = found["stalls"]["sync"], found["stalls"]["async"]
        alone, busy = found["steps"]
        ratio = statistics.median(sync) / statistics.median(beside)
        row = [world_size, f"{found['stored'] / 1e9:.2f}", spread(sync), spread(beside), f"{ratio:.0f}"]
        print("| " + " | ".join(map(str, [*row, spread(alone), spread(busy) if busy else "none"])) + " |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
