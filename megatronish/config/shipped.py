"""Configs and recipes that come with megatronish: `--config demo` works in any folder, so does MODEL/RECIPE.

The files are those of configs/ and recipes/ in a checkout; setup.py puts copies into the installed package. Of the
demo's data it is known here how to make them.
"""

import shlex
from contextlib import suppress
from pathlib import Path

from megatronish.config.settings import CommandLine, read_file

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "configs", PACKAGE.parent / "configs")
"""Where an installed package has its configs, and where a checkout has them."""
RECIPES = (PACKAGE / "recipes", PACKAGE.parent / "recipes")
"""The same of recipes."""

_CORPUS = "megatronish collect-corpus --output"
_TOKENIZER = "megatronish train-tokenizer --input demo/python.jsonl --output demo/tokenizer.model"
_PREPROCESS = "megatronish preprocess --append-eod --input"
_DEMO = (
    f"{_CORPUS} demo/python.jsonl && {_TOKENIZER} && {_PREPROCESS} demo/python.jsonl --output-prefix demo/python "
    "--tokenizer-type sentencepiece --tokenizer-model demo/tokenizer.model"
)
_QUICK = (
    f"{_CORPUS} demo/quick.jsonl --max-bytes 3000000 && {_PREPROCESS} demo/quick.jsonl --output-prefix demo/quick "
    "--tokenizer-type bytes"
)
HOW_TO_MAKE = {
    "demo/python_text_document": _DEMO,
    "demo/tokenizer.model": f"{_CORPUS} demo/python.jsonl && {_TOKENIZER}",
    "demo/quick_text_document": _QUICK,
}
"""The commands that make a file which a shipped config names."""


_IMPORTERS = {
    "from-axolotl": ("base_model:", "micro_batch_size:", "datasets:"),
    "from-accelerate": ("compute_environment:", "distributed_type:", "num_processes:", "mixed_precision:"),
    "from-deepspeed": ('"train_batch_size"', '"train_micro_batch_size_per_gpu"', '"zero_optimization"'),
}
"""Commands that make TOML of another framework's config, and words that are in it."""


def of_other_framework(path: Path) -> str | None:
    """Complaint about a config in YAML or JSON, with the command that makes TOML of it; None for any other file."""
    kind = {".yml": "YAML", ".yaml": "YAML", ".json": "JSON"}.get(path.suffix.lower())
    if kind is None:
        return None
    with path.open("rb") as file:
        text = file.read(2**16).decode(errors="replace")
    counts = {name: sum(word in text for word in words) for name, words in _IMPORTERS.items()}
    likely = max(counts, key=lambda name: counts[name])
    others = [name for name in _IMPORTERS if name != likely]
    named = f"megatronish {likely} {shlex.quote(str(path))} --output {shlex.quote(f'{path.stem}.toml')}"
    if counts[likely]:
        return f"--config {path} is {kind}, and a config is TOML; write it as TOML with: {named}"
    return f"--config {path} is {kind}, and a config is TOML; write it as TOML with: {named} (or {', '.join(others)})"


def shipped_configs() -> dict[str, Path]:
    """{name: path} of the configs that come with megatronish."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


def shipped_recipes() -> dict[str, Path]:
    """{MODEL/RECIPE: path} of the recipes for named models that come with megatronish."""
    folder = next((folder for folder in RECIPES if folder.is_dir()), None)
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(folder.glob("*/*.toml"))} if folder else {}


def config_path(given: str) -> Path:
    """The file that `--config` names: that path, or what is shipped under this name where no such file exists."""
    path = Path(given)
    return path if path.is_file() else (shipped_configs() | shipped_recipes()).get(given.removesuffix(".toml"), path)


def fields_given(line: CommandLine) -> set[str]:
    """Fields that the flags of a command line set, or its config file; what cannot be read is for its reader to say."""
    settings = [*line.flags.settings, *line.flags.yielding]
    if line.config_file is not None:
        with suppress(OSError, ValueError):
            settings += read_file(config_path(line.config_file)).settings
    return {setting.field for setting in settings}
