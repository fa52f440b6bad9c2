"""Test of the pairs of datatrove's writer: they are read as they are."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from megatronish.data.indexed import IndexedTokens, IndexedWriter, bin_path, idx_path


@pytest.mark.skipif(find_spec("datatrove") is None, reason="needs datatrove: pip install datatrove")
@pytest.mark.parametrize(("token_size", "dtype"), [(2, "<u2"), (4, "<i4")])
def test_what_the_writer_of_datatrove_writes_is_what_ours_writes(tmp_path: Path, token_size: int, dtype: str) -> None:
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    documents = [[5, 6, 7], [], [300], list(range(1000))]
    theirs = MegatronTokenizedFile(str(tmp_path), "00000_tokens", token_size=token_size)
    for document in documents:
        theirs.write(document)
    theirs.close()
    pair = IndexedTokens(tmp_path / "00000_tokens")
    assert [pair.document(number).tolist() for number in range(len(documents))] == documents
    with IndexedWriter(tmp_path / "ours", dtype=np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(np.array(document), [len(document)])
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ours").read_bytes() == path(tmp_path / "00000_tokens").read_bytes()
