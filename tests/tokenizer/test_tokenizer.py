"""Tests of tokenizers: exact round trips, one interface, and an error for each wrong use."""

import pickle
import random
import tempfile
from pathlib import Path

import pytest
import tokenizers
from paths import ROOT
from scripts import run_script

from megatronish.commands import train_tokenizer
from megatronish.commands.collect_corpus import sources
from megatronish.config.sections.data import DataConfig
from megatronish.config.vocabulary_size import vocabulary_of_files
from megatronish.core.errors import UserError
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer
from megatronish.tokenizer.names import tokenizer_type
from megatronish.tokenizer.plain import BytesTokenizer, NullTokenizer
from megatronish.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "def f(x):\n\tif x:\n\t\treturn  1 \n\n\n",
    " leading", "trailing ", "  two  spaces  ", "\n", " ", "\t", "", "\r\n", "\0", "a\u2581b\u2581\u2581", "\u2581",
    "caf\u00e9 e\u0301 \u6f22\u5b57 \U0001f389 \ufb01 \u00bd \u200b\ufeff\x7f", "<0x0A> </s> <unk> <|endoftext|> <s>",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained tokenizers: `model` (SentencePiece), `tokenizer.json`, and `gpt2/` with vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("tokenizers")
    corpus = folder / "corpus.jsonl"
    run_tool("collect_corpus", "--output", corpus, "--max-bytes", 300_000)
    run_tool("train_tokenizer", "--input", corpus, "--output", folder / "model", "--vocab-size", 600)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer, model.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=byte_level.alphabet(),
        special_tokens=["<|endoftext|>", "<stop>"],
        show_progress=False,
    )
    model.train_from_iterator(TEXTS * 3, trainer)
    model.save(str(folder / "tokenizer.json"))
    (folder / "gpt2").mkdir()
    model.model.save(str(folder / "gpt2"))
    return folder


def trained(tmp_path: Path, lines: list[bytes], *flags: str) -> int:
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    argv = ["--input", str(tmp_path / "x.jsonl"), "--output", str(tmp_path / "x.model"), *flags]
    return train_tokenizer.main(argv)


def test_bad_lines_of_a_text_to_learn_from_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good, bad = b'{"text": "a text of words"}', [b'{"text": "\\ud800"}', b'{"text": "caf\xe9"}', b"{}", b'{"text": 1}']
    assert trained(tmp_path, [good, *bad, b"", good], "--vocab-size", "275") == 0
    told = capfd.readouterr().err
    for number in (2, 3, 4, 5):
        assert f"bad line {tmp_path}/x.jsonl:{number}: " in told
    assert "4 lines were bad and were left out" in told
    assert trained(tmp_path, bad) == 2
    assert "no text under 'text' within --max-bytes 20000000; correct --json-key" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--vocab-size 100", "--vocab-size 100 must be at least 269 for this text, with 256 bytes"),
        ("--vocab-size 4000", "--vocab-size 4000 must be at most 2"),
        ("--vocab-size 0", "--vocab-size 0 must be at least 1"),
        ("--threads 0", "--threads 0 must be at least 1"),
        ("--max-bytes -5", "--max-bytes -5 must be at least 1"),
        ("--output .", "--output . cannot be written: Is a directory; choose another"),
        ("--output /proc/x/y", "--output /proc/x/y cannot be written: No such file or directory; choose another"),
    ],
)
def test_what_no_tokenizer_can_be_trained_with_is_refused(
    flags: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, [b'{"text": "a text of words"}'] * 9, *flags.split()) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.long
def test_a_line_that_is_longer_than_the_library_takes_is_learned_from_in_parts(tmp_path: Path) -> None:
    long = b'{"text": "' + b"of words " * (1 << 21) + b'"}'
    assert trained(tmp_path, [long], "--vocab-size", "275") == 0
    assert (tmp_path / "x.model").stat().st_size


