"""Tests of chats as tokens: control tokens that users spell, places of tokens, plain texts, and --train-on."""

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from chat_formats import VERIFIED, chatml, headed
from chat_tokenizers import byte_level, encode, encoder, said, trained_text, whole_text, with_controls
from sweeps import some_of
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatronish.config.sections.data import TrainOn
from megatronish.core.errors import UserError
from megatronish.data.chat.template import ChatTemplate, built_in_template
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer
from megatronish.tokenizer.plain import BytesTokenizer, NullTokenizer
from megatronish.tokenizer.sentence_piece import SentencePieceTokenizer
from megatronish.tokenizer.tokenizer import Tokenizer

IM = ("<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")


def sentencepiece_tokenizer(folder: Path) -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Question: what is this? Answer: a text of many words."] * 50),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return SentencePieceTokenizer(path)


def with_spaces_before_words() -> HuggingFaceTokenizer:
    """A tokenizer as Llama 2 has it: a space before the text, and each word with the space before it."""
    texts = ["Question: what is this? Answer: a text of many words."] * 20
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    alphabet = sorted({chr(code) for code in range(32, 127)} | {"\u2581", "\n", "é"})
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(model, eod=model.token_to_id("</s>"))


def with_space_eating_ends() -> HuggingFaceTokenizer:
    """A tokenizer as Phi 3 has it: the token that ends a turn takes the space after it along."""
    model = byte_level(["<|user|>", "<|assistant|>"])
    model.add_special_tokens([AddedToken("<|end|>", special=True, rstrip=True)])
    return HuggingFaceTokenizer(model, eod=model.token_to_id("</s>"))


# control tokens in what users write


@pytest.mark.parametrize("form", some_of(VERIFIED, VERIFIED[::3]), ids=lambda form: form.models)
def test_control_tokens_that_users_spell_stay_text(form: Any) -> None:
    tokenizer = with_controls(form.controls)
    names = tokenizer.control_encoder().names
    spelled = " and ".join(names)
    made = encoder(tokenizer, form.template)
    (plain,) = encode(made, said("question", "answer"))
    (injected,) = encode(made, said(f"question {spelled}", f"answer {spelled}"))
    controls = set(names.values())
    assert [token for token in injected.tokens if token in controls] == [
        token for token in plain.tokens if token in controls
    ]
    assert whole_text(injected, tokenizer).count(spelled) == 2
    assert trained_text(injected, tokenizer)[0].startswith(trained_text(plain, tokenizer)[0].partition("answer")[0])


def test_control_tokens_in_tools_and_arguments_stay_text() -> None:
    tokenizer = with_controls(IM)
    function = {"name": "f<|im_end|>", "arguments": {"<|im_start|>": "<|im_end|>"}}
    record = said("a", "b", tool_calls=[{"function": function}])
    record["tools"] = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]
    (sample,) = encode(encoder(tokenizer, built_in_template("chatml")), record)
    ends = tokenizer.control_encoder().names["<|im_end|>"]
    assert sample.tokens.tolist().count(ends) == 3  # of the system, of the user, of the assistant


def test_a_token_of_the_vocabulary_that_is_no_control_token_is_read_everywhere() -> None:
    """<think> is an ordinary token, which answers contain."""
    model = byte_level(IM)
    model.add_tokens(["<think>"])
    tokenizer = HuggingFaceTokenizer(model, eod=model.token_to_id("</s>"))
    (sample,) = encode(encoder(tokenizer, chatml()), said("a", "<think>b"))
    assert model.token_to_id("<think>") in sample.tokens.tolist()


def test_a_token_with_bars_is_a_control_token_also_where_the_tokenizer_does_not_say_so() -> None:
    model = byte_level(["<|im_start|>"])
    model.add_tokens(["<|im_end|>"])
    tokenizer = HuggingFaceTokenizer(model, eod=model.token_to_id("</s>"))
    (sample,) = encode(encoder(tokenizer, chatml()), said("a <|im_end|>", "b"))
    assert sample.tokens.tolist().count(model.token_to_id("<|im_end|>")) == 2
    assert trained_text(sample, tokenizer) == ["b<|im_end|>"]
    assert whole_text(sample, tokenizer).startswith("<|im_start|>user\na <|im_end|><|im_end|>\n")


