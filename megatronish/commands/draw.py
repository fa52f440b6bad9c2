"""Drawings of pipeline schedules, with bubble rate and peaks of live activations.

    megatronish draw --schedule 1f1b --stages 4 --microbatches 8 --png schedule.png
    megatronish draw --recorded runs/demo/schedule/step_10.json --png schedule.png

Prints a row for each stage and a column for each tick (the shortest action), the bubble rate, and the activations (of
one micro-batch in one chunk) that each stage holds at most. Times are those of one micro-batch in one whole stage, in
any unit; a chunk takes its share. With --recorded it draws a step as it was, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import PluginNames, read_arguments
from megatronish.config.plugins import import_plugins
from megatronish.core.errors import UserError
from megatronish.core.figures import no_matplotlib
from megatronish.core.files import refuse_input_as_output, unwritten
from megatronish.parallel.schedules.recorded import Recorded
from megatronish.parallel.schedules.simulate import Costs, simulate
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.schedules.timeline import TimedPlan, draw

COLUMNS_AN_ACTION = 3  # on average, of a recorded step

_SPLIT = " and ".join(name for name, schedule in SCHEDULES.items() if schedule.has_weight_gradients)
_WEIGHT_HELP = f"Time of a weight gradient: a part of the backward except in {_SPLIT}."

LONGEST_TIME = 1e12
MOST_ACTIONS, MOST_CELLS = 50_000, 1_000_000


@dataclass(frozen=True)
class DrawArguments:
    """Draw a pipeline schedule."""

    plugin: PluginNames = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""
    schedule: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(SCHEDULES)}.")] = "1f1b"
    stages: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 4
    """Pipeline stages."""
    microbatches: int = 8
    """Micro-batches of a step."""
    chunks: int | None = None
    """Chunks of the model on each stage. By default what the schedule needs, and 2 for interleaved."""
    forward: float = 1.0
    """Time of a forward."""
    backward: float = 1.0
    """Time of a backward as far as its input gradient."""
    weight: Annotated[float, tyro.conf.arg(help=_WEIGHT_HELP)] = 1.0
    transfer: float = 0.0
    """Time from one stage to the next."""
    recorded: Path | None = None
    """Draw the step in this file, which --profile-schedule of pretrain wrote."""
    png: Path | None = None
    """Draw into this file, too."""


def refuse_arguments(arguments: DrawArguments) -> None:
    """UserError for what cannot be drawn."""
    if arguments.recorded and replace(arguments, recorded=None, png=None) != DrawArguments():
        raise UserError("--recorded draws a step as it was: leave out all else but --png")
    if arguments.schedule not in SCHEDULES:
        raise UserError(f"schedule={arguments.schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
    for name in ("stages", "microbatches"):
        if getattr(arguments, name) < 1:
            raise UserError(f"{name}={getattr(arguments, name)} must be at least 1")
    chunks = arguments.chunks if arguments.chunks is not None and arguments.chunks > 0 else 2
    if arguments.stages * (arguments.stages + arguments.microbatches) * chunks > MOST_CELLS:
        raise UserError(
            f"stages={arguments.stages} x microbatches={arguments.microbatches} is a table of more than {MOST_CELLS:,} "
            "cells, too large to look at; draw fewer"
        )
    if arguments.stages * arguments.microbatches * chunks > MOST_ACTIONS:
        raise UserError(
            f"stages={arguments.stages} x microbatches={arguments.microbatches} is more than {MOST_ACTIONS:,} "
            "forwards, too many to look at; draw fewer"
        )
    for name in ("forward", "backward", "weight", "transfer"):
        if not 0 <= getattr(arguments, name) <= LONGEST_TIME:
            raise UserError(
                f"{name}={getattr(arguments, name)} must not be negative or above {LONGEST_TIME:g}; it is a time"
            )
    if arguments.png and arguments.png.suffix != ".png":
        raise UserError(f"png={arguments.png} must end in .png")


def planned(arguments: DrawArguments) -> tuple[str, TimedPlan]:
    """A simulated schedule, with its title."""
    schedule, stages, microbatches = SCHEDULES[arguments.schedule], arguments.stages, arguments.microbatches
    chunks = arguments.chunks if arguments.chunks is not None else schedule.num_chunks or 2
    plan = schedule.plan(num_stages=stages, num_microbatches=microbatches, num_chunks=chunks)
    costs = Costs(arguments.forward, arguments.backward, arguments.weight, arguments.transfer)
    placement = schedule.place(num_stages=stages, num_chunks=chunks)
    title = f"{schedule.name}, {stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
    return f"{title}, {microbatches} micro-batches", simulate(plan, costs=costs.per_chunk(chunks), placement=placement)


def recorded(path: Path) -> tuple[str, TimedPlan]:
    """A recorded step, with its title."""
    step = Recorded.read(path)
    return f"{step.schedule}, {len(step.rows)} stages, as it ran", step.timed()


def report(timed_plan: TimedPlan, *, is_real: bool) -> str:
    """The drawing and the numbers. Actions of a recorded step differ by orders of magnitude: they share columns."""
    rows = [f"{'':9}{'start':>10}{'end':>10}{'peak live activations':>24}"]
    for stage, (row, live) in enumerate(zip(timed_plan.timeline, timed_plan.peak_live, strict=True)):
        rows.append(f"stage {stage:<3}{row[0].start:10.5g}{row[-1].end:10.5g}{live:24d}")
    numbers = f"makespan {timed_plan.makespan:.6g}, bubble rate {timed_plan.bubble_rate:.2%}"
    most_columns = MOST_CELLS // len(timed_plan.timeline)
    if is_real:
        most_columns = min(most_columns, COLUMNS_AN_ACTION * max(map(len, timed_plan.timeline)))
    return "\n".join([draw(timed_plan.timeline, most_columns=most_columns), "", numbers, *rows])


def main(argv: Sequence[str], *, program: str = "megatronish draw") -> int:
    """Draw; the exit status, 2 with a message if it cannot be drawn."""
    return exit_status(partial(_run, argv, program), prefix=f"{Path(program).stem}: ")


def _run(argv: Sequence[str], program: str) -> int:
    arguments = read_arguments(DrawArguments, argv, program=program, description=__doc__)
    import_plugins(arguments.plugin)
    refuse_arguments(arguments)
    refuse_input_as_output("--png", arguments.png, [arguments.recorded])
    title, timed_plan = recorded(arguments.recorded) if arguments.recorded else planned(arguments)
    print(report(timed_plan, is_real=arguments.recorded is not None))
    if arguments.png:
        try:
            # matplotlib takes a second to import: only where it is used.
            from megatronish.parallel.schedules.draw_png import draw_png

            arguments.png.parent.mkdir(parents=True, exist_ok=True)
            draw_png(timed_plan, arguments.png, title=title, time="seconds" if arguments.recorded else "time")
        except OSError as error:
            raise unwritten(f"--png {arguments.png}", arguments.png, error) from error
        except ImportError as error:
            raise UserError(no_matplotlib(error)) from error
        print(f"\ndrawn into {arguments.png}")
    return 0
