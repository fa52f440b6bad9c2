"""Command `megatronish serve`: a server of a trained model with the interface of OpenAI."""

from collections.abc import Sequence
from functools import partial

from megatronish.commands.exit_status import exit_status_of_ranks
from megatronish.commands.inference_flags import ServeArguments
from megatronish.config.arguments import read_arguments
from megatronish.launch.place import Place


def main(argv: Sequence[str], *, program: str = "megatronish serve") -> int:
    """Run the command; the exit status."""
    return exit_status_of_ranks(partial(_run, argv, program))


def _run(argv: Sequence[str], program: str, _place: Place | None) -> int:
    arguments = read_arguments(ServeArguments, argv, program=program)
    from megatronish.commands.serving import run  # late: it imports torch, and --help need not wait for that

    return run(arguments)
