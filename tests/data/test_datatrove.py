"""Tests of datatrove: the pairs of its writer are read as they are, and its pipelines call our step."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatronish.core.errors import UserError
from megatronish.data.indexed import IndexedTokens, IndexedWriter, bin_path, idx_path
from megatronish.data.pipeline_step import TokenizingStep, write_manifest_of_ranks
from megatronish.data.preprocess import preprocess
from megatronish.data.token_files import TokenFiles
from megatronish.tokenizer.plain import BytesTokenizer


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


@pytest.mark.skipif(find_spec("datatrove") is None, reason="needs datatrove: pip install datatrove")
def test_a_pipeline_calls_our_step_and_its_ranks_are_one_data_set(tmp_path: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader

    (tmp_path / "in").mkdir()
    for number in range(4):
        lines = "".join(
            json.dumps({"text": f"{number} {line} " * line, "id": str(line)}) + "\n" for line in range(1, 50)
        )
        (tmp_path / "in" / f"{number}.jsonl").write_text(lines)
    step = TokenizingStep(f"{tmp_path}/out", BytesTokenizer)
    pipeline = [JsonlReader(str(tmp_path / "in")), step]
    for name in ("a", "b"):  # the second run finds the pairs of the first
        LocalPipelineExecutor(pipeline, tasks=4, logging_dir=str(tmp_path / name)).run()
    joined = TokenFiles().open(str(write_manifest_of_ranks(f"{tmp_path}/out", 4)))
    preprocess([tmp_path / "in"], f"{tmp_path}/one", tokenizer=BytesTokenizer, append_eod=True)
    assert joined.identity == IndexedTokens(tmp_path / "one_text_document").identity


def test_a_step_writes_what_preprocessing_writes(tmp_path: Path) -> None:
    texts = ["abc", "", "é" * 700]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    preprocess([tmp_path / "a.jsonl"], f"{tmp_path}/one", tokenizer=BytesTokenizer, append_eod=True)
    step = TokenizingStep(f"{tmp_path}/out", BytesTokenizer)
    assert list(step((SimpleNamespace(text=text) for text in texts), 0, 2)) == []
    for path in (bin_path, idx_path):
        assert path(f"{tmp_path}/out.ranks/00000").read_bytes() == path(f"{tmp_path}/one_text_document").read_bytes()
    with pytest.raises(UserError, match=r"out.ranks/00001.idx is missing: rank 1 of 2 is not done; run the pipeline"):
        write_manifest_of_ranks(f"{tmp_path}/out", 2)
