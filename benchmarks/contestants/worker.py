"""Process of a contestant: builds it, then takes a step whenever it is told to, and sleeps between its turns.

    python -m benchmarks.contestants.worker JOB_IN_JSON FILE_OF_INITIAL_WEIGHTS

Requests and answers are lines of JSON over stdin and what was stdout; all that the frameworks print goes to stderr.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.contestants.case import Case, Contestant, Job, UnavailableError


def reset_peak() -> None:
    """Begin to measure the peak of resident memory anew, where the kernel lets us."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return


def peak_bytes() -> int:
    """Peak of resident memory since `reset_peak`."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


class Built(NamedTuple):
    """A contestant of any kind: its parameters, and its step of a number, whose answer has seconds and loss."""

    num_parameters: int
    take_step: Callable[[int], dict[str, Any]]


def timed(step: Callable[[], float | None]) -> dict[str, Any]:
    """One step, timed from the batch in memory to the loss on the host."""
    start = time.perf_counter()
    loss = step()
    return {"seconds": time.perf_counter() - start, "loss": loss}


def build(words: Sequence[str]) -> Built:
    """The contestant that the parent asks for."""
    told = json.loads(words[0])
    job = Job(**{**told, "case": Case(**told["case"])})
    module = importlib.import_module(f"benchmarks.contestants.{job.module}")
    state = torch.load(words[1], mmap=True, weights_only=True)
    contestant: Contestant = module.build(job, state)

    def take_step(step: int) -> dict[str, Any]:
        tokens, labels = job.case.batch(step)
        return timed(lambda: contestant.step(tokens, labels))

    return Built(contestant.num_parameters, take_step)


def serve(contestant: Built, write: Any) -> None:
    """Answer requests until the parent closes the pipe."""
    for line in sys.stdin:
        request = json.loads(line)
        if "step" in request:
            write(contestant.take_step(request["step"]))
        elif "reset" in request:
            reset_peak()
            write({})
        else:
            write({"peak": peak_bytes()})


def answer(build: Callable[[], Built]) -> None:
    """Build, say how many parameters there are, and serve. An error is an answer, too."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        torch.manual_seed(0)
        contestant = build()
        write({"parameters": contestant.num_parameters, "torch": torch.__version__})
        serve(contestant, write)
    except UnavailableError as error:
        write({"unavailable": str(error)})
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise
    finally:
        answers.flush()
    os._exit(0)  # process groups have no peer to say goodbye to


if __name__ == "__main__":
    answer(lambda: build(sys.argv[1:]))
