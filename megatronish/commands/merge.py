"""Merging of .bin/.idx pairs: the documents of all pairs in one, in the order of the pairs.

The result is what preprocessing the joined texts in one call would write, byte for byte. Tokens are copied from file to
file in small pieces; of each document 12 bytes are in memory.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import read_arguments
from megatronish.core.errors import UserError
from megatronish.core.files import unwritten
from megatronish.data.indexed import HEADER, IndexedTokens, IndexedWriter, idx_path


@dataclass(frozen=True)
class MergeArguments:
    """Join .bin/.idx pairs into one pair, in the order of their names, or in the order given."""

    input: tuple[str, ...]
    """A folder, of which all pairs are taken in the order of their names; or the prefixes of pairs, in this order."""
    output_prefix: str
    """PREFIX of the pair that is written: PREFIX.bin and PREFIX.idx."""


def main(argv: Sequence[str], *, program: str = "megatronish merge") -> int:
    """Run the command; the exit status."""
    return exit_status(lambda: merge(read_arguments(MergeArguments, argv, program=program)), prefix="error: ")


class Checked(NamedTuple):
    """Facts of a whole pair. No file stays open: there may be more pairs than a process may have open files."""

    dtype: np.dtype[Any]
    documents: int
    tokens: int


def merge(arguments: MergeArguments) -> int:
    """Write the pair, and report what was done; the exit status."""
    output = arguments.output_prefix
    prefixes = [prefix for given in arguments.input for prefix in prefixes_of(given, output=output)]
    if not prefixes:
        raise UserError("--input is empty; name a folder of pairs, or their prefixes")
    # Every pair is checked before anything is written; the check reads the .idx alone.
    pairs = [checked(prefix) for prefix in prefixes]
    if absolute(output) in map(absolute, prefixes):
        raise UserError(f"--output-prefix {output} is one of the pairs to merge; choose another")
    dtype, tokens = pairs[0].dtype, sum(pair.tokens for pair in pairs)
    for prefix, pair in zip(prefixes, pairs, strict=True):
        if pair.dtype != dtype:
            raise UserError(
                f"{prefix} holds {pair.dtype} tokens and {prefixes[0]} holds {dtype}: they come from different "
                "vocabularies; preprocess all of them with the same tokenizer"
            )
    bar = tqdm(total=tokens * dtype.itemsize, unit="B", unit_scale=True, desc="merging", disable=None)
    with bar, open_writer(output, dtype=dtype) as writer:
        for prefix, pair in zip(prefixes, pairs, strict=True):
            writer.add_prefix(prefix)
            bar.update(pair.tokens * dtype.itemsize)
    documents = sum(pair.documents for pair in pairs)
    print(f"{output}: {len(prefixes):,} pairs | {documents:,} documents | {tokens:,} tokens")
    return 0


def checked(prefix: str) -> Checked:
    """Facts of the pair `prefix`; UserError if it is not whole, or has what cannot be merged."""
    pair = IndexedTokens(prefix)
    without_modalities = HEADER.size + 12 * len(pair) + 8 * (pair.num_documents + 1)
    if idx_path(prefix).stat().st_size != without_modalities:
        raise UserError(f"{prefix} has a modality for each sequence, as multimodal data has: it cannot be merged here")
    return Checked(pair.dtype, pair.num_documents, pair.num_tokens)


def prefixes_of(given: str, *, output: str) -> list[str]:
    """Prefixes of the pairs that `given`, a folder or a prefix, names. UserError if a pair lacks one of its files.

    In a folder, a pair `output` is left out: it is what an earlier call wrote.
    """
    folder = Path(given)
    if not folder.is_dir():
        return [given]
    stems = {str(path.with_suffix("")) for path in folder.iterdir() if path.suffix in (".bin", ".idx")}
    found = sorted(stem for stem in stems if absolute(stem) != absolute(output))
    if not found:
        raise UserError(f"--input {given} holds no .bin/.idx pair; name a folder of pairs, or their prefixes")
    return found


def absolute(prefix: str) -> Path:
    """The path of a prefix, links followed, for comparison with others."""
    return Path(os.path.realpath(idx_path(prefix)))


def open_writer(prefix: str, *, dtype: np.dtype[Any]) -> IndexedWriter:
    """A writer of the merged pair; UserError if its files cannot be created."""
    try:
        return IndexedWriter(prefix, dtype=dtype)
    except OSError as error:
        raise unwritten(f"--output-prefix {prefix}", Path(prefix), error) from error
