"""Collector of a text corpus that every machine has: source and documentation of Python's standard library.

Writes JSON lines {"text": ..., "source": relative name}, in an order that the names alone decide (that of their
hashes), so that any run of lines is a fair mixture: a validation split at the end is no topic of its own.
"""

import hashlib
import json
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from tqdm import tqdm

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import read_arguments
from megatronish.core.errors import UserError
from megatronish.core.files import AtomicFile

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
"""Others' code; tests, whose literals are no prose; tables of character sets."""
SKIPPED_FILES = ("_sysconfigdata", "topics.py")
"""How this Python was built; the documentation, which is taken as text instead."""


@dataclass(frozen=True)
class CorpusArguments:
    """Collect the source and documentation text of this Python's standard library as JSON lines."""

    output: Path
    """JSON lines file to write."""
    max_bytes: int = 6_000_000
    """Stop before the text is longer."""


def sources(root: Path) -> list[tuple[str, Path | None]]:
    """Names of all texts, and their files; a documentation topic has none."""
    files = [(path.relative_to(root).as_posix(), path) for path in _python_files(root)]
    all_sources: list[tuple[str, Path | None]] = [*files, *((f"topics/{topic}.txt", None) for topic in topics)]
    return sorted(all_sources, key=lambda source: hashlib.sha256(source[0].encode()).digest())


def _python_files(root: Path) -> Iterator[Path]:
    """The files of Python below a folder. Skipped folders are not entered: one of them may hold all of torch."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        yield from (
            Path(folder) / name for name in names if name.endswith(".py") and not name.startswith(SKIPPED_FILES)
        )


def read(name: str, path: Path | None) -> str:
    """The text of a source; none where it cannot be decoded."""
    if path is None:
        return topics[name.removeprefix("topics/").removesuffix(".txt")]
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):  # a file of another encoding, made to test the parser
        return ""


def main(argv: Sequence[str], *, program: str = "megatronish collect-corpus") -> int:
    """Run the command; the exit status."""
    return exit_status(lambda: collect(read_arguments(CorpusArguments, argv, program=program)), prefix="error: ")


def collect(arguments: CorpusArguments) -> int:
    """Write the corpus; the exit status."""
    all_sources = sources(Path(sysconfig.get_path("stdlib")))
    texts, num_bytes = 0, 0
    bar = tqdm(total=arguments.max_bytes, unit="B", unit_scale=True, desc="collecting", disable=None)
    with bar, AtomicFile(arguments.output) as output:
        for name, path in all_sources:
            text = read(name, path)
            size = len(text.encode())
            if not text.strip() or num_bytes + size > arguments.max_bytes:
                continue
            output.file.write(json.dumps({"text": text, "source": name}).encode() + b"\n")
            texts, num_bytes = texts + 1, num_bytes + size
            bar.update(size)
        if not texts:
            raise UserError(f"no text fits --max-bytes {arguments.max_bytes}; for example 6000000")
    print(f"{arguments.output}: {texts:,} texts | {num_bytes:,} bytes of Python {sys.version.split()[0]}'s library")
    return 0
