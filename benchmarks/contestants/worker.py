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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def take_step(contestant: Contestant, case: Case, step: int) -> dict[str, Any]:
    """One step, timed from the batch in memory to the loss on the host."""
    tokens, labels = case.batch(step)
    start = time.perf_counter()
    loss = contestant.step(tokens, labels)
    return {"seconds": time.perf_counter() - start, "loss": loss}


def build(words: Mapping[str, Any], path: str) -> tuple[Contestant, Case]:
    """The contestant that the parent asks for."""
    job = Job(**{**words, "case": Case(**words["case"])})
    module = importlib.import_module(f"benchmarks.contestants.{job.module}")
    state = torch.load(path, mmap=True, weights_only=True)
    return module.build(job, state), job.case


def serve(contestant: Contestant, case: Case, write: Any) -> None:
    """Answer requests until the parent closes the pipe."""
    for line in sys.stdin:
        request = json.loads(line)
        if "step" in request:
            write(take_step(contestant, case, request["step"]))
        elif "reset" in request:
            reset_peak()
            write({})
        else:
            write({"peak": peak_bytes()})


def main() -> None:
    """Build, say how many parameters there are, and serve. An error is an answer, too."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        torch.manual_seed(0)
        contestant, case = build(json.loads(sys.argv[1]), sys.argv[2])
        write({"parameters": contestant.num_parameters, "torch": torch.__version__})
        serve(contestant, case, write)
    except UnavailableError as error:
        write({"unavailable": str(error)})
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise
    finally:
        answers.flush()
    os._exit(0)  # process groups have no peer to say goodbye to


if __name__ == "__main__":
    main()
