"""Tasks of preprocessing on a cluster of Ray: `megatronish preprocess run --engine ray`.

Ray chooses the machines, and runs a task again whose node or process has left. What a task writes depends on its plan
alone, so that is no other result. The cluster is that of RAY_ADDRESS, else one that runs on this machine, else Ray
starts one here; all its nodes need megatronish and the folder of the plan.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from megatronish.core.errors import RunError, UserError
from megatronish.data.tasks import Phase, Plan, Sign, sign_of

MAX_RETRIES = 5
"""Runs of a task after the first, where its node or process has left."""
SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LINES = 1.0, 30.0
MAX_SUBMITTED = 4096
"""Tasks that are given to Ray at once."""


class TaskOutcome(NamedTuple):
    """What became of a task: counts for its line, or why it failed, and whether another run may end otherwise."""

    number: int
    counts: str
    failure: str = ""
    is_of_machine: bool = False


def run_on_ray(
    plan: Plan, phase: Phase, numbers: Sequence[int], work: Callable[[int], TaskOutcome], *, workers: int
) -> int:
    """Run tasks on a cluster; the exit status: 0, 1 after a failure of the machine alone, 2 after a mistake.

    `work` runs a task in a process of Ray, and returns a failure in place of raising it.
    """
    ray = _connected()
    _tell_too_many_workers(ray, workers)
    started, left, running = time.time(), list(reversed(numbers)), dict[Any, int]()
    remote = ray.remote(num_cpus=workers, max_retries=MAX_RETRIES)(_in_folder)
    progress, status = _RayProgress(plan, phase, len(numbers), started), 0
    try:
        while left or running:
            while left and len(running) < MAX_SUBMITTED:
                number = left.pop()
                running[remote.remote(work, number, os.getcwd())] = number
            ready, _ = ray.wait(list(running), num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)
            for reference in ready:
                outcome = _outcome_of(ray, reference, running.pop(reference))
                progress.tell_end(outcome)
                if outcome.failure:
                    status = 1 if status in (0, 1) and outcome.is_of_machine else 2
            progress.look(running.values())
    finally:
        progress.close()
        ray.shutdown()
    return status


def _connected() -> Any:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise UserError(f"--engine ray needs Ray, which is missing ({error}); pip install ray") from error
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = os.environ.get("RAY_ADDRESS", "of this machine")
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"--engine ray: no cluster of Ray answers at {where} ({line}); start it, or correct RAY_ADDRESS"
        ) from error
    return ray


def _tell_too_many_workers(ray: Any, workers: int) -> None:
    """A warning where no node has so many cores: Ray waits for one, which a cluster that grows may get."""
    most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if workers > most:
        print(
            f"warning: --workers {workers} is more than the {most:.0f} CPUs of the largest node, and tasks wait until "
            "there is one with as many",
            file=sys.stderr,
        )


def _in_folder(work: Callable[[int], TaskOutcome], number: int, folder: str) -> TaskOutcome:
    """The work in a process of Ray, in the folder of the command, where the paths of the plan lead to the inputs."""
    try:
        os.chdir(folder)
    except OSError as error:
        why = (
            f"the folder {folder} cannot be entered on {os.uname().nodename} ({error.strerror}); mount it on all nodes"
        )
        return TaskOutcome(number, "", why, is_of_machine=True)
    return work(number)


def _outcome_of(ray: Any, reference: Any, number: int) -> TaskOutcome:
    try:
        outcome: TaskOutcome = ray.get(reference)
    except ray.exceptions.RayTaskError:  # a bug, whose traceback is worth more than a sentence
        raise
    except ray.exceptions.RayError as error:
        line = (str(error).splitlines() or [""])[0]
        return TaskOutcome(number, "", f"{type(error).__name__}: {line}; run it again", is_of_machine=True)
    return outcome


class _RayProgress:
    """One line about all nodes: a bar on a terminal, else a line now and then; and a line of each task that ended."""

    def __init__(self, plan: Plan, phase: Phase, num_tasks: int, started: float) -> None:
        self._plan, self._phase, self._started, self._told = plan, phase, started, started
        self._bar = tqdm(total=num_tasks, unit=" tasks", desc="ray", disable=None)
        self._ended = self._failed = 0

    def tell_end(self, outcome: TaskOutcome) -> None:
        """Print how a task has ended."""
        name = f"task {outcome.number} of {len(self._plan.tasks)}"
        self._ended += 1
        self._bar.update()
        if outcome.failure:
            self._failed += 1
            tqdm.write(f"error: {name}: {outcome.failure}", file=sys.stderr)
        else:
            tqdm.write(f"{name}: {outcome.counts}", file=sys.stdout)

    def look(self, running: Any) -> None:
        """Show where the running tasks are, by their signs of life."""
        now = time.time()
        if self._bar.disable and now < self._told + SECONDS_BETWEEN_LINES:
            return
        self._told = now
        signs: Mapping[int, Sign] = {
            number: sign
            for number in list(running)[: MAX_SUBMITTED // 4]
            if (sign := sign_of(self._plan, number, self._phase)) is not None
            and sign.heard >= self._started
            and not sign.failure
        }
        machines = len({sign.host for sign in signs.values()})
        documents = sum(sign.documents for sign in signs.values())
        line = f"{len(signs):,} at work on {machines:,} machines with {documents:,} documents, {self._failed:,} failed"
        self._bar.set_postfix_str(line)
        if self._bar.disable:
            print(f"ray: {self._ended:,} of {self._bar.total:,} tasks ended, {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line as it is."""
        self._bar.close()
