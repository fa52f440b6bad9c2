"""Families' templates, and their tokenizers' folders, against transformers: the same texts and the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_models import write_chat_model
from chat_tokenizers import DATE, byte_level, with_controls
from family_templates import DEEPSEEK_V3, FAMILY_CHATS, FamilyChat
from tokenizers import models, pre_tokenizers, processors

from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.data.chat.conversation import conversation_of
from megatronish.data.chat.setup import ChatSetup
from megatronish.data.chat.template import ChatTemplate, Rendering
from megatronish.formats import tokenizer_files
from megatronish.formats.chat_files import with_chat_files
from megatronish.formats.hf.tensors import describe
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.names import tokenizer_in

pytestmark = pytest.mark.peers("transformers")
TEXTS = ("Hello, wörld 123", "a  b\n\n c", "</s> x", "")


def texts_there(chat: FamilyChat, folder: Path, *, prompt: bool) -> str:
    import transformers

    byte_level(chat.controls).save(str(folder / "tokenizer.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    template = chat.template
    for written in ("strftime_now('%Y-%m-%d')", "strftime_now('%B %d, %Y')"):  # transformers writes the date of today
        template = template.replace(written, f"'{DATE}'")
    messages: Any = json.loads(json.dumps(chat.messages))
    if chat.template != DEEPSEEK_V3:  # whose arguments are JSON
        for call in (call for message in messages for call in message.get("tool_calls") or ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tools=list(chat.tools) or None,
        tokenize=False,
        add_generation_prompt=prompt,
        **chat.variables,
    )
    return str(text)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("chat", FAMILY_CHATS, ids=lambda chat: chat.name)
def test_texts_are_those_of_transformers(chat: FamilyChat, prompt: bool, tmp_path: Path) -> None:
    controls = with_controls(chat.controls).control_encoder()
    template = chat.template
    for written in ("strftime_now('%Y-%m-%d')", "strftime_now('%B %d, %Y')"):
        template = template.replace(written, f"'{DATE}'")
    ours = ChatTemplate(
        template,
        name=chat.name,
        controls=list(controls.names),
        variables={"bos_token": "<s>", "eos_token": "</s>", **chat.variables},
        date=DATE,
    )
    record = conversation_of(list(chat.messages), list(chat.tools))
    assert ours.render_one(Rendering(record.messages, prompt), record.tools) == texts_there(
        chat, tmp_path, prompt=prompt
    )


def byte_level_folder(folder: Path, *, begins: bool) -> None:
    model = byte_level(["<|end|>"])
    model.add_tokens(["<think>", "<turn>"])
    if begins:
        first = ("<s>", model.token_to_id("<s>"))
        model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    model.save(str(folder / "tokenizer.json"))


def opt_folder(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "<pad>", "</s>", "<unk>", *letters]
    models.BPE({name: number for number, name in enumerate(names)}, []).save(str(folder))


@pytest.mark.parametrize("name", ["OPT", "OPT without a first token"])
def test_folders_without_tokenizer_json_have_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    opt_folder(tmp_path)
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": name == "OPT", **special}
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    compare(tmp_path, config)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": True},
        {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<turn>"]},
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<turn>"},
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "legacy": True},
        {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "clean_up_tokenization_spaces": False},
        {"tokenizer_class": "CohereTokenizerFast", "clean_up_tokenization_spaces": True},
    ],
    ids=str,
)
def test_tokenizer_json_has_the_tokens_of_transformers(config: dict[str, Any], begins: bool, tmp_path: Path) -> None:
    byte_level_folder(tmp_path, begins=begins)
    compare(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", **config})


def compare(folder: Path, config: dict[str, Any]) -> None:
    """Compare ids of texts, with and without what is around them, and texts of ids."""
    import transformers

    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = build_tokenizer(DataConfig(**tokenizer_in(folder, like_gpt2=True)))
    assert ours.eod == theirs.eos_token_id
    for text in (*TEXTS, "<think>a<turn>b<|end|>"):
        ids = theirs(text)["input_ids"]
        assert ours.encode_marked(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text) == plain


def test_a_model_that_was_trained_on_chats_chats_there_as_it_was_trained(tmp_path: Path) -> None:
    import transformers

    write_chat_model(tmp_path / "base", template=None)
    description = describe(tmp_path / "base")
    with with_chat_files(description, ChatConfig(chat_template="chatml")) as described:
        tokenizer_files.copy(described.tokenizer_files, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    stops = transformers.GenerationConfig.from_pretrained(str(tmp_path / "out")).eos_token_id
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}]
    data = DataConfig(**tokenizer_in(tmp_path / "base", like_gpt2=False))
    setup = ChatSetup.of(ChatConfig(chat_template="chatml"), data, build_tokenizer(data))
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    encoder = setup.encoder(for_chats=True)
    assert encoder.prompt(messages) == prompt
    assert set(encoder.ends_of_answers()) <= set(stops)
