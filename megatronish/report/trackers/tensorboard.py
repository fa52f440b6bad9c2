"""The TensorBoard tracker: points over steps and over samples, the config and the first lines as text."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatronish.config.config import Config
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
    def of(cls, config: Config) -> "TensorBoard":
        """Writer into the run's folder of TensorBoard."""
        return cls(config.tensorboard_dir, queue_size=config.log.tensorboard_queue_size)

    def begin(self, run: RunDescription) -> None:
        """Open a file of events, and write the texts."""
        # It takes a tenth of a second to import: here only the thread of this tracker waits for it.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(f"tensorboard cannot be imported ({error}); pip install tensorboard") from error

        self._writer = SummaryWriter(str(self.folder), max_queue=self.queue_size, purge_step=run.first_step + 1)
        _leave_errors_to_calls(self._writer)
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


def _leave_errors_to_calls(writer: Any) -> None:
    """Let the thread of TensorBoard's writer end without a traceback: its next call raises the same error."""
    with suppress(AttributeError):
        thread = writer._get_file_writer().event_writer._async_writer._worker
        thread._invoke_excepthook = lambda _thread: None
