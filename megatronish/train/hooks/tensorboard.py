"""Writer of TensorBoard points: it writes on the main rank, and nothing on other ranks."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class TensorBoard:
    """Points over steps and, under the tag `... vs samples`, over samples. `folder` None: nothing is written.

    Points of steps after `first_step`, left by a run that was killed after its last checkpoint, are hidden.
    """

    def __init__(self, folder: Path | None, *, first_step: int = 0) -> None:
        self._writer = None if folder is None else SummaryWriter(str(folder), purge_step=first_step + 1)

    def add(self, points: Mapping[str, float | None], *, step: int, samples: int) -> None:
        """Add one point for each tag."""
        if self._writer is None:
            return
        try:
            for tag, value in points.items():
                self._writer.add_scalar(tag, value, step)
                self._writer.add_scalar(f"{tag} vs samples", value, samples)
        except OSError as error:
            tqdm.write(f"TensorBoard has no points from step {step} on: {error.strerror}", file=sys.stderr)
            self._writer = None

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            with suppress(OSError):  # a full disk
                self._writer.close()
