"""Recordings of a run that flags ask for: its operators (--profile), and a GPU's memory (--record-memory-history).

--profile is torch's profiler, whose traces are files of the run, or the window that Nsight Systems captures.

Nsight Systems sets NSYS_PROFILING_SESSION_ID in what it starts. Under it, on a GPU, --profile means what it means in
Megatron-LM (`nsys profile --capture-range=cudaProfilerApi ...`); everywhere else, and with --use-pytorch-profiler,
torch's profiler records, as only one of the two can listen to a GPU.
"""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from megatronish.config.sections.run import LogConfig
from megatronish.core.figures import no_matplotlib
from megatronish.report.breakdown import ENDING, Breakdown, plot_breakdown
from megatronish.train.trainer import Hook, StepRecord, Trainer

NUM_ROWS = 10  # of the table of the slowest operators
MOST_EVENTS = 100_000  # allocations and releases, the last ones; with their stacks about 100 MB


class StepWindow(Hook):
    """A recording of steps `first` to `last` of one rank."""

    is_observer = True

    def __init__(self, *, first: int, last: int, is_main: bool) -> None:
        self.first, self.last, self.is_main = first, last, is_main
        self._open: ExitStack | None = None
        self._step_range: ExitStack | None = None

    @property
    def steps(self) -> str:
        """The steps in words."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    def begin(self, stack: ExitStack) -> None:
        """Start the recording; what `stack` gets is left when it ends."""

    def name_step(self, stack: ExitStack, step: int) -> None:
        """Mark a step in the recording."""

    def write(self) -> None:
        """Write what was recorded."""

    def start(self, trainer: Trainer) -> None:
        """Say that nothing will be recorded, where a resumed run is beyond these steps."""
        if trainer.progress.step >= self.last and self.is_main:
            tqdm.write(f" --profile records nothing: {self.steps} were before this start")

    def before_step(self, trainer: Trainer) -> None:
        """Start the recording if the step is the first one of them, and mark each."""
        step = trainer.progress.step + 1
        if not self.first <= step <= self.last:
            return
        if self._open is None:
            with ExitStack() as stack:
                self.begin(stack)
                self._open = stack.pop_all()
        self._step_range = ExitStack()
        self.name_step(self._step_range, step)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """End the recording with the last of its steps.

        No transfer that was recorded may be in progress then: torch's profiler has an entry for each, gives that memory
        back when it stops, and the thread that ends the transfer still writes into it (SIGSEGV).
        """
        if self._step_range is not None:
            self._step_range.close()
            self._step_range = None
        if record.step == self.last:
            trainer.record.wait_for_recorded()
            self._close()

    def finish(self, trainer: Trainer) -> None:
        """End the recording where the run ends earlier; say so if it has recorded nothing."""
        if self._open is not None:
            trainer.record.wait_for_recorded()
            self._close()
        elif trainer.progress.step < self.first and self.is_main:
            tqdm.write(f" --profile recorded nothing: the run ended before {self.steps}; set --profile-step-start")

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
            self.write()


class OperatorProfile(StepWindow):
    """Recording by torch's profiler: a Chrome trace, where the steps went, and a table of operators."""

    def __init__(self, folder: Path, *, log: LogConfig, rank: int, device: torch.device) -> None:
        super().__init__(first=log.profile_step_start, last=log.profile_step_end - 1, is_main=rank == 0)
        self.folder, self.log, self.rank, self.device = folder, log, rank, device
        self._profile: profile | None = None

    def begin(self, stack: ExitStack) -> None:
        """Start a profiler of torch."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        recorder = profile(
            activities=activities,
            record_shapes=self.log.pytorch_profiler_collect_shapes,
            with_stack=self.log.pytorch_profiler_collect_callstack,
        )
        self._profile = stack.enter_context(recorder)

    def name_step(self, stack: ExitStack, step: int) -> None:
        """Mark a step as a range of the trace."""
        stack.enter_context(record_function(f"step {step}"))

    def write(self) -> None:
        """Write trace, tables and chart; on the main rank print where the steps went, and the slowest operators."""
        assert self._profile is not None
        steps = f"{self.first}" if self.first == self.last else f"{self.first}_to_{self.last}"
        trace = self.folder / f"rank_{self.rank}_step_{steps}{ENDING}"
        averages = self._profile.key_averages()
        key = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        lines = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(trace))
            table = averages.table(sort_by=key, row_limit=100, max_name_column_width=80)
            trace.with_name(trace.name.replace(ENDING, ".txt")).write_text(table)
            lines = _break_down(trace, rank=self.rank)
        except (OSError, RuntimeError) as error:
            tqdm.write(f" {self.steps} of rank {self.rank} were profiled and could not be written: {error}")
        if self.is_main:
            first = f" profile of {self.steps}: {trace}"
            tqdm.write("\n".join([first, *lines, " slowest operators", *slowest(averages, key=key)]))
        self._profile = None


def _break_down(trace: Path, *, rank: int) -> list[str]:
    """Write where the steps of a trace went, as text, JSON and a chart next to it; the lines of the text."""
    breakdown = Breakdown.of_trace(trace, rank=rank)
    if not breakdown.steps:  # the run ended in the first of them
        return []
    beside = partial(trace.name.replace, ENDING)
    trace.with_name(beside(".breakdown.txt")).write_text("\n".join([*breakdown.table(), ""]))
    breakdown.write(trace.with_name(beside(".breakdown.json")))
    try:
        plot_breakdown(breakdown, trace.with_name(beside(".breakdown.png")))
    except ImportError as error:
        return [*breakdown.table(), f" {no_matplotlib(error)}"]
    return breakdown.table()


def slowest(averages: EventList, *, key: str) -> list[str]:
    """Rows of the operators (on a GPU: kernels) with the largest share of the time."""
    times: list[tuple[float, FunctionEventAvg]] = [
        (getattr(each, key), each)
        for each in averages
        if not each.is_user_annotation
        and (key == "self_cpu_time_total" or each.device_type == torch.autograd.DeviceType.CUDA)
    ]
    total = sum(time for time, _ in times) or 1.0
    rows = sorted(times, key=lambda row: row[0], reverse=True)[:NUM_ROWS]
    return [
        "     self time   share    calls  operator",
        *(f"  {time / 1e3:9.2f} ms  {time / total:6.1%} {each.count:8d}  {each.key:.70}" for time, each in rows),
    ]


class MeetStages(Hook):
    """Lets the stages of a pipeline wait for each other at the end of recorded steps; every rank has this hook.

    So the end of the bubble is measured as such, also by a rank whose peers record nothing.
    """

    def __init__(self, log: LogConfig) -> None:
        self.steps = range(log.profile_step_start, log.profile_step_end)

    def before_step(self, trainer: Trainer) -> None:
        """Tell the engine whether the step is recorded."""
        trainer.engine.meets_stages = trainer.progress.step + 1 in self.steps


class NsightWindow(StepWindow):
    """Window for `nsys profile --capture-range=cudaProfilerApi`, with an NVTX range for each step and operator."""

    def begin(self, stack: ExitStack) -> None:
        """Open the window, and mark operators from here on."""
        torch.cuda.profiler.start()
        stack.callback(torch.cuda.profiler.stop)
        stack.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))

    def name_step(self, stack: ExitStack, step: int) -> None:
        """Mark a step as an NVTX range."""
        stack.enter_context(torch.cuda.nvtx.range(f"step {step}"))


def step_profiler(log: LogConfig, folder: Path, *, rank: int, device: torch.device) -> StepWindow:
    """Hook of --profile for this rank."""
    under_nsight = "NSYS_PROFILING_SESSION_ID" in os.environ and device.type == "cuda"
    if under_nsight and not log.use_pytorch_profiler:
        return NsightWindow(first=log.profile_step_start, last=log.profile_step_end - 1, is_main=rank == 0)
    return OperatorProfile(folder, log=log, rank=rank, device=device)


class MemoryHistory(Hook):
    """Every allocation on a GPU, as a snapshot for https://pytorch.org/memory_viz: written at the end of a run,
    and when it fails: out of memory above all."""

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