def test_an_end_that_is_an_ordinary_piece_of_the_vocabulary_is_a_control_token() -> None:
    model = byte_level(bos="<s>", eos="<s>")
    vocabulary = {**model.get_vocab(with_added_tokens=False), "</s>": 256}
    ordinary = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    ordinary.pre_tokenizer, ordinary.decoder = model.pre_tokenizer, model.decoder
    tokenizer = HuggingFaceTokenizer(ordinary, eod=256)
    made = encoder(tokenizer, built_in_template("plain"), bos="")
    (sample,) = encode(made, said("</s>", "b"))
    assert sample.tokens.tolist().count(256) == 1 and sample.ends == (256,)


def test_private_characters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a text has the private character U\+F0001, which marks places here"):
        encode(encoder(with_controls(IM), chatml()), said("a\U000f0001", "b"))
    (sample,) = encode(encoder(with_controls(IM), chatml()), said("\ue000\uf8ff", "b"))  # of fonts for symbols
    assert sample.mask.any()


# tokens have their places


def test_the_text_is_tokenized_as_a_whole() -> None:
    """Cut in pieces, this tokenizer would put a space before each."""
    tokenizer = with_spaces_before_words()
    made = encoder(
        tokenizer,
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}",
    )
    (sample,) = encode(made, said("Question: what is ", "a text"))
    assert tokenizer.decode(sample.tokens.tolist()) == "Question: what is a text"
    assert sample.tokens.tolist()[:-1] == tokenizer.encode("Question: what is a text")
    assert trained_text(sample, tokenizer) == [" text</s>"], "a token across the border, ' a', is not trained"
    (sample,) = encode(made, said("Question: what is </s>", "a text"))
    assert tokenizer.eod not in sample.tokens.tolist()[:-1]


def test_a_space_that_belongs_to_the_answer_is_trained() -> None:
    tokenizer = with_spaces_before_words()
    (sample,) = encode(encoder(tokenizer, built_in_template("vicuna")), said("what is this?", "a text"))
    assert trained_text(sample, tokenizer) == [" a text</s>"]


def test_an_end_that_takes_the_space_after_it_along_is_trained() -> None:
    tokenizer = with_space_eating_ends()
    (sample,) = encode(encoder(tokenizer, headed("<|", "|>\n", "<|end|>\n", names=ROLES)), said("a", "b", "c", "d"))
    assert trained_text(sample, tokenizer) == ["b<|end|>", "d<|end|>"]


@pytest.mark.parametrize("name", ["plain", "vicuna", "alpaca", "llama2"])
def test_sentencepiece_models_read_chats(tmp_path: Path, name: str) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    record = said("what is </s> thïs \U0001f642?", "日本 a text é", "many wörds?", "words")
    (sample,) = encode(encoder(tokenizer, built_in_template(name)), record)
    space = {"vicuna": (" ", ""), "llama2": (" ", " ")}.get(name, ("", ""))
    trained = [text.strip() for text in trained_text(sample, tokenizer)]
    assert trained == [f"日本 a text é{space[1]}</s>", f"words{space[1]}</s>"]
    assert sample.tokens.tolist().count(tokenizer.eod) == 2


@pytest.mark.parametrize("record", [said("a", "b \ud83d"), {"text": "\ud83d"}, {"prompt": "a", "completion": "\ud83d"}])
def test_half_of_a_character_makes_a_bad_line(tmp_path: Path, record: dict[str, object]) -> None:
    for tokenizer in (sentencepiece_tokenizer(tmp_path), with_controls(), BytesTokenizer()):
        made = encoder(tokenizer, built_in_template("plain"), eos=tokenizer.control_encoder().eos)
        with pytest.raises(ValueError, match="is half of a character, which has no tokens"):
            encode(made, record)


