"""The ProfileSchedule hook: start and end of every action of some steps, as numbers, a picture and a Chrome trace."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatronish.core.figures import no_matplotlib
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis
from megatronish.parallel.schedules.plan import Action
from megatronish.parallel.schedules.recorded import Recorded, Row
from megatronish.train.trainer import Hook, StepRecord, Trainer

ONE_CLOCK = 0.5  # seconds: clocks that agree to this are one machine's clock, others were started with their machines


class ProfileSchedule(Hook):
    """Record of steps `first` to `last` in the pipeline that holds the main rank.

    Leaves `step_N.json` (`megatronish draw --recorded` draws it), `step_N.trace.json` (for chrome://tracing) and
    `step_N.png` in `folder`.
    """

    name = "profile_schedule"

    def __init__(self, folder: Path, *, first: int, last: int) -> None:
        self.folder, self.first, self.last = folder, first, last
        self._times: list[tuple[Action, float, float]] = []
        self._recorded: list[int] = []  # steps, over the whole run

    def before_step(self, trainer: Trainer) -> None:
        """Observe the engine, where the step is one of them and this rank is in the recorded pipeline."""
        coordinates, step = trainer.engine.mesh.coordinates, trainer.progress.step + 1
        if (coordinates.dp, coordinates.cp, coordinates.tp) == (0, 0, 0) and self.first <= step <= self.last:
            self._times = []
            trainer.engine.observers.append(self._observe)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Write the times of the step, if it was observed."""
        if self._observe in trainer.engine.observers:
            trainer.engine.observers.remove(self._observe)
            self._write(trainer, record.step)
            self._recorded.append(record.step)

    def finish(self, trainer: Trainer) -> None:
        """Print a message if the run has taken none of the steps to be recorded."""
        is_missed = not any(self.first <= step <= self.last for step in self._recorded)
        if is_missed and trainer.engine.mesh.is_main:
            tqdm.write(
                f" --profile-schedule recorded nothing: this run was never in steps {self.first} to {self.last}; set "
                "--profile-step-start and --profile-step-end"
            )

    def state(self) -> dict[str, Any]:
        """Steps recorded so far: a run that continues beyond them has not missed them."""
        return {"recorded": self._recorded}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the recorded steps of a `state`."""
        self._recorded = [step for step in state.get("recorded", []) if type(step) is int]

    def _observe(self, action: Action, start: float, end: float) -> None:
        self._times.append((action, start, end))

    def _write(self, trainer: Trainer, step: int) -> None:
        engine = trainer.engine
        times = torch.tensor([(start, end) for _, start, end in self._times], dtype=torch.float64)
        times += _offset(engine.mesh.pp, engine.mesh.device)
        gathered = comm.start_all_gather(times.to(engine.mesh.device), engine.mesh.pp).wait().cpu()
        if not engine.mesh.is_main:
            return
        # Each stage does as many actions: those of its plan.
        num_microbatches = sum(action.kind == "F" and action.chunk == 0 for action, _, _ in self._times)
        rows: list[list[Row]] = [
            [
                (*action, start, end)
                for action, (start, end) in zip(
                    engine.stage.stages.actions(stage, num_microbatches), of_stage.tolist(), strict=True
                )
            ]
            for stage, of_stage in enumerate(gathered.chunk(engine.mesh.pp.size))
        ]
        recorded = Recorded(engine.stage.stages.schedule.name, rows)
        try:
            self._draw(recorded, step)
        except OSError as error:
            tqdm.write(
                f" step {step} was recorded and could not be written to {self.folder}: {error.strerror or error}"
            )

    def _draw(self, recorded: Recorded, step: int) -> None:
        path = partial("step_{}{}".format, step)
        recorded.write(self.folder / path(".json"))
        recorded.write_chrome_trace(self.folder / path(".trace.json"))
        timed = recorded.timed()
        try:
            # matplotlib takes a second to import: only where it is used.
            from megatronish.parallel.schedules.draw_png import draw_png

            title = f"{recorded.schedule}, step {step} as it ran"
            draw_png(timed, self.folder / path(".png"), title=title, time="seconds")
        except ImportError as error:
            tqdm.write(f" {no_matplotlib(error)}")
        simulated = recorded.simulated()
        longer = "" if simulated is None else f", {timed.makespan / simulated.makespan - 1:+.1%} against its simulation"
        tqdm.write(
            f" step {step}: bubble rate {timed.bubble_rate:.1%}{longer}, drawn into {self.folder / path('.png')}"
        )


def _offset(pp: Axis, device: torch.device) -> float:
    """Offset of the first stage's clock from the clock of this rank, in seconds."""
    comm.barrier(pp, device)
    now = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
    clocks = comm.start_all_gather(now, pp).wait()
    offset = float(clocks[0] - clocks[pp.rank])
    return offset if abs(offset) > ONE_CLOCK else 0.0
