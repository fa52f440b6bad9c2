"""Benchmark of --offload-folder: what an update reads and writes of a disk, against a plain loop of the same pattern.

The plain loop reads chunks of three tensors and writes them back: O_DIRECT, preadv and pwritev of 1 MiB by four
threads, three buffers, nothing computed. `way` is `in_chunks` without an update, `update` AdamW's step. They take
turns, and the medians are printed, with the ratio of each to the loop.

    python benchmarks/offload_folder.py --folder /local/nvme --megabytes 768
"""

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.optim.fused import AdamW
from megatronish.optim.masters import Masters
from megatronish.parallel.disk import CHUNK, DEPTH, REQUEST, THREADS, DiskFile, in_chunks
from megatronish.parallel.pinned import Form
from megatronish.parallel.sharding import Sharding

TENSORS = 3  # masters and two moments


class PlainLoop:
    """Reads and writes of a file, chunk by chunk, as fast as four threads of Python ask for them."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size, self.chunk = 4 * size, 4 * CHUNK
        self.file = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT)
        os.posix_fallocate(self.file, 0, TENSORS * self.size)
        self.buffers = [mmap.mmap(-1, TENSORS * self.chunk) for _ in range(DEPTH + 2)]
        self.threads = ThreadPoolExecutor(THREADS)

    def run(self) -> None:
        """One pass."""
        number, several = self.size // self.chunk, len(self.buffers)
        writing: list[list[Future[None]]] = [[] for _ in self.buffers]
        reading = self._start(os.preadv, 0)
        for chunk in range(number):
            _wait(reading)
            if chunk + 1 < number:
                _wait(writing[(chunk + 1) % several])
                reading = self._start(os.preadv, chunk + 1)
            writing[chunk % several] = self._start(os.pwritev, chunk)
        for each in writing:
            _wait(each)

    def _start(self, transfer: Callable[[int, Sequence[memoryview], int], int], chunk: int) -> list[Future[None]]:
        memory = memoryview(self.buffers[chunk % len(self.buffers)])

        def moved(tensor: int, begin: int) -> None:
            place = tensor * self.chunk + begin
            size = transfer(
                self.file, [memory[place : place + REQUEST]], tensor * self.size + chunk * self.chunk + begin
            )
            assert size == REQUEST, "a short transfer"

        places = [(tensor, begin) for tensor in range(TENSORS) for begin in range(0, self.chunk, REQUEST)]
        return [self.threads.submit(moved, *place) for place in places]


def _wait(futures: Sequence[Future[None]]) -> None:
    for each in futures:
        each.result()


def go_through(tensors: Sequence[Tensor]) -> None:
    """Read and write all chunks."""
    for _ in in_chunks([tensors], num_written=TENSORS):
        pass


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--megabytes", type=int, default=768, help="of masters and moments together")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    size = given.megabytes * 10**6 // (4 * TENSORS) // CHUNK * CHUNK
    torch.set_num_threads(1)
    tensors = DiskFile(given.folder).zeros([Form((size,), torch.float32)] * TENSORS)
    master = nn.Parameter(DiskFile(given.folder).zeros([Form((size,), torch.float32)])[0])
    master.grad = torch.ones(size)
    update = AdamW(
        Masters({"w": master}, {}, {"w": Sharding((size,), role="matrix")}, {}, torch.device("cpu")), OptimizerConfig()
    )
    loop = PlainLoop(given.folder, size)
    work: dict[str, Callable[[], None]] = {
        "loop": loop.run,
        "way": lambda: go_through(tensors),
        "update": lambda: update.step(learning_rate=1e-3, weight_decay=0.1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(given.turns + 1):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if turn:  # the first one is left out
                seconds[name].append(time.perf_counter() - start)
    moved = 2 * 4 * TENSORS * size
    of_loop = statistics.median(seconds["loop"])
    for name, times in seconds.items():
        median = statistics.median(times)
        rate, slowest, fastest = (moved / each / 1e9 for each in (median, max(times), min(times)))
        part = f"{of_loop / median:.0%} of the loop"
        print(f"{name:<8}{rate:8.2f} GB/s read and written ({slowest:.2f} to {fastest:.2f}), {part}")


if __name__ == "__main__":
    main()
