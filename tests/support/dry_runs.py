"""Dry runs of several cases in this process, which is started for it: their records as JSON, a line for each.

MEGATRONISH_KERNELS=assumed python tests/support/dry_runs.py 0 3 5     (numbers of cases, those of SINGLE last)
"""

import json
import sys
import traceback
from typing import Any

from megatronish.dry_run.fake_cuda import load_fake_cuda

library = load_fake_cuda()  # before torch is imported

from dry_cases import CASES, SINGLE, Case, SingleCase  # noqa: E402

from megatronish.commands.configuration import read_config  # noqa: E402
from megatronish.dry_run.rank import PlannedRun, run_rank  # noqa: E402
from megatronish.dry_run.report import json_of, with_expected  # noqa: E402


def result_of(case: Case | SingleCase) -> dict[str, Any]:
    """What the report has of the case's rank, or how it failed."""
    config = read_config(case.argv).config
    assert config.data.vocab_size is not None
    planned = PlannedRun(config, config.data.vocab_size, "cuda")
    try:
        return json_of(planned, [with_expected(planned, run_rank(planned, case.rank))], notes=[])["ranks"][0]
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    library.install_fake_cuda()
    for number in sys.argv[1:]:
        print(json.dumps([int(number), result_of([*CASES, *SINGLE][int(number)])]), flush=True)
