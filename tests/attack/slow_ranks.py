"""A rank that is 1.5 times slower than its peers, and a long run without one, with a table.

In each layout one rank sleeps in every step from a random step on, half of what a step takes: it must be named within
40 steps, it alone, with the step since when. In a run of 1,000 steps without such a rank no rank may be named.

    PYTHONPATH=.:tests/support python tests/attack/slow_ranks.py [--seed 1] [--steps 1000]
"""

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import run_job, tiny
from results import Result, publish

from megatronish.engine.engine import Engine

LAYOUTS = {"--dp 2": 1, "--tp 2": 0, "--dp 4": 2, "--tp 2 --pp 2": 3, "--dp 2 --zero-stage 1": 0, "--cp 2": 1}
WITHIN, LIMIT = 40, 300.0
USUAL = 0.1
"""Seconds that every rank takes in a step: far more than the noise of a busy machine."""
SHORT = 0.03
"""The same in runs without a slow rank, where noise is the attack."""
NAMED = re.compile(r"rank (\d+) \([^)]*\) is slow since step (\d+)")


def plant(rank: int | None, since: int, usual: float) -> None:
    """Planted in a job: all ranks take some time in a step, and one of them half as long again as it would."""
    gradients, computed = Engine.gradients, [0.0]

    def slowed(engine: Engine, *args: Any, num_steps_done: int, **named: Any) -> Any:
        time.sleep(usual)
        if engine.mesh.world.rank == rank and num_steps_done + 1 >= since:
            time.sleep(0.5 * (usual + computed[0]))
        begun = time.thread_time()
        result = gradients(engine, *args, num_steps_done=num_steps_done, **named)
        computed[0] = time.thread_time() - begun
        return result

    Engine.gradients = slowed  # type: ignore[method-assign]


def attack(layout: str, rank: int | None, since: int, steps: int) -> list[tuple[int, int, int]]:
    """Ranks that were named: which, since when by the report, and the step before the report."""
    with tempfile.TemporaryDirectory(prefix="slow-") as name:
        argv = tiny(Path(name) / "run", f"{layout} --train-iters {steps} --log-interval 1")
        sleeps = (rank, since, SHORT if rank is None else USUAL)
        ended = run_job(argv, Path(name), seconds=LIMIT, plant=plant, plant_args=sleeps)
    assert ended.status == 0, ended
    named, last = [], 0
    for line in ended.output.splitlines():
        if match := re.search(r"iteration +(\d+)", line):
            last = int(match[1])
        if match := NAMED.search(line):
            named.append((int(match[1]), int(match[2]), last))
    return named


def main() -> int:
    """Run them; 1 if a slow rank was not named in time, or another one was."""
    parser = argparse.ArgumentParser(description="slow ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000, help="of the runs without a slow rank, together")
    parser.add_argument("layouts", nargs="*")
    args = parser.parse_args()
    numbers, failed, latest = random.Random(args.seed), 0, 0
    layouts = {each: rank for each, rank in LAYOUTS.items() if not args.layouts or each in args.layouts}
    for layout, rank in layouts.items():
        since = numbers.randint(2, 17)
        named = attack(layout, rank, since, since + WITHIN + 8)
        late = named[0][2] - since + 1 if named else 0
        right = [each[0] for each in named] == [rank] and late <= WITHIN
        failed, latest = failed + (not right), max(latest, late)
        print(
            f"{'right' if right else 'WRONG'} {layout:24} rank {rank} slow since step {since}: named {named}",
            flush=True,
        )
    steps = max(args.steps // 2, 1)
    alarms = [(layout, named) for layout in list(layouts)[:2] if (named := attack(layout, None, 0, steps))]
    print(f"{2 * steps} steps without a slow rank: {alarms or 'no rank was named'}")
    slow = Result("slow ranks, 1.5 times", len(layouts), failed, f"named after {latest} steps at most")
    return publish(slow, Result("steps without a slow rank", 2 * steps, len(alarms), f"{len(alarms)} false alarms"))


if __name__ == "__main__":
    sys.exit(main())
