"""Command `megatronish evaluate`: perplexity of a trained model on a text, or its score in tasks."""

from collections.abc import Sequence
from functools import partial

from megatronish.commands.exit_status import exit_status_of_ranks
from megatronish.commands.inference_flags import EvaluateArguments
from megatronish.config.arguments import read_arguments
from megatronish.launch.place import Place


def main(argv: Sequence[str], *, program: str = "megatronish evaluate") -> int:
    """Run the command; the exit status."""
    return exit_status_of_ranks(partial(_run, argv, program))


def _run(argv: Sequence[str], program: str, place: Place | None) -> int:
    arguments = read_arguments(EvaluateArguments, argv, program=program)
    # late: they import torch, and --help need not wait for that
    if arguments.tasks is not None:
        from megatronish.commands.scoring import run as run_tasks

        return run_tasks(arguments, place)
    from megatronish.commands.evaluating import run

    return run(arguments, place)
