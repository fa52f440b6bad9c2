"""torchrun in processes that have torch loaded already: its own flags, variables, agent and restarts; ranks are forked.

Torch's command starts an interpreter for each rank, which imports torch again: seconds that show nothing of a run.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from megatronish.commands import pretrain


def torchrun(argv: Sequence[str]) -> int:
    """Main function of a job: `torchrun FLAGS pretrain_gpt.py ARGV`, for the words FLAGS -- ARGV."""
    middle = list(argv).index("--")
    config, _, words = config_from_args(parse_args([*argv[:middle], "pretrain_gpt.py", *argv[middle + 1 :]]))
    config.start_method = "fork"
    MultiprocessContext.close = _close  # type: ignore[method-assign]
    elastic_launch(config, _be_rank)(words[2:])
    return 0


_whole_close = MultiprocessContext.close


def _close(context: MultiprocessContext, *args: Any, **options: Any) -> None:
    """End the ranks. One that has returned waits until it is let go, which torch forgets after a signal."""
    context._worker_finished_event.set()
    _whole_close(context, *args, **options)


def _be_rank(argv: list[str]) -> None:
    if status := pretrain.main(argv):
        raise SystemExit(status)


def as_pod(folder: Path, environ: dict[str, str]) -> None:
    """Planted in a job: it has a folder of its own, and variables."""
    os.chdir(folder)
    os.environ.update(environ)
