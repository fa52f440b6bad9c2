"""The TensorBoard tracker: points over steps and over samples, the config and the first lines as text."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatronish.config.sections.run import LogConfig
from megatronish.report.trackers.tracker import Points, RunDescription, RunSummary, Tracker


class TensorBoard(Tracker):
    """Points over steps and, under the tag `... vs samples`, over samples.

    Points of steps after the first one of this start, left by a run that was killed after its last checkpoint, are
    hidden.
    """

    title = "TensorBoard"

    def __init__(self, folder: Path, *, queue_size: int = 1000) -> None:
        self.folder, self.queue_size = folder, queue_size

    @classmethod
    def of(cls, log: LogConfig, folder: Path) -> "TensorBoard":
        """Writer into the run's folder of TensorBoard."""
        return cls(folder, queue_size=log.tensorboard_queue_size)

    def begin(self, run: RunDescription) -> None:
        """Open a file of events, and write the texts."""
        # It takes a tenth of a second to import: here only the thread of this tracker waits for it.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(f"tensorboard cannot be imported ({error}); pip install tensorboard") from error

        _end_threads_silently()
        self._writer = SummaryWriter(str(self.folder), max_queue=self.queue_size, purge_step=run.first_step + 1)
        for tag, text in (("run", run.first_lines), ("config", run.config_text)):
            self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), run.first_step + 1)
        self._writer.flush()

    def add(self, points: Sequence[Points]) -> None:
        """Write a point over steps and one over samples for each tag."""
        for values, step, samples in points:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)
                self._writer.add_scalar(f"{tag} vs samples", value, samples)

    def end(self, summary: RunSummary) -> None:
        """Write all that is left."""
        self._writer.close()


def _end_threads_silently() -> None:
    """Let the threads of TensorBoard's writers end without a traceback: their next call raises the same error."""
    with suppress(ImportError, AttributeError):
        from tensorboard.summary.writer import event_file_writer

        kind = event_file_writer._AsyncWriterThread
        if kind.run.__module__ != __name__:
            kind.run = _without_errors(kind.run)


def _without_errors(run: Callable[[Any], None]) -> Callable[[Any], None]:
    def run_silently(thread: Any) -> None:
        with suppress(Exception):
            run(thread)

    return run_silently
