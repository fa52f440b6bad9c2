"""The `megatronish` command: `megatronish COMMAND FLAGS` finds the command in the table and calls it."""

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from megatronish import __version__
from megatronish.commands.table import COMMANDS
from megatronish.core.errors import UserError

PROGRAM = "megatronish"
NEEDED = (
    "torch",
    "numpy",
    "einops",
    "jinja2",
    "sentencepiece",
    "tokenizers",
    "tensorboard",
    "tqdm",
    "matplotlib",
    "tyro",
)
"""Modules of the libraries that setup.py requires."""


def main() -> int:
    """Run the command line of this process; the exit status."""
    return ended(lambda: run(sys.argv[1:]))


def run_script(command: str, *, program: str) -> int:
    """Run a command as a script of the checkout, `program` in its --help; the exit status."""
    return ended(lambda: COMMANDS[command].main()(sys.argv[1:], program=program))


def ended(work: Callable[[], int]) -> int:
    """Exit status of `work`, also where it is interrupted or its output has no reader."""
    try:
        try:
            status = work()
        except SystemExit:  # after --help
            _flush()
            raise
        _flush()
        return status
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (sentence := _without_environment(error)) is None:
            raise
        print(sentence, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has left, as `head` does: nobody is there to be informed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _without_environment(error: ModuleNotFoundError) -> str | None:
    """Sentence for a Python in which libraries of megatronish are missing; None if the module is none of them."""
    missing = [name for name in NEEDED if name == (error.name or "").partition(".")[0] or find_spec(name) is None]
    if (error.name or "").partition(".")[0] not in NEEDED:
        return None
    are = "is" if len(missing) == 1 else "are"
    return (
        f"{', '.join(missing)} {are} not installed for {sys.executable}; make venv makes an environment with "
        "all that is needed, to be used as .venv/bin/python; or pip install megatronish, in a checkout pip install -e ."
    )


def _flush() -> None:
    if sys.stdout is not None:  # it is closed
        sys.stdout.flush()


def run(argv: Sequence[str]) -> int:
    """Run one command line, without the program's name; the exit status. UserError for an unknown command."""
    name, *flags = argv or ["--help"]
    if name == "help" and flags:
        return run([flags[0], "--help"])
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"{PROGRAM} {__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(_unknown(name))
    return COMMANDS[name].main()(flags, program=f"{PROGRAM} {name}")


def overview() -> str:
    """The list of all commands, by group."""
    return "\n".join(_overview())


def _overview() -> Iterator[str]:
    yield f"{PROGRAM} {__version__}: trains GPTs on many devices, with data, tensor, pipeline and context parallelism"
    yield f"\nusage: {PROGRAM} COMMAND [FLAGS]"
    width = max(map(len, COMMANDS))
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        yield f"\n{group}:"
        for name, command in COMMANDS.items():
            if command.group == group:
                yield f"  {name:{width}}  {command.help}"
    yield f"\n{PROGRAM} COMMAND --help lists the flags of a command, {PROGRAM} --version prints the version"


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, COMMANDS, n=1)
    remedy = f"did you mean {PROGRAM} {nearest[0]}?" if nearest else f"{PROGRAM} --help lists the commands"
    if name.startswith("-"):
        remedy = f"the command comes first: {PROGRAM} pretrain {name} ..."
    return f"{name} is not a command; {remedy}"
