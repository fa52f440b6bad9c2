"""What does a pipeline schedule look like, and how much of it is bubble?

    python tools/draw_schedule.py --schedule 1f1b --stages 4 --microbatches 8 --png schedule.png

Prints a row for each stage and a column for each tick (the shortest action), the bubble rate, and the activations that
each stage holds at most. Costs are times of one micro-batch in one stage, in any unit.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatronish.pipeline.draw import draw
from megatronish.pipeline.schedule import SCHEDULES
from megatronish.pipeline.simulate import Costs, simulate
from megatronish.pipeline.timeline import TimedPlan


@dataclass(frozen=True)
class Arguments:
    """Draw a pipeline schedule."""

    schedule: str = "1f1b"
    """Which one: gpipe or 1f1b."""
    stages: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 4
    """Pipeline stages."""
    microbatches: int = 8
    """Micro-batches of a step."""
    forward: float = 1.0
    """Time of a forward."""
    backward: float = 2.0
    """Time of a backward: of the input gradient alone if --weight is given too."""
    weight: float = 0.0
    """Time of a weight gradient."""
    transfer: float = 0.0
    """Time from one stage to the next."""
    png: Path | None = None
    """Draw into this file, too."""


def refuse_arguments(arguments: Arguments) -> None:
    """ValueError for what cannot be drawn."""
    if arguments.schedule not in SCHEDULES:
        raise ValueError(f"schedule={arguments.schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
    for name in ("stages", "microbatches"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)} must be at least 1")
    for name in ("forward", "backward", "weight", "transfer"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"{name}={getattr(arguments, name)} must not be negative; it is a time")


def report(simulation: TimedPlan) -> str:
    """The drawing and the numbers."""
    rows = [f"{'':9}{'start':>10}{'end':>10}{'peak live activations':>24}"]
    for stage, (row, live) in enumerate(zip(simulation.timeline, simulation.peak_live, strict=True)):
        rows.append(f"stage {stage:<3}{row[0].start:10g}{row[-1].end:10g}{live:24d}")
    numbers = f"makespan {simulation.makespan:g}, bubble rate {simulation.bubble_rate:.2%}"
    return "\n".join([draw(simulation.timeline), "", numbers, *rows])


def main() -> int:
    """Draw; status 2 with a sentence if it cannot be drawn."""
    arguments = tyro.cli(Arguments, description=__doc__)
    try:
        refuse_arguments(arguments)
    except ValueError as error:
        print(f"draw_schedule: {error}", file=sys.stderr)
        return 2
    plan = SCHEDULES[arguments.schedule].plan(num_stages=arguments.stages, num_microbatches=arguments.microbatches)
    costs = Costs(arguments.forward, arguments.backward, arguments.weight, arguments.transfer)
    simulation = simulate(plan, costs=costs)
    print(report(simulation))
    if arguments.png:
        from megatronish.pipeline.draw_png import draw_png  # matplotlib takes a second to import: only where it is used

        title = f"{arguments.schedule}, {arguments.stages} stages, {arguments.microbatches} micro-batches"
        arguments.png.parent.mkdir(parents=True, exist_ok=True)
        draw_png(simulation, arguments.png, title=title)
        print(f"\ndrawn into {arguments.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
