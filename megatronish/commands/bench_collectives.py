"""Measurement of collectives over every axis of a layout, and comparison of the ranks before a run.

    megatronish bench-collectives --tp 2 --dp 2 --json links.jsonl --png links.png
    torchrun --nproc-per-node 8 -m megatronish bench-collectives --tp 8 --collectives all_reduce all_gather
    megatronish bench-collectives --dp 4 --preflight

Prints a row for each collective and size: seconds of the slowest rank, and bandwidths as nccl-tests defines them; then
a fit of latency and bandwidth to the rows. docs/COLLECTIVES.md says what each column means.
"""

from collections.abc import Sequence
from functools import partial

from megatronish.commands.exit_status import exit_status_of_ranks, is_main
from megatronish.config.arguments import read_arguments
from megatronish.core.files import refuse_unwritable_file
from megatronish.estimate.links.settings import LinkArguments
from megatronish.launch.imports import importing
from megatronish.launch.place import Place


def main(argv: Sequence[str], *, program: str = "megatronish bench-collectives") -> int:
    """Measure on all ranks; the exit status: 1 for a wrong result or a problem of --preflight, 2 for a user error."""
    return exit_status_of_ranks(partial(_run, argv, program))


def _run(argv: Sequence[str], program: str, place: Place | None) -> int:
    arguments = read_arguments(LinkArguments, argv, program=program, description=__doc__)
    layout = arguments.layout(place.world_size if place else None)
    arguments.refuse(layout)
    if is_main(place):
        for flag, path in (("--json", arguments.json), ("--png", arguments.png)):
            if path is not None:
                refuse_unwritable_file(path, flag=flag)
    with importing():  # torch is imported only now: --help and errors need not wait for it
        from megatronish.estimate.links.bench import bench
        from megatronish.launch.local import launch

    return launch(partial(bench, arguments, layout), world_size=layout.world_size)
