"""Dry runs of several cases in this process, which is started for it: their records as JSON, a line for each.

MEGATRONISH_KERNELS=assumed python tests/support/dry_runs.py 0 +3 5     (numbers of cases, those of SINGLE last)

A + before a number: with an evaluation, a second step and the search for a NaN, too. `generation` and `planted`
stand for what they have of their own; `argv RANK FLAGS` for one rank of any run (random_layouts.py).
"""

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from megatronish.dry_run.fake_cuda import load_fake_cuda

library = load_fake_cuda()  # before torch is imported

from dry_afterwards import all_that_follows, planted  # noqa: E402
from dry_cases import CASES, SINGLE  # noqa: E402
from dry_generation import GENERATIONS, generation_of  # noqa: E402

from megatronish.commands.configuration import read_config  # noqa: E402
from megatronish.dry_run.rank import PlannedRun, hooks_alone, run_rank  # noqa: E402
from megatronish.dry_run.run import json_of, with_expected  # noqa: E402


def result_of(argv: Sequence[str], rank: int, *, whole: bool) -> dict[str, Any]:
    """What the report has of a rank, or how it failed; `whole`: with all that follows a step in a run."""
    try:
        config = read_config(argv).config
        assert config.data.vocab_size is not None
        planned = PlannedRun(config, config.data.vocab_size, "cuda")
        return json_of(
            planned,
            [with_expected(planned, run_rank(planned, rank, then=all_that_follows if whole else hooks_alone))],
            notes=[],
        )["ranks"][0]
    except Exception:
        return {"error": traceback.format_exc()}


def said_of_mistakes() -> dict[str, str]:
    """What is said of mistakes that were planted, in the case that has tensors on both devices."""
    config = read_config(next(case for case in SINGLE if case.name == "experts offloaded").argv).config
    assert config.data.vocab_size is not None
    said: dict[str, str] = {}
    run_rank(PlannedRun(config, config.data.vocab_size, "cuda"), 3, then=lambda *given: said.update(planted(*given)))
    return said


if __name__ == "__main__":
    library.install_fake_cuda()
    if sys.argv[1] == "argv":
        print(json.dumps(result_of(sys.argv[3:], int(sys.argv[2]), whole=False)))
        sys.exit()
    for word in sys.argv[1:]:
        if word == "generation":
            found = {case.name: generation_of(case) for case in GENERATIONS}
            print(json.dumps([word, found]), flush=True)
        elif word == "planted":
            print(json.dumps([word, said_of_mistakes()]), flush=True)
        else:
            case = [*CASES, *SINGLE][int(word)]
            print(json.dumps([int(word), result_of(case.argv, case.rank, whole=word.startswith("+"))]), flush=True)
