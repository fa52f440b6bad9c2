"""Merging of .bin/.idx pairs: the documents of all pairs in one, in the order of the pairs.

The result is what preprocessing the joined texts in one call would write, byte for byte. Tokens and indices are copied
from file to file in small pieces, in memory that does not grow with them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import read_arguments
from megatronish.config.sections.data import MANIFEST
from megatronish.core.errors import UserError, without_passwords
from megatronish.core.files import refuse_url
from megatronish.core.remote import is_url
from megatronish.data.indexed import HEADER, IndexedTokens, idx_path
from megatronish.data.preprocess import refuse_no_name
from megatronish.data.shards import DataShard, join_with_bar


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


def merge(arguments: MergeArguments) -> int:
    """Write the pair, and report what was done; the exit status."""
    output = arguments.output_prefix
    refuse_url("--output-prefix", Path(output))
    refuse_no_name(output)
    prefixes = [prefix for given in arguments.input for prefix in prefixes_of(given, output=output)]
    if not prefixes:
        raise UserError("--input is empty; name a folder of pairs, or their prefixes")
    # Every pair is checked before anything is written; the check reads the .idx alone.
    shards = [checked(prefix) for prefix in prefixes]
    if absolute(output) in map(absolute, prefixes):
        raise UserError(f"--output-prefix {output} is one of the pairs to merge; choose another")
    dtype, tokens = shards[0].dtype, sum(shard.tokens for shard in shards)
    for shard in shards:
        if shard.dtype != dtype:
            raise UserError(
                f"{shard.prefix} holds {shard.dtype} tokens and {prefixes[0]} holds {dtype}: they come from different "
                "vocabularies; preprocess all of them with the same tokenizer"
            )
    join_with_bar(shards, output)
    documents = sum(shard.documents for shard in shards)
    print(f"{output}: {len(prefixes):,} pairs | {documents:,} documents | {tokens:,} tokens")
    return 0


def checked(prefix: str) -> DataShard:
    """Facts of the pair `prefix`; UserError if it is not whole, or has what cannot be merged.

    No file stays open: there may be more pairs than a process may have open files.
    """
    pair = IndexedTokens(prefix)
    without_modalities = HEADER.size + 12 * len(pair) + 8 * (pair.num_documents + 1)
    if idx_path(prefix).stat().st_size != without_modalities:
        raise UserError(f"{prefix} has a modality for each sequence, as multimodal data has: it cannot be merged here")
    return DataShard(prefix, pair.dtype, len(pair), pair.num_documents, pair.num_tokens)


def prefixes_of(given: str, *, output: str) -> list[str]:
    """Prefixes of the pairs that `given`, a folder or a prefix, names. UserError if a pair lacks one of its files.

    In a folder, a pair `output` is left out: it is what an earlier call wrote.
    """
    if is_url(given):
        raise UserError(
            f"--input {without_passwords(given)} is on object storage, and pairs are merged on a disk; copy its files "
            "to one, or name several pairs with --data-path"
        )
    folder = Path(given)
    if not folder.is_dir():
        return [given]
    stems = {str(path.with_suffix("")) for path in folder.iterdir() if path.suffix in (".bin", ".idx")}
    if manifests := sorted(stem for stem in stems if f"{stem}.json".endswith(MANIFEST)):
        raise UserError(
            f"--input {given} holds {manifests[0]}.json, which joins shards and is no pair; move it to another folder, "
            "or name the prefixes of the pairs"
        )
    prefixes = sorted(stem for stem in stems if absolute(stem) != absolute(output))
    if not prefixes:
        raise UserError(f"--input {given} holds no .bin/.idx pair; name a folder of pairs, or their prefixes")
    return prefixes


def absolute(prefix: str) -> Path:
    """The path of a prefix, links followed, for comparison with others."""
    return Path(os.path.realpath(idx_path(prefix)))
