"""Process of a contestant that tunes a model with chats; its requests and answers are those of `worker.py`.

python -m benchmarks.contestants.chat_worker JOB_IN_JSON
"""

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.contestants.chats import ChatJob, Tuner
from benchmarks.contestants.worker import Built, answer, timed


def build(words: Sequence[str]) -> Built:
    """The contestant that the parent asks for."""
    job = ChatJob(**json.loads(words[0]))
    chats = job.chats()
    tuner: Tuner = importlib.import_module(f"benchmarks.contestants.{job.module}").build(job, chats)

    def take_step(step: int) -> dict[str, Any]:
        found = timed(lambda: tuner.step(step))
        return {**found, "tokens": chats.num_tokens(step), "places": tuner.num_places(step)}

    return Built(tuner.num_parameters, take_step)


if __name__ == "__main__":
    answer(lambda: build(sys.argv[1:]))
