"""The `megatronish` command: `megatronish COMMAND FLAGS` finds the command in the table and calls its module."""

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol, TextIO, cast

from megatronish import __version__
from megatronish.core.errors import RunError, StarredStream, UserError, without_passwords
from megatronish.launch.os_errors import mishap, status_of
from megatronish.launch.place import Place
from megatronish.launch.terminal import name_output, open_streams, widen

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
    "rich",
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
    """Exit status of `work`, also where it is interrupted or its output has no reader; stderr shows no password."""
    open_streams()
    name_output()
    widen()
    with redirect_stderr(cast(TextIO, StarredStream(sys.stderr))):
        return _ended(work)


def _ended(work: Callable[[], int]) -> int:
    try:
        try:
            status = work()
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return status
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (sentence := _without_environment(error)) is None:
            return _bug(error)
        print(sentence, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has left, as `head` does: nobody is there to be informed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if (sentence := mishap(error)) is None:
            return _bug(error)
        print(without_passwords(sentence), file=sys.stderr)
        return status_of(error)


def _bug(error: Exception) -> int:
    """Print a traceback here and not in the interpreter, which would write it past the stream that hides passwords."""
    traceback.print_exception(error)
    return 1


def _without_environment(error: ModuleNotFoundError) -> str | None:
    """Sentence for a Python in which libraries of megatronish are missing; None if the module is none of them."""
    missing = [name for name in NEEDED if name == (error.name or "").partition(".")[0] or find_spec(name) is None]
    if (error.name or "").partition(".")[0] not in NEEDED:
        return None
    are = "is" if len(missing) == 1 else "are"
    return (
        f"{', '.join(missing)} {are} not installed for {sys.executable}; make venv makes an environment with "
        "all that is needed, to be used as .venv/bin/python; or, in a checkout, pip install -e ."
    )


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


class Main(Protocol):
    """Function that every module of a command has."""

    def __call__(self, argv: list[str], *, program: str) -> int:
        """Run the command; the exit status. `program` is its name in --help."""


class RunsModel(Protocol):
    """Function of a module whose command runs a model."""

    def __call__(self, arguments: object, place: Place | None) -> int:
        """Run the command with its flags; the exit status. `place` is None on a plain start."""


class Command(NamedTuple):
    """A command: its group and its line in `megatronish --help`, and the module that has its function, `main`.

    A command that runs a model has `arguments`, a dataclass of inference_flags.py, and its function is `run(arguments,
    place)`. Its module imports torch, and is imported once the flags are read: --help and wrong flags wait for nothing.
    """

    group: str
    module: str
    help: str
    function: str = "main"
    arguments: str = ""

    def main(self) -> Main:
        """Its function. Only now is the module imported: the list of commands need not wait for it."""
        return self._read_and_run if self.arguments else cast(Main, self._function())

    def _function(self) -> object:
        return getattr(import_module(f"megatronish.commands.{self.module}"), self.function)

    def _read_and_run(self, argv: Sequence[str], *, program: str = "megatronish") -> int:
        # Late: the list of commands is printed also where tyro is not installed.
        from megatronish.commands import inference_flags
        from megatronish.commands.exit_status import exit_status_of_ranks
        from megatronish.config.arguments import read_arguments

        def work(place: Place | None) -> int:
            arguments = read_arguments(getattr(inference_flags, self.arguments), argv, program=program)
            return cast(RunsModel, self._function())(arguments, place)

        return exit_status_of_ranks(work)


COMMANDS = {
    "pretrain": Command("train", "pretrain", "train a GPT from a config and flags, on one rank or many"),
    "pretrain-t5": Command("train", "pretrain_t5", "train a T5: an encoder and a decoder, on hidden spans"),
    "pretrain-bert": Command("train", "pretrain_bert", "train a BERT: masked tokens, and the order of sentences"),
    "finetune": Command("train", "finetune", "train a model further, whole or with adapters"),
    "launch": Command("train", "launch", "run a command on the hosts of a hostfile, over ssh"),
    "verify": Command("train", "verify", "check that a layout trains the same model as one process"),
    "conform": Command("train", "conform", "compare another trainer's gradients with those of one process"),
    "plan": Command("train", "plan", "find the layouts for a model and a machine, with time and memory"),
    "draw": Command("train", "draw", "draw a pipeline schedule, planned or recorded"),
    "watch": Command("train", "report", "show a run while it trains, on the terminal and as a page", "main_watch"),
    "report": Command("train", "report", "write a page of runs: curves, layout, memory, time, events", "main_report"),
    "bench-collectives": Command("train", "bench_collectives", "measure the links of a layout, or compare its ranks"),
    "collect-corpus": Command("data", "collect_corpus", "collect a small text corpus that every machine has"),
    "train-tokenizer": Command("data", "train_tokenizer", "train a SentencePiece tokenizer on JSON lines"),
    "preprocess": Command("data", "preprocess_tasks", "tokenize JSON lines into .bin/.idx files"),
    "audit": Command("data", "audit", "print which tokens of chat data would be trained on"),
    "inspect": Command("data", "inspect_data", "show what .bin/.idx files hold, and check that they are whole"),
    "merge": Command("data", "merge", "join .bin/.idx files into one pair"),
    "generate": Command("models", "generate", "continue prompts with a trained model", "run", "GenerateArguments"),
    "chat": Command("models", "chat", "chat with a trained model on the terminal", "run", "ChatArguments"),
    "serve": Command("models", "serve", "serve a trained model with OpenAI's interface", "run", "ServeArguments"),
    "evaluate": Command(
        "models",
        "evaluate",
        "measure perplexity, or scores in tasks",
        "run",
        "EvaluateArguments",
    ),
    "judge": Command("models", "judge", "let a model judge the answers of others, as MT-bench does"),
    "convert": Command("models", "convert", "convert models between Hugging Face, Megatron-LM and megatronish"),
    "recipes": Command("configs", "recipes", "list and copy recipes: a named model, a task, a machine"),
    "from-axolotl": Command("configs", "import_config", "write Axolotl's config.yml as TOML", "main_axolotl"),
    "from-deepspeed": Command("configs", "import_config", "write DeepSpeed's ds_config.json as TOML", "main_deepspeed"),
    "from-accelerate": Command("configs", "import_config", "write Accelerate's YAML as TOML", "main_accelerate"),
}
"""A new command is a module in this folder and a line here."""
