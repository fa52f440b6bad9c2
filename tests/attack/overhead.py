"""Cost of the record and the watchdog, interleaved with steps without them.

Blocks of steps with and without alternate in one run of two ranks (tp 2). Prints the median over pairs of neighbouring
blocks of the ratio of their seconds, the collectives of a step, and the processor time of one entry and of one round of
the watchdog.

    PYTHONPATH=.:tests/support:tests/attack python tests/attack/overhead.py
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jobs import tiny
from ranks import run_ranks
from results import Result, publish

from megatronish.config.read import read_config
from megatronish.launch.place import Place
from megatronish.parallel import comm
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh, start_sharing, watchdog_of
from megatronish.watch.record import RankRecord
from megatronish.watch.watchdog import LONGEST

BLOCK, PAIRS = 4, 24
ENTRIES, ROUNDS = 20000, 200
LIMIT = 0.5  # percent
MODEL = "--tp 2 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 128"
MODEL += " --micro-batch-size 2 --global-batch-size 4 --vocab-size 1024"


class Costs(NamedTuple):
    """Seconds of a step without the record, ratios of pairs of blocks, and what one entry and one round take."""

    step: float
    ratios: list[float]
    num_collectives: int
    entry_us: float
    round_ms: float


def measure(place: Place, run_dir: str) -> Costs:
    """What the record and the watchdog cost this rank."""
    config, _ = read_config(tiny(Path(run_dir), MODEL))
    record = RankRecord()
    watchdog = watchdog_of(config, place, record)
    mesh = start_mesh(config, place, record=record, watchdog=watchdog)
    job = TrainingJob.open(config, mesh)
    engine = job.build_engine()
    batches = job.batches_of(job.datasets.train)(0, config.global_batch_size)
    real = {name: getattr(comm, name) for name in ("entry_of", "_waiting")}
    without: dict[str, Any] = {"entry_of": lambda *_: None, "_waiting": lambda _: comm._WITHOUT_RECORD}

    def block(functions: dict[str, Any]) -> float:
        for name, function in functions.items():
            setattr(comm, name, function)
        comm.barrier(mesh.world)
        start = time.perf_counter()
        for _ in range(BLOCK):
            engine.step(batches, num_steps_done=0, learning_rate=1e-4, weight_decay=0.0)
        return (time.perf_counter() - start) / BLOCK

    with watchdog:  # its thread runs in all blocks alike
        start_sharing(watchdog, place)
        record.enter_phase("step")
        for line in record.lines:
            record.shared.add_line(line.index, line.key)  # type: ignore[union-attr]
        block(real)
        before = sum(line.last for line in record.lines)
        block(real)
        count = (sum(line.last for line in record.lines) - before) // BLOCK
        pairs = [(block(real), block(without)) if i % 2 else (block(without), block(real))[::-1] for i in range(PAIRS)]
        start = time.thread_time()
        for _ in range(ROUNDS):
            watchdog._look()
        look = (time.thread_time() - start) / ROUNDS
    x, line = torch.zeros(4, 5, 6), record.lines[0]
    start = time.process_time()
    for _ in range(ENTRIES):
        line.enter("all_reduce", x)
    entry = (time.process_time() - start) / ENTRIES
    ratios = [a / b for a, b in pairs]
    return Costs(statistics.median(b for _, b in pairs), ratios, count, 1e6 * entry, 1e3 * look)


def main() -> int:
    """Measure and print; 1 if it is more than half a percent."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(2, measure, folder, timeout=170)[0]
    low, middle, high = statistics.quantiles(found.ratios, n=4)
    entries = 100 * 1e-6 * found.entry_us * found.num_collectives / found.step
    print(
        f"a step of {1e3 * found.step:.1f} ms with {found.num_collectives} collectives: with the record x {middle:.4f}"
    )
    print(f"(quartiles {low:.4f} to {high:.4f}, {len(found.ratios)} pairs); an entry takes {found.entry_us:.2f} us of")
    print(f"processor time, {entries:.3f} % of the step; a round of the watchdog {found.round_ms:.2f} ms every")
    watch = 1e-1 * found.round_ms / LONGEST
    print(f"{LONGEST:g} s, {watch:.3f} % of a core")
    told = f"{entries + watch:.3f} % of a step by count; interleaved x {middle:.3f} ({low:.3f} to {high:.3f})"
    return publish(Result("overhead of record and watchdog", len(found.ratios), int(entries + watch > LIMIT), told))


if __name__ == "__main__":
    sys.exit(main())
