"""Tests of `megatronish inspect`: numbers, near-duplicates, a sample as the model sees it, and damaged pairs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import save_tokenizer

from megatronish.commands.inspect_data import COLOURS, FAINT, InspectArguments, Inspection, main
from megatronish.config.sections.data import DataConfig
from megatronish.data.indexed import IndexedTokens, IndexedWriter
from megatronish.data.inspection import count_tokens, near_duplicates
from megatronish.data.loader import Collator
from megatronish.data.packed import PackedSamples
from megatronish.data.sample import DatasetSettings, DatasetSource
from megatronish.data.shards import DataShard, write_manifest
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.plain import BytesTokenizer

EOD = 256
TEXTS = ("def f(x):\n    return x\n", "a line of text that is longer than others, so it is cut\n", "x = \x1b[31m1\n")


def pair(prefix: Path, texts: tuple[str, ...] = TEXTS, *, dtype: str = "<u2", end: bool = True) -> str:
    """A pair of these texts in bytes."""
    with IndexedWriter(prefix, dtype=np.dtype(dtype)) as writer:
        for text in texts:
            writer.add_document([*text.encode(), *([EOD] if end else [])])
    return str(prefix)


def read(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command prints; its status is 0."""
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_a_report_of_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = pair(tmp_path / "a")
    words = ("--tokenizer-type", "bytes", "--seq-length", "40", "--document", "2")
    output = read(capsys, prefix, *words, "--histogram", str(tmp_path / "a.png"))
    total = sum(map(len, TEXTS)) + 3
    assert f"a: 3 documents, {total} tokens (uint16)" in output
    assert "special tokens        <|endoftext|> 3" in output
    assert "without an end token  0 documents" in output
    assert "--- document 2, 12 tokens:\nx = \\x1b[31m1\n<|endoftext|>" in output, "no text moves the cursor"
    assert "--- sample 0: 41 places, " in output
    assert "near-duplicates: 0 of 3 documents that were compared (0.0%)" in output
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    facts: dict[str, Any] = json.loads(read(capsys, prefix, *words, "--json", "--near-duplicates", "0"))
    assert (facts["documents"], facts["tokens"], facts["largest_id"]) == (3, total, EOD)
    assert facts["lengths"]["longest"] == max(map(len, TEXTS)) + 1
    assert (facts["compared_documents"], len(facts["sample"]["tokens"])) == (0, 41)


def test_a_tokenizer_next_to_the_prefix_is_taken_and_without_one_ids_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = pair(tmp_path / "a")
    output = read(capsys, prefix)
    assert "--- document 0, 24 tokens:\n100 101 102 32" in output
    assert "--- sample 0 is not shown: name a tokenizer" in output
    save_tokenizer(tmp_path / "made", ("<|im_start|>",))
    (tmp_path / "made" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="huggingface", tokenizer_model=f"{tmp_path}/tokenizer.json"))
    with IndexedWriter(tmp_path / "b", dtype=np.dtype("<u2")) as writer:
        writer.add_document([*tokenizer.encode("hello"), tokenizer.special_tokens()["<|im_start|>"], tokenizer.eod])
    output = read(capsys, f"{tmp_path}/b", "--seq-length", "4")
    assert "\nhello<|im_start|>" in output
    assert "<|im_start|> 1" in output


def test_a_sample_has_its_documents_in_colours_and_what_does_not_count_faint(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "a", ("ab", "cde"))
    arguments = InspectArguments(prefix, packing="best-fit", seq_length=9, near_duplicates=0)
    inspection = Inspection.of(arguments, prefix, (0.0, 1.0), BytesTokenizer())
    sample = PackedSamples(
        IndexedTokens(prefix), DatasetSource("training", prefix), DatasetSettings(9, 1234, 257, EOD, packing="best-fit")
    ).sample(0)
    mask = Collator(EOD)([sample], [0]).loss_mask[0]
    assert inspection.facts["sample"]["trained"] == int(mask.sum()) == 5
    assert inspection.facts["sample"]["num_filler"] == 3
    plain = inspection.text(colour=False)
    for line in (
        "5 tokens count in the loss, those in \u27e6\u27e7 do not; 3 filler",
        "from position 0] \u27e6a\u27e7b<|endoftext|>",
        "from position 0] \u27e6c\u27e7de<|endoftext|>",
    ):
        assert line in plain
    coloured = inspection.text(colour=True)
    assert sum(colour in coloured for colour in COLOURS) == 2
    assert f"{FAINT}c" in coloured


