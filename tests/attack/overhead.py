"""Cost of the record and the watchdog, interleaved with steps without them.

Blocks of steps with and without alternate in one run of two ranks (tp 2). Prints the median over pairs of neighbouring
blocks of the ratio of their seconds, the collectives of a step, and the processor time of one entry.

    PYTHONPATH=.:tests/support python tests/attack/overhead.py
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from jobs import tiny
from ranks import run_ranks

from megatronish import comm
from megatronish.config.read import read_config
from megatronish.launch.place import Place
from megatronish.train.job import TrainingJob
from megatronish.train.run import start_mesh
from megatronish.train.watch import start_sharing, watchdog_of
from megatronish.watch.record import RankRecord

BLOCK, PAIRS = 4, 24
MODEL = "--tp 2 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 128"
MODEL += " --micro-batch-size 2 --global-batch-size 4 --vocab-size 1024"


def measure(place: Place, run_dir: str) -> tuple[float, list[float], int, float]:
    """Seconds of a step without, ratios of pairs, collectives of a step, and microseconds of an entry."""
    config, _ = read_config(tiny(Path(run_dir), MODEL))
    record = RankRecord()
    watchdog = watchdog_of(config, place, record)
    mesh = start_mesh(config, place, record=record, watchdog=watchdog)
    job = TrainingJob.open(config, mesh)
    engine = job.build_engine()
    batches = job.batches_of(job.datasets.train)(0, config.global_batch_size)
    real = {name: getattr(comm, name) for name in ("_entry", "_waiting")}
    without: dict[str, Any] = {"_entry": lambda *_: None, "_waiting": lambda _: comm._WITHOUT_RECORD}

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
    x, line = torch.zeros(4, 5, 6), record.lines[0]
    start = time.process_time()
    for _ in range(20000):
        line.enter("all_reduce", x)
    entry = (time.process_time() - start) / 20000
    return statistics.median(b for _, b in pairs), [a / b for a, b in pairs], count, 1e6 * entry


def main() -> None:
    """Measure and print."""
    seconds, ratios, count, entry = run_ranks(2, measure, "/tmp/overhead", timeout=170)[0]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"a step of {1e3 * seconds:.1f} ms with {count} collectives: with the record x {middle:.4f} (quartiles")
    print(f"{low:.4f} to {high:.4f}, {len(ratios)} pairs); an entry takes {entry:.2f} us of processor time,")
    print(f"{100 * 1e-6 * entry * count / seconds:.3f} % of the step")


if __name__ == "__main__":
    main()
