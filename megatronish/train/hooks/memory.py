"""The MemoryHistory hook: every allocation on a GPU, as a snapshot for https://pytorch.org/memory_viz."""

from pathlib import Path

import torch
from tqdm import tqdm

from megatronish.train.trainer import Hook, Trainer

MOST_EVENTS = 100_000  # allocations and releases, the last ones; with their stacks about 100 MB


class MemoryHistory(Hook):
    """History of a GPU's memory, written at the end of a run, and when it fails: out of memory above all."""

    is_observer = True

    def __init__(self, path: Path, *, device: torch.device, is_main: bool) -> None:
        self.path, self.device, self.is_main = path, device, is_main
        self._is_recording = False

    def start(self, trainer: Trainer) -> None:
        """Record from here on; on a CPU there is nothing to record, which is printed."""
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
            self._is_recording = True
        elif self.is_main:
            tqdm.write(" --record-memory-history is idle: torch records a GPU's memory alone, and this run has none")

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Write what led to the error."""
        self._write()

    def finish(self, trainer: Trainer) -> None:
        """Write the history, and record no more."""
        self._write()

    def _write(self) -> None:
        if not self._is_recording:
            return
        self._is_recording = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.path))
        except (OSError, RuntimeError) as error:
            tqdm.write(f" the memory history could not be written to {self.path}: {error}")
        else:
            tqdm.write(f" memory history: {self.path}; https://pytorch.org/memory_viz shows it")
        torch.cuda.memory._record_memory_history(enabled=None)


def snapshot_path(given: str | None, folder: Path, *, rank: int) -> Path:
    """Path of a rank's snapshot: in `folder`, or the given one, with the rank's number except for rank 0."""
    if given is None:
        return folder / f"rank_{rank}_memory.pickle"
    path = Path(given)
    return path if rank == 0 else path.with_name(f"{path.stem}_rank_{rank}{path.suffix}")
