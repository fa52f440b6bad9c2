"""Command lines of tests: a sound model but for its data, and what is said of a command line."""

from collections.abc import Sequence
from pathlib import Path

from paths import ROOT

from megatronish.config.config import Config
from megatronish.config.read import ConfigError, read_config

DEMO = str(ROOT / "configs" / "demo.toml")
MODEL = {
    "--num-layers": "12",
    "--hidden-size": "96",
    "--num-attention-heads": "12",
    "--seq-length": "64",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "1e-3",
}


def small(*words: str) -> list[str]:
    """A command line of a sound model but for its data, in which `words` stand instead of what they override."""
    kept = [word for flag, value in MODEL.items() if flag not in words for word in (flag, value)]
    return [*kept, *words]


def problems(argv: Sequence[str], world_size: int | None = None) -> list[str]:
    """What is said of a command line, a sentence each; none if it is accepted."""
    try:
        read_config(argv, world_size=world_size)
    except ConfigError as error:
        return error.problems
    return []


def read(*words: str, world_size: int | None = None) -> Config:
    return read_config(small("--mock-data", *words), world_size=world_size).config


def toml(folder: Path, text: str) -> list[str]:
    path = folder / "mine.toml"
    path.write_text(text)
    return ["--config", str(path)]
