"""Tests of tokenizers as families publish them: special tokens, tokens that are added, and what is put around texts."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from chat_tokenizers import byte_level
from tokenizers import pre_tokenizers

from megatronish.config.sections.data import DataConfig
from megatronish.config.vocabulary_size import vocabulary_of_files
from megatronish.core.errors import UserError
from megatronish.formats import tokenizer_files
from megatronish.inference.text_stream import TextStream
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer
from megatronish.tokenizer.names import tokenizer_in
from megatronish.tokenizer.tiktoken_file import PATTERNS
from megatronish.tokenizer.tokenizer import Tokenizer

TEXTS = ["Hello, wörld 123", "a  b\n\n c", "漢字 text😀", "</s> <think>x", ""]


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content))


def built(folder: Path) -> Tokenizer:
    data = DataConfig(**tokenizer_in(folder, like_gpt2=True))
    tokenizer = build_tokenizer(data)
    assert vocabulary_of_files(data) == tokenizer.vocab_size
    return tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = TextStream(tokenizer.decode)
    return "".join(stream.add(token) for token in ids) + stream.finish()


def sentencepiece_file(folder: Path, **options: Any) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Question: what is this? Answer: a text of many words."] * 9),
        model_writer=model,
        vocab_size=330,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


# tokenizer.model: Llama 1 and 2, Baichuan


def test_sentencepiece_puts_around_a_text_what_its_folder_says(tmp_path: Path) -> None:
    sentencepiece_file(tmp_path)
    plain = built(tmp_path).encode("a text")
    for adds_bos, adds_eos, first, last in (
        (None, None, [1], []),
        (True, True, [1], [2]),
        (False, None, [], []),  # Baichuan
        (False, True, [], [2]),
    ):
        write(tmp_path, "tokenizer_config.json", {"add_bos_token": adds_bos, "add_eos_token": adds_eos})
        tokenizer = built(tmp_path)
        assert tokenizer.encode_marked("a text") == [*first, *plain, *last]
        assert tokenizer.encode("a text") == plain
        assert tokenizer.decode(tokenizer.encode_marked("a text")) == "a text"


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_a_folder_adds_to_a_sentencepiece_model(file: str, kind: str, tmp_path: Path) -> None:
    sentencepiece_file(tmp_path, model_type=kind)
    size = built(tmp_path).vocab_size
    added = {"<|im_start|>": size, "<|im_end|>": size + 1}
    config = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    if file == "added_tokens.json":
        write(tmp_path, file, added)
    else:
        config["added_tokens_decoder"] = {number: {"content": name, "special": True} for name, number in added.items()}
    write(tmp_path, "tokenizer_config.json", config)
    tokenizer = built(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (size + 2, size + 1)
    spelled = "<|im_start|>user"
    assert size not in tokenizer.encode(spelled)
    assert tokenizer.encode_marked(spelled) == [1, size, *tokenizer.encode("user")]
    controls = tokenizer.control_encoder()
    assert controls.eos == "<|im_end|>"
    assert controls.encode(spelled, [(0, 12)]).ids == [size, *tokenizer.encode("user")]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, size + 1]) == text == streamed(tokenizer, ids)


@pytest.mark.parametrize("legacy", [None, True, False])
def test_a_space_is_put_before_a_text_once_or_behind_each_special_token(legacy: bool | None, tmp_path: Path) -> None:
    sentencepiece_file(tmp_path, model_type="bpe")
    size = built(tmp_path).vocab_size
    names = {"<|end|>": True, "<think>": False}
    added = {str(size + place): {"content": name, "special": names[name]} for place, name in enumerate(names)}
    write(tmp_path, "tokenizer_config.json", {"legacy": legacy, "added_tokens_decoder": added})
    tokenizer = built(tmp_path)
    a, inner = tokenizer.encode("a"), tokenizer.encode("\na")[2:]  # behind a space and a new line, which is a byte
    assert a != inner
    behind = inner if legacy is False else a
    assert tokenizer.encode_marked("a<|end|>a") == [1, *a, size, *behind]
    assert tokenizer.encode("a<think>a") == [*a, size + 1, *behind]  # of answers, so it is read and shown
    assert tokenizer.control_encoder().encode("a<|end|>a<think>a", [(1, 8)]).ids == [
        *(*a, size, *behind),
        *(size + 1, *behind),
    ]
    for text in ("a<think>a", "<think> a", "a <think>\n b</think>", "<|end|>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == streamed(tokenizer, ids)


def test_an_added_token_far_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    sentencepiece_file(tmp_path)
    write(tmp_path, "added_tokens.json", {"<x>": 10**12})
    with pytest.raises(UserError, match=r"add a token with the id 1,000,000,000,000.*correct tokenizer_config\.json"):
        build_tokenizer(DataConfig(**tokenizer_in(tmp_path, like_gpt2=False)))
    write(tmp_path, "added_tokens.json", {"<x>": "one"})
    with pytest.raises(UserError, match="has an added token with the id one, which is none; correct its files"):
        build_tokenizer(DataConfig(**tokenizer_in(tmp_path, like_gpt2=False)))


# vocab.json and merges.txt: OPT


def opt_files(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "<pad>", "</s>", "<unk>", *letters]
    tokenizers.models.BPE({name: number for number, name in enumerate(names)}, []).save(str(folder))
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    write(folder, "special_tokens_map.json", {key: {"content": name} for key, name in special.items()})
    write(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True})


def test_opt_begins_a_text_with_the_token_that_ends_documents(tmp_path: Path) -> None:
    opt_files(tmp_path)
    tokenizer = built(tmp_path)
    assert tokenizer.eod == 2
    assert tokenizer.encode_marked("ab") == [2, *tokenizer.encode("ab")]
    assert tokenizer.encode_marked("a<pad>") == [2, *tokenizer.encode("a"), 1]
    assert tokenizer.decode([2, *tokenizer.encode("</s>é"), 1, 2]) == "</s>é"


def test_added_tokens_with_a_gap_are_refused(tmp_path: Path) -> None:
    opt_files(tmp_path)
    write(tmp_path, "added_tokens.json", {"<x>": 300})
    with pytest.raises(UserError, match=r"the id 300, and the next free one is 260; save a tokenizer\.json"):
        build_tokenizer(DataConfig(**tokenizer_in(tmp_path, like_gpt2=True)))


# tiktoken.model: Kimi K2


def kimi_files(folder: Path) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"te", b"text", "漢".encode()[:2], "漢".encode()]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    added = {260: "[BOS]", 261: "[EOS]", 262: "<|im_end|>", 263: "<|im_user|>", 265: "<think>", 268: "[PAD]"}
    decoder = {number: {"content": name, "special": name != "<think>"} for number, name in added.items()}
    config = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    write(folder, "tokenizer_config.json", {**config, "tokenizer_class": "TikTokenTokenizer"})


def test_kimi_k2_has_its_special_tokens_and_reserved_ones_between_them(tmp_path: Path) -> None:
    kimi_files(tmp_path)
    tokenizer = built(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (269, 262)
    assert tokenizer.encode_marked("text<|im_end|>漢[EOS]") == [257, 262, 259, 261]
    assert tokenizer.encode_marked("<|reserved_token_264|>") == [264]
    assert tokenizer.encode("<think>a") == [265, ord("a")]  # of answers, so it is read and shown
    assert tokenizer.decode([263, 265, 257, 264, 262]) == "<think>text"
    assert set(tokenizer.control_encoder().names) >= {"[BOS]", "<|im_end|>", "<|im_user|>", "[PAD]"}
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == streamed(tokenizer, ids)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("漢字abc漢", ["漢字", "abc", "漢"]),
        ("Don't DON'T", ["Don't", " DON'T"]),
        ("HelloWorld 12345", ["Hello", "World", " ", "123", "45"]),
        ("a\n\n  b!?\n", ["a", "\n\n", " ", " b", "!?\n"]),
    ],
)
def test_kimi_k2_splits_text_into_its_words(text: str, words: list[str], tmp_path: Path) -> None:
    kimi_files(tmp_path)
    built(tmp_path)
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS["kimi"]), "isolated")
    assert [word for word, _ in split.pre_tokenize_str(text)] == words


# what the folder says besides its vocabulary


def test_tokens_that_a_folder_calls_special_are_so(tmp_path: Path) -> None:
    model = byte_level(["<|end|>"], bos="<s>", eos="<|stop|>")
    model.add_tokens(["<turn>", "<extra>"])
    model.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "special_tokens_map.json", {"eos_token": "<turn>", "additional_special_tokens": ["<extra>"]})
    tokenizer = HuggingFaceTokenizer.from_path(tmp_path)
    turn, extra = model.token_to_id("<turn>"), model.token_to_id("<extra>")
    assert tokenizer.eod == turn
    assert turn not in tokenizer.encode("<turn>") and tokenizer.encode("<extra>") == [extra]
    assert tokenizer.decode([turn, *tokenizer.encode("a"), extra]) == "a<extra>"
    # A tokenizer_config.json of today says all: the older file is not read.
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|stop|>", "added_tokens_decoder": {}})
    assert HuggingFaceTokenizer.from_path(tmp_path).eod == model.token_to_id("<|stop|>")


def test_every_file_of_a_tokenizer_comes_along_with_a_model(tmp_path: Path) -> None:
    names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "generation_config.json")
    for kind, file in (
        ("sentencepiece", "tokenizer.model"),
        ("tiktoken", "tiktoken.model"),
        ("huggingface", "tokenizer.json"),
        ("wordpiece", "vocab.txt"),
    ):
        folder = tmp_path / kind
        (folder / "additional_chat_templates").mkdir(parents=True)
        for name in (*names, file, "additional_chat_templates/tool_use.jinja"):
            (folder / name).write_text("{}")
        data = DataConfig(tokenizer_type=kind, tokenizer_model=str(folder / file))  # type: ignore[arg-type]
        files = tokenizer_files.files_of(data)
        assert set(files) == {*names, file, "additional_chat_templates/tool_use.jinja"}
        tokenizer_files.copy(files, folder / "copy")
        assert tokenizer_files.in_folder(folder / "copy").keys() | {file} == set(files)


# tekken.json: Mistral


def tekken_file(folder: Path, **config: Any) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"te", b"text", b"beyond"]
    entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(TEKKEN_TOKENS)]
    settings = {"pattern": r"\p{L}+|\s|[^\p{L}\s]+", "default_vocab_size": 266, "default_num_special_tokens": 8}
    write(folder, "tekken.json", {"config": {**settings, **config}, "vocab": entries, "special_tokens": special})


TEKKEN_TOKENS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")


def test_tekken_has_its_special_tokens_first_and_begins_a_text(tmp_path: Path) -> None:
    tekken_file(tmp_path)
    tokenizer = built(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (266, 2)
    assert tokenizer.encode("text") == [257 + 8]
    assert tokenizer.encode_marked("[INST]text</s>") == [1, 3, 265, 2]
    assert {"[INST]", "<SPECIAL_7>"} <= set(tokenizer.control_encoder().names)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == streamed(tokenizer, ids)
    assert set(tokenizer_files.files_of(DataConfig(**tokenizer_in(tmp_path, like_gpt2=False)))) == {"tekken.json"}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"pattern": "("}, "its pattern is no regular expression"),
        ({"default_num_special_tokens": 2}, "names no special tokens <s> and </s>"),
        ({"default_vocab_size": "x"}, "is no tekken.json"),
    ],
)
def test_a_tekken_file_that_is_none_is_refused(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    tekken_file(tmp_path, **config)
    if "default_num_special_tokens" in config:
        content = json.loads((tmp_path / "tekken.json").read_text())
        write(tmp_path, "tekken.json", {**content, "special_tokens": None})
    with pytest.raises(UserError, match=sentence):
        build_tokenizer(DataConfig(**tokenizer_in(tmp_path, like_gpt2=False)))