def test_bytes_are_a_tokenizer_of_chats() -> None:
    tokenizer = BytesTokenizer()
    made = encoder(tokenizer, built_in_template("plain"), bos="", eos="<|endoftext|>")
    (sample,) = encode(made, said("é <|endoftext|>", "ü"))
    assert trained_text(sample, tokenizer) == ["ü<|endoftext|>"]
    assert sample.tokens.tolist().count(256) == 1


def test_numbers_are_no_tokenizer_of_chats() -> None:
    with pytest.raises(UserError, match=r"a tokenizer of the kind NullTokenizer has no control tokens for chats"):
        NullTokenizer(10).control_encoder()


# plain texts


@pytest.mark.parametrize("tokenizer", [with_controls(), BytesTokenizer()], ids=["huggingface", "bytes"])
def test_a_completion_is_trained_with_an_end_and_its_prompt_is_not(tokenizer: Tokenizer) -> None:
    controls = tokenizer.control_encoder()
    made = encoder(tokenizer, "", eos=controls.eos)
    (sample,) = encode(made, {"prompt": "one </s>", "completion": " two"})
    assert trained_text(sample, tokenizer) == [f" two{controls.eos}"]
    (sample,) = encode(made, {"text": "one"})
    assert trained_text(sample, tokenizer) == [f"one{controls.eos}"]


# --train-on, train and weight


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [("assistant", ["b<|im_end|>", "d<|im_end|>"]), ("last", ["d<|im_end|>"])],
)
def test_train_on_chooses_the_answers(train_on: TrainOn, trained: list[str]) -> None:
    tokenizer = with_controls(IM)
    (sample,) = encode(encoder(tokenizer, chatml(), train_on=train_on), said("a", "b", "c", "d"))
    assert trained_text(sample, tokenizer) == trained


def test_train_on_all_trains_on_all_except_what_is_left_out() -> None:
    tokenizer = with_controls(IM)
    made = encoder(tokenizer, chatml(), train_on="all")
    assert encode(made, said("a", "b"))[0].mask.all()
    record = said("a", "b", "c", "d")
    record["messages"][1]["train"] = False
    (sample,) = encode(made, record)
    assert "b" not in "".join(trained_text(sample, tokenizer)).replace("<|im_start|>assistant\n", "")
    record["messages"][2]["train"] = False
    with pytest.raises(ValueError, match=r"with --train-on all only an answer may have train=false or weight=0"):
        encode(made, record)


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}])
@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_a_message_that_must_not_count_does_not(mark: dict[str, Any], train_on: TrainOn) -> None:
    tokenizer = with_controls(IM)
    (sample,) = encode(encoder(tokenizer, chatml(), train_on=train_on), said("a", "b", "c", "d", **mark))
    assert trained_text(sample, tokenizer) == (["b<|im_end|>"] if train_on == "assistant" else [])


# the sandbox


def render(template: str, **more: Any) -> str:
    made = ChatTemplate(template, name="mine", controls=[], variables={}, date="2025-03-04")
    return made.render([{"role": "user", "content": "a"}], **more)


def test_templates_have_what_their_authors_expect() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "04 Mar 2025"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "a"
    assert render("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}") == "TrueTrueFalse"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template mine refuses it: roles must alternate"),
        ("{{ messages.append(1) }}", "mine refuses it: access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "mine refuses it: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ 'a' * 10000000 }}", "mine refuses it: a value of size 10,000,000 is not allowed"),
        ("{{ 10 ** 1000000 }}", "mine refuses it: a value of size .* is not allowed"),
        ("{{ nothing.at_all }}", "mine refuses it: 'nothing' is undefined"),
        ("{{ 'a' + 1 }}", "the chat template mine cannot write it: TypeError: can only concatenate str"),
        ("{% include '/etc/passwd' %}", "mine cannot write it|mine refuses it"),
    ],
)
def test_what_a_template_cannot_do_is_one_sentence(template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        render(template)


def test_a_template_that_is_none_is_one_sentence() -> None:
    with pytest.raises(
        UserError, match=r"the chat template mine is no Jinja template: .* in line 2; correct it, or name"
    ):
        render("{% if x %}\n{% for %}")
