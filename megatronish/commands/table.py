"""Table of the commands: `megatronish NAME` calls the module next to the name."""

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from megatronish.launch.place import Place


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
    "finetune": Command("train", "finetune", "train a model further, whole or with adapters"),
    "verify": Command("train", "verify", "check that a layout trains the same model as one process"),
    "plan": Command("train", "plan", "find the layouts for a model and a machine, with time and memory"),
    "draw": Command("train", "draw", "draw a pipeline schedule, planned or recorded"),
    "bench-collectives": Command("train", "bench_collectives", "measure the links of a layout, or compare its ranks"),
    "collect-corpus": Command("data", "collect_corpus", "collect a small text corpus that every machine has"),
    "train-tokenizer": Command("data", "train_tokenizer", "train a SentencePiece tokenizer on JSON lines"),
    "preprocess": Command("data", "preprocess", "tokenize JSON lines into .bin/.idx files"),
    "audit": Command("data", "audit", "print which tokens of chat data would be trained on"),
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
    "convert": Command("models", "convert", "convert models between Hugging Face, Megatron-LM and megatronish"),
    "from-axolotl": Command("configs", "import_config", "write Axolotl's config.yml as TOML", "main_axolotl"),
    "from-deepspeed": Command("configs", "import_config", "write DeepSpeed's ds_config.json as TOML", "main_deepspeed"),
    "from-accelerate": Command("configs", "import_config", "write Accelerate's YAML as TOML", "main_accelerate"),
}
"""A new command is a module in this folder and a line here."""
