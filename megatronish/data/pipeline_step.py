"""A step that pipelines of datatrove call: it tokenizes the documents of a rank into a pair of .bin/.idx.

It is called as every step of a pipeline is, and needs nothing of datatrove itself. A rank that is run again replaces
its pair by the same bytes. Documents come in the order and the parts that the reader of the pipeline gives them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatronish.core.errors import UserError
from megatronish.data.encoding import Encoder
from megatronish.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from megatronish.data.shards import DataShard, write_manifest

DOCUMENTS_AT_ONCE = 256


class TextDocument(Protocol):
    """What a pipeline gives: an object with a text."""

    text: str


@dataclass(frozen=True)
class TokenizingStep:
    """The last step of a pipeline: writes `<output_prefix>.ranks/00003.bin/.idx` for rank 3."""

    output_prefix: str
    tokenizer: Callable[[], Encoder]
    append_eod: bool = True

    def __call__(self, data: Iterable[TextDocument] | None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Tokenize the documents of a rank; an iterator over nothing, as it is the last step."""
        tokenizer = self.tokenizer()
        pair = _pair(self.output_prefix, rank)
        pair.parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(pair, dtype=token_dtype(tokenizer.vocab_size)) as writer:
            left = iter(data or ())
            while documents := list(islice(left, DOCUMENTS_AT_ONCE)):
                for ids in tokenizer.encode_all([document.text for document in documents]):
                    # As in preprocessing, an empty text is an empty document.
                    ended = [*ids, tokenizer.eod] if ids and self.append_eod else ids
                    writer.add_document(np.array(ended, np.int32), [len(ended)] if ended else [])
        return iter(())


def write_manifest_of_ranks(output_prefix: str, world_size: int) -> Path:
    """Write the manifest of the pairs of all ranks, which --data-path takes; its path. UserError if one is missing."""
    shards = []
    for rank in range(world_size):
        pair = _pair(output_prefix, rank)
        if not pair.with_suffix(".idx").exists():
            raise UserError(f"{pair}.idx is missing: rank {rank} of {world_size} is not done; run the pipeline again")
        opened = IndexedTokens(pair)
        shards.append(DataShard(str(pair), opened.dtype, len(opened), opened.num_documents, opened.num_tokens))
    return write_manifest(shards, output_prefix)


def _pair(output_prefix: str, rank: int) -> Path:
    return Path(f"{output_prefix}.ranks") / f"{rank:05d}"
