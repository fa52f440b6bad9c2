"""Merging of .bin/.idx pairs: the documents of all pairs in one, in the order of the pairs.

The result is what preprocessing the joined texts in one call would write, byte for byte. Tokens are copied from file to
file in small pieces; of each document 12 bytes are in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

from megatronish.commands.ending import exit_status
from megatronish.data.indexed import HEADER, IndexedTokens, IndexedWriter, bin_path, idx_path
from megatronish.errors import UserError


@dataclass(frozen=True)
class MergeArguments:
    """Join .bin/.idx pairs into one pair, in the order of their names, or in the order given."""

    input: tuple[str, ...]
    """A folder, of which all pairs are taken in the order of their names; or the prefixes of pairs, in this order."""
    output_prefix: str
    """PREFIX of the pair that is written: PREFIX.bin and PREFIX.idx."""


def main(argv: Sequence[str], *, program: str = "megatronish merge") -> int:
    """Run the command; the exit status."""
    arguments = tyro.cli(MergeArguments, args=argv, prog=program)
    return exit_status(lambda: merge(arguments), prefix="error: ")


def merge(arguments: MergeArguments) -> int:
    """Write the pair, and report what was done; the exit status."""
    prefixes = [prefix for given in arguments.input for prefix in prefixes_of(given, output=arguments.output_prefix)]
    # Every pair is checked before anything is written; the check reads the .idx alone.
    pairs = {prefix: IndexedTokens(prefix) for prefix in prefixes}
    if absolute(arguments.output_prefix) in map(absolute, prefixes):
        raise UserError(f"--output-prefix {arguments.output_prefix} is one of the pairs to merge; choose another")
    first = prefixes[0]
    for prefix, pair in pairs.items():
        if pair.dtype != pairs[first].dtype:
            raise UserError(
                f"{prefix} holds {pair.dtype} tokens and {first} holds {pairs[first].dtype}: they come from different "
                "vocabularies; preprocess all of them with the same tokenizer"
            )
        if has_modalities(pair):
            raise UserError(
                f"{prefix} has a modality for each sequence, as multimodal data has: it cannot be merged here"
            )
    documents, tokens = (
        sum(getattr(pairs[each], name) for each in prefixes) for name in ("num_documents", "num_tokens")
    )
    num_bytes = tokens * pairs[first].dtype.itemsize
    bar = tqdm(total=num_bytes, unit="B", unit_scale=True, desc="merging", disable=None)
    with bar, open_writer(arguments.output_prefix, pairs[first]) as writer:
        for prefix in prefixes:
            writer.add_prefix(prefix)
            bar.update(bin_path(prefix).stat().st_size)
    print(f"{arguments.output_prefix}: {len(prefixes)} pairs | {documents:,} documents | {tokens:,} tokens")
    return 0


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
    return idx_path(prefix).resolve()


def has_modalities(pair: IndexedTokens) -> bool:
    """Whether the .idx ends with the modality of each sequence, which the writer does not write."""
    whole = HEADER.size + 12 * len(pair) + 8 * (pair.num_documents + 1)
    return idx_path(pair.prefix).stat().st_size != whole


def open_writer(prefix: str, like: IndexedTokens) -> IndexedWriter:
    """A writer of a pair with the same dtype as `like`; UserError if its files cannot be created."""
    try:
        return IndexedWriter(prefix, dtype=like.dtype)
    except OSError as error:
        raise UserError(f"--output-prefix {prefix} cannot be written: {error.strerror}; choose another") from error
