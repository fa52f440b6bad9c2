"""How did the pipeline really spend a step? Every action's times, in files that can be looked at."""

import time
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from megatronish import comm
from megatronish.mesh import Axis
from megatronish.schedule.plan import Action
from megatronish.schedule.recorded import Recorded, Row
from megatronish.train.trainer import Hook, StepRecord, Trainer

ONE_CLOCK = 0.5  # seconds: clocks that agree to this are one machine's clock, others were started with their machines


class ProfileSchedule(Hook):
    """Records steps `first` to `last` in the pipeline that holds the main rank.

    Leaves `step_N.json` (tools/draw_schedule.py --recorded draws it), `step_N.trace.json` (for chrome://tracing) and
    `step_N.png` in `folder`.
    """

    def __init__(self, folder: Path, *, first: int, last: int) -> None:
        self.folder, self.first, self.last = folder, first, last
        self._times: list[tuple[Action, float, float]] = []
        self._num_recorded = 0

    def start(self, trainer: Trainer) -> None:
        """The first step of this part of the run may be one of them."""
        self._arm(trainer)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Write what this step showed, and be ready for the next."""
        if trainer.engine.record is not None:
            self._write(trainer, record.step)
            self._num_recorded += 1
        self._arm(trainer)

    def finish(self, trainer: Trainer) -> None:
        """A run that has not been where it was told to look says so."""
        if self._num_recorded == 0 and trainer.engine.mesh.is_main:
            tqdm.write(
                f" --profile-schedule recorded nothing: this run was never in steps {self.first} to {self.last}; set "
                "--profile-step-start and --profile-step-end"
            )

    def _arm(self, trainer: Trainer) -> None:
        coordinates, next_step = trainer.engine.mesh.coordinates, trainer.progress.step + 1
        is_watched = (coordinates.dp, coordinates.cp, coordinates.tp) == (0, 0, 0)
        self._times = []
        trainer.engine.record = self._note if is_watched and self.first <= next_step <= self.last else None

    def _note(self, action: Action, start: float, end: float) -> None:
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
                    engine.stages.actions(stage, num_microbatches), of_stage.tolist(), strict=True
                )
            ]
            for stage, of_stage in enumerate(gathered.chunk(engine.mesh.pp.size))
        ]
        recorded = Recorded(engine.stages.schedule.name, rows)
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
        # matplotlib takes a second to import: only where it is used.
        from megatronish.schedule.draw_png import draw_png

        timed = recorded.timed()
        draw_png(timed, self.folder / path(".png"), title=f"{recorded.schedule}, step {step} as it ran", time="seconds")
        tqdm.write(f" step {step}: bubble rate {timed.bubble_rate:.1%}, drawn into {self.folder / path('.png')}")


def _offset(pp: Axis, device: torch.device) -> float:
    """What to add to this rank's clock to get that of the first stage."""
    comm.barrier(pp)
    now = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
    clocks = comm.start_all_gather(now, pp).wait()
    offset = float(clocks[0] - clocks[pp.rank])
    return offset if abs(offset) > ONE_CLOCK else 0.0
