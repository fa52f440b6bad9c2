"""First lines of recipes, with layout and memory as computed: `python tests/support/recipe_heads.py` rewrites them."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from megatronish.commands.recipes import FIRST  # noqa: E402
from megatronish.config.config import Config  # noqa: E402
from megatronish.config.read import read_config  # noqa: E402
from megatronish.config.shipped import shipped_recipes  # noqa: E402
from megatronish.estimate.costs.memory import expected_memory  # noqa: E402
from megatronish.estimate.costs.memory_table import Memory  # noqa: E402
from megatronish.formats.hf.config import read_hf_config  # noqa: E402
from megatronish.formats.start import read_start  # noqa: E402
from megatronish.parallel.stages import Stages  # noqa: E402

GIB = 2**30
WIDTH = 120
PAIRS = ROOT / "tests" / "golden" / "pairs_of_a_recipe.jsonl"
"""One comparison of two answers: a run on preferences takes no made-up data."""


class Machine(NamedTuple):
    """GPUs of a recipe and the size of each, as the name of its file has them: lora-1x24gb."""

    gpus: int
    gib: int

    @classmethod
    def of(cls, path: Path) -> "Machine":
        gpus, gib = path.stem.partition("-")[2].removesuffix("gb").split("x")
        return cls(int(gpus), int(gib))


def vocab_size(path: Path) -> int:
    """The vocabulary of a recipe's model."""
    return read_hf_config(path.parent).vocab_size


def flags_of(path: Path) -> list[str]:
    """Flags that read a recipe without a network: its model is the description in its folder, its data are made up."""
    flags = ["--config", str(path), "--vocab-size", str(vocab_size(path))]
    if path.stem.startswith("pretrain"):
        return [*flags, "--mock-data"]
    flags = ["--finetune", *flags, "--load-hf", str(path.parent)]
    if not path.stem.startswith("dpo"):
        return [*flags, "--mock-data"]
    return [*flags, "--data-path", str(PAIRS), "--tokenizer-type", "bytes", "--chat-template", "plain"]


def config_of(path: Path) -> Config:
    """The checked config of a recipe on its machine."""
    return read_config(flags_of(path), world_size=Machine.of(path).gpus, read_start=read_start).config


def memory_of(path: Path, config: Config) -> Memory:
    """Expected memory of the fullest stage."""
    training, vocabulary = config.training, vocab_size(path)
    stages = Stages.of(config.parallel, config.model, vocab_size=vocabulary, seq_length=training.seq_length)
    loads = stages.loads(config.global_batch_size // (training.micro_batch_size * config.layout.dp))
    return max(expected_memory(config, loads, vocab_size=vocabulary, device="cuda"), key=lambda memory: memory.total)


def command_of(path: Path) -> str:
    """The command that starts a recipe on its machine."""
    verb = "pretrain" if path.stem.startswith("pretrain") else "finetune"
    call = f"{verb} --config {path.parent.name}/{path.stem}"
    machines = Machine.of(path).gpus // 8
    if machines <= 1:
        return f"megatronish {call}"
    return f"srun --nodes {machines} --ntasks {8 * machines} --ntasks-per-node 8 megatronish {call}"


def head_of(path: Path) -> str:
    """The comment with which a recipe begins; what its first line says is as it is there."""
    first = FIRST.match(path.read_text(encoding="utf-8"))
    assert first is not None, path
    config = config_of(path)
    memory = memory_of(path, config)
    owners = ("parameters", "gradients", "optimizer", "activations", "logits", "temporary")
    parts = ", ".join(f"{owner} {getattr(memory, owner) / GIB:.1f}" for owner in owners)
    experts = f" x ep {config.parallel.expert_layout.ep}" if config.parallel.expert_layout.ep > 1 else ""
    held = f"{memory.total / GIB:.1f} of {Machine.of(path).gib} GiB on the fullest GPU, computed"
    return f"{first[0]}# {config.layout}{experts}, {held}:\n# {parts}\n# {command_of(path)}\n"


def body_of(path: Path) -> str:
    """What follows the comment."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "".join(lines[first:])


if __name__ == "__main__":
    os.chdir(ROOT)
    for recipe in shipped_recipes().values():
        recipe.write_text(head_of(recipe) + body_of(recipe), encoding="utf-8")