def run_tool(name: str, *arguments: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = run_script([f"tools/{name}.py", *arguments], Path(folder))
    assert done.status == 0, done.errors


def every_config(folder: Path) -> list[DataConfig]:
    return [
        DataConfig(tokenizer_type="bytes"),
        DataConfig(tokenizer_model=str(folder / "model")),
        DataConfig(tokenizer_type="huggingface", tokenizer_model=str(folder / "tokenizer.json")),
        DataConfig(tokenizer_type="huggingface", tokenizer_model=str(folder)),
        DataConfig(tokenizer_type="huggingface", tokenizer_model=str(folder / "gpt2")),
        DataConfig(
            tokenizer_type="huggingface",
            vocab_file=str(folder / "gpt2" / "vocab.json"),
            merge_file=str(folder / "gpt2" / "merges.txt"),
        ),
    ]


def every_kind(folder: Path) -> list[Tokenizer]:
    return [build_tokenizer(config) for config in every_config(folder)]


def test_a_dry_run_reads_the_size_of_a_vocabulary_from_the_files(folder: Path, tmp_path: Path) -> None:
    """Without the libraries of the tokenizers; None for what says nothing, which is no error here."""
    for config in every_config(folder):
        assert vocabulary_of_files(config) == build_tokenizer(config).vocab_size, config
    (tmp_path / "damaged").write_bytes((folder / "model").read_bytes()[:1000])
    for wrong in (
        DataConfig(tokenizer_model="no/such"),
        DataConfig(tokenizer_model=str(tmp_path / "damaged")),
        DataConfig(tokenizer_type="huggingface", tokenizer_model=__file__),
    ):
        assert vocabulary_of_files(wrong) is None


def test_every_text_comes_back_exactly(folder: Path) -> None:
    draw = random.Random(0)
    mixtures = ["".join(draw.choices(TEXTS, k=4)) for _ in range(100)]
    points = [chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(500)]
    for tokenizer in every_kind(folder):
        for text in [*TEXTS, *mixtures, "".join(points)]:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.eod not in ids
            assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_a_tokenizer_survives_pickling(folder: Path) -> None:
    for tokenizer in every_kind(folder):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert (copy.vocab_size, copy.eod) == (tokenizer.vocab_size, tokenizer.eod)
        assert all(copy.encode(text) == tokenizer.encode(text) for text in TEXTS)


def test_decoding_skips_the_end_of_document_and_ids_nobody_has(folder: Path) -> None:
    for tokenizer in every_kind(folder):
        assert tokenizer.decode([*tokenizer.encode("a b"), tokenizer.eod, tokenizer.vocab_size + 7]) == "a b"


def test_half_a_surrogate_pair_is_refused(folder: Path) -> None:
    for tokenizer in every_kind(folder):
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("a\ud800")


def test_no_text_is_cut_or_filled_up_where_a_tokenizer_was_saved_so(folder: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.enable_truncation(5)
    model.enable_padding(length=64)
    model.save(str(tmp_path / "tokenizer.json"))
    whole, found = HuggingFaceTokenizer.from_path(folder), HuggingFaceTokenizer.from_path(tmp_path)
    for tokenizer in (found, pickle.loads(pickle.dumps(found))):
        assert all(tokenizer.encode(text) == whole.encode(text) for text in TEXTS)


def test_no_merge_is_dropped_where_a_tokenizer_was_saved_so(folder: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.model.dropout = 0.9
    model.save(str(tmp_path / "tokenizer.json"))
    whole, dropping = HuggingFaceTokenizer.from_path(folder), HuggingFaceTokenizer.from_path(tmp_path)
    for tokenizer in (dropping, pickle.loads(pickle.dumps(dropping))):
        assert tokenizer.encode_all(TEXTS) == whole.encode_all(TEXTS)


def test_prompts_may_spell_special_tokens_and_begin_as_the_tokenizer_has_it(folder: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stop = model.token_to_id("<stop>")
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<stop> $A", pair="<stop> $A $B", special_tokens=[("<stop>", stop)]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer.from_path(tmp_path)
    assert tokenizer.encode_marked("a<|endoftext|>b") == [stop, *tokenizer.encode("a"), 0, *tokenizer.encode("b")]
    assert tokenizer.encode_marked("") == [stop]
    assert 0 not in tokenizer.encode("a<|endoftext|>b"), "a document is text as before"
    pieces = build_tokenizer(DataConfig(tokenizer_model=str(folder / "model")))
    end = pieces._model.id_to_piece(pieces.eod)  # type: ignore[attr-defined]
    first = [token for token in [pieces._model.bos_id()] if token >= 0]  # type: ignore[attr-defined]
    expected = [*first, *pieces.encode("a"), pieces.eod, *pieces.encode("b")]
    assert pieces.encode_marked(f"a{end}b") == expected
    assert BytesTokenizer().encode_marked("a") == [97]


def test_the_demo_tokenizer_knows_code(folder: Path) -> None:
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=str(folder / "model")))
    assert tokenizer.vocab_size == 600
    assert len(tokenizer.encode("        self.")) < len("        self.")


def test_the_folder_of_a_tokenizer_may_name_its_end_of_document(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    default = HuggingFaceTokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    named = HuggingFaceTokenizer.from_path(tmp_path)
    assert (default.eod, named.eod) == (0, 1)


def test_a_tokenizer_without_end_of_document_is_refused(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no token that ends a document; give it one of"):
        HuggingFaceTokenizer.from_path(tmp_path)


def test_bytes_and_numbers() -> None:
    assert BytesTokenizer().encode("h\u00e9") == [104, 195, 169]
    assert BytesTokenizer().decode([104, 195]) == "h\ufffd"
    numbers = NullTokenizer(10)
    assert (numbers.eod, numbers.encode("3 5"), numbers.decode([3, 5])) == (9, [3, 5], "3 5")
    with pytest.raises(ValueError, match="token 10 is outside the vocabulary of 10"):
        numbers.encode("10")
    with pytest.raises(UserError, match=r"'def x' is not numbers, .* or name the text's own tokenizer with"):
        numbers.encode("def x")


def test_mock_data_needs_no_tokenizer() -> None:
    assert build_tokenizer(DataConfig(mock_data=True)).vocab_size == 4096
    assert build_tokenizer(DataConfig(mock_data=True, vocab_size=99)).vocab_size == 99


def test_a_larger_vocabulary_is_taken_and_a_smaller_one_refused() -> None:
    assert build_tokenizer(DataConfig(tokenizer_type="bytes", vocab_size=300)).vocab_size == 300
    with pytest.raises(ValueError, match="--vocab-size 100 is smaller than the bytes tokenizer's vocabulary of 257"):
        build_tokenizer(DataConfig(tokenizer_type="bytes", vocab_size=100))


def test_megatrons_names_are_known() -> None:
    names = [
        "Llama2Tokenizer",
        "GPTSentencePieceTokenizer",
        "GPT2BPETokenizer",
        "HuggingFaceTokenizer",
        "TikTokenizer",
        "BertWordPieceLowerCase",
        "BertWordPieceCase",
        "bytes",
    ]
    kinds = [tokenizer_type(name) for name in names]
    assert kinds[:5] == ["sentencepiece", "sentencepiece", "huggingface", "huggingface", "tiktoken"]
    assert kinds[5:] == ["wordpiece_lower", "wordpiece", "bytes"]
    with pytest.raises(ValueError, match="--tokenizer-type FelixTokenizer is not known; use one of sentencepiece"):
        tokenizer_type("FelixTokenizer")


def test_word_pieces_of_a_vocab_txt(tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "!", "Un"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    for name, first in (("wordpiece_lower", "un"), ("wordpiece", "Un")):
        tokenizer = build_tokenizer(DataConfig(tokenizer_type=name, tokenizer_model=str(tmp_path / "vocab.txt")))  # type: ignore[arg-type]
        expected = [first, "##aff", "##able", "!", "[UNK]"]
        assert tokenizer.encode("Unaffable! xyz") == [pieces.index(piece) for piece in expected]
        assert tokenizer.eod == pieces.index("[SEP]") and tokenizer.vocab_size == len(pieces)
        assert tokenizer.mask_tokens().mask == pieces.index("[MASK]")
    (tmp_path / "vocab.txt").write_text("\n".join(pieces[:4]))
    with pytest.raises(UserError, match=r"vocab.txt has no piece \[MASK\]; name the vocab.txt of a BERT"):
        build_tokenizer(DataConfig(tokenizer_type="wordpiece", tokenizer_model=str(tmp_path / "vocab.txt")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(), "--tokenizer-type sentencepiece needs the tokenizer's file; give --tokenizer-model"),
        (DataConfig(tokenizer_model="no/such"), "--tokenizer-model no/such does not exist"),
        (DataConfig(tokenizer_model=__file__), "is not a SentencePiece model"),
        (DataConfig(tokenizer_type="huggingface", tokenizer_model=__file__), "is not a Hugging Face tokenizer.json"),
        (DataConfig(tokenizer_type="huggingface", tokenizer_model=str(ROOT)), "vocab.json does not exist; give"),
        (DataConfig(tokenizer_type="huggingface", vocab_file="v"), "give --vocab-file and --merge-file together"),
        (DataConfig(tokenizer_type="null"), "null has no vocabulary of its own; give --vocab-size"),
    ],
)
def test_what_cannot_be_built_is_told(config: DataConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        build_tokenizer(config)


def test_the_corpus_has_nothing_of_the_folders_that_it_skips(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "json/b.py",
        "json/b.txt",
        "site-packages/torch/c.py",
        "json/tests/d.py",
        "_sysconfigdata_e.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(name for name, path in sources(tmp_path) if path is not None) == ["a.py", "json/b.py"]


def test_the_corpus_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_tool("collect_corpus", "--output", tmp_path / name, "--max-bytes", 100_000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert 50_000 < (tmp_path / "a").stat().st_size < 200_000