def test_near_duplicates_are_told_with_their_similarity(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 5000, 400) for _ in range(40)]
    documents[7] = documents[3].copy()
    documents[11] = documents[5].copy()
    documents[11][200] = 4999  # of 396 runs, five are others
    documents[20] = np.concatenate([documents[9][:200], documents[20][200:]])  # a third of all runs is shared
    with IndexedWriter(tmp_path / "a", dtype=np.dtype("<u2")) as writer:
        for document in (*documents, [1, 2, 3]):
            writer.add_document(document)
    alike = near_duplicates(IndexedTokens(tmp_path / "a"), most=100)
    assert alike.compared == 40
    assert [pair[:2] for pair in alike.pairs] == [(3, 7), (5, 11)]
    assert alike.pairs[0].similarity == 1.0
    assert 0.9 < alike.pairs[1].similarity <= 1.0
    assert near_duplicates(IndexedTokens(tmp_path / "a"), most=10).compared == 10


def test_blocks_change_no_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = IndexedTokens(pair(tmp_path / "a", (*TEXTS, "", "end"), end=True))
    expected = count_tokens(file, {"eod": EOD, "x": ord("x")}, eod=EOD)
    assert expected.special == {"eod": 5, "x": sum(text.count("x") for text in TEXTS)}
    assert (expected.smallest, expected.largest, expected.without_end) == (10, EOD, 0)
    for size in (1, 7, 24):
        monkeypatch.setattr("megatronish.data.inspection.BLOCK", size)
        assert count_tokens(file, {"eod": EOD, "x": ord("x")}, eod=EOD) == expected


def test_a_whole_pair_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = pair(tmp_path / "a", end=False)
    output = read(capsys, prefix, "--check", "--tokenizer-type", "bytes")
    assert "right  ids: ids are 10 to 120, below the vocabulary of 257" in output
    assert "right  ends: 3 documents do not end with token 256" in output
    seen = json.loads(read(capsys, prefix, "--check", "--json", "--vocab-size", "121"))
    assert seen["is_whole"]
    assert [check["name"] for check in seen["checks"]] == ["files", "ids", "sums"]


def test_each_damage_is_a_status_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = pair(tmp_path / "a", dtype="<i4")
    tokens, index = (Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx"))
    negative = np.frombuffer(tokens, "<i4").copy()
    negative[5] = -3
    for end, content, sentence in (
        ("bin", tokens[:-4], "a.bin has 400 bytes but its .idx says 404: it is truncated"),
        ("bin", negative.tobytes(), "ids are -3 to 256; name the tokenizer"),
        ("idx", index[:-8], "it is truncated or damaged"),
        ("idx", index[:34] + b"\x07" + index[35:], "pointers that do not follow from its lengths"),
        ("idx", index[:-8] + bytes(8), "document indices that do not rise"),
    ):
        size = len(tokens)
        Path(f"{prefix}.{end}").write_bytes(content)
        assert main([prefix, "--check"]) == 1
        output = capsys.readouterr().out
        assert "WRONG" in output
        assert sentence.replace("404", str(size)).replace("400", str(size - 4)) in output
        Path(f"{prefix}.bin").write_bytes(tokens)
        Path(f"{prefix}.idx").write_bytes(index)
    assert main([prefix, "--check", "--vocab-size", "200"]) == 1
    assert "WRONG  ids: " in (output := capsys.readouterr().out)
    assert "ids are 10 to 256, and the vocabulary has 200; name the tokenizer" in output


def test_a_manifest_has_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = pair(tmp_path / "a")
    content = Path(f"{prefix}.bin").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    index = hashlib.sha256(Path(f"{prefix}.idx").read_bytes()).hexdigest()
    file = IndexedTokens(prefix)
    shard = DataShard(prefix, file.dtype, len(file), file.num_documents, file.num_tokens, (digest, index))
    manifest = str(write_manifest([shard], f"{tmp_path}/all"))
    assert "2 of 2 files have the checksums of the manifest" in read(capsys, manifest, "--check")
    assert "all.shards.json: 3 documents" in read(capsys, manifest)
    Path(f"{prefix}.bin").write_bytes(b"\x01" + content[1:])
    assert main([manifest, "--check"]) == 1
    assert "a.bin is damaged: its bytes do not have the sum" in capsys.readouterr().out


def test_what_cannot_be_shown_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = pair(tmp_path / "a")
    for words, sentence in (
        ([f"{tmp_path}/b"], "data file"),
        ([prefix, "--document", "3"], "--document 3 must be below the 3 of"),
        ([prefix, "--histogram", f"{prefix}.bin"], "--histogram"),
        ([f"{prefix}[0.5:0.2]"], "must have a part between 0 and 1"),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err
    output = read(capsys, prefix, "--tokenizer-type", "bytes", "--seq-length", "4000")
    assert "--- sample 0 is not shown: the training data of" in output
    output = read(capsys, prefix, "--tokenizer-type", "bytes", "--seq-length", "40", "--fim-data")
    assert "--- sample 0 is not shown: --fim-data needs three special tokens" in output
