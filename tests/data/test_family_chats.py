"""Tests of chats by templates of families: what is trained of calls and thoughts, variables, where templates lie."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_formats import chatml
from chat_tokenizers import DATE, said, save_tokenizer, trained_text, whole_text, with_controls, write_lines
from family_templates import (
    DEEPSEEK_V3,
    FAMILY_CHATS,
    GLM_45,
    GLM_STOPS,
    GLM_TOKENS,
    IM,
    QWEN_3,
    TALK,
    THOUGHT,
    TOOLS,
    WITH_CALLS,
    FamilyChat,
)

from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.core.errors import UserError
from megatronish.data.chat.encoder import ChatEncoder, EncodedChat
from megatronish.data.chat.prepare import read_record
from megatronish.data.chat.setup import ChatSetup, read_model_templates
from megatronish.data.chat.template import ChatTemplate
from megatronish.tokenizer.tokenizer import HuggingFaceTokenizer, build_tokenizer


def family_encoder(chat: FamilyChat, tokenizer: HuggingFaceTokenizer) -> ChatEncoder:
    controls = tokenizer.control_encoder()
    variables = {"bos_token": "<s>", "eos_token": "</s>", **chat.variables}
    template = ChatTemplate(
        chat.template,
        name=chat.name,
        controls=list(controls.names),
        variables=variables,
        date=DATE,
        stops=chat.stops,
    )
    return ChatEncoder(controls, template)


def samples(encoder: ChatEncoder, **record: Any) -> list[EncodedChat]:
    return encoder.encode(read_record(json.dumps(record).encode(), format_name="auto")[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("chat", FAMILY_CHATS, ids=lambda chat: chat.name)
def test_calls_and_thoughts_are_trained_as_the_template_writes_them(chat: FamilyChat) -> None:
    tokenizer = with_controls(chat.controls)
    made = samples(family_encoder(chat, tokenizer), messages=chat.messages, tools=list(chat.tools))
    assert [trained_text(sample, tokenizer) for sample in made] == [list(texts) for texts in chat.trained]


def test_a_turn_that_nothing_ends_is_refused_where_the_model_does_not_stop_at_the_next() -> None:
    tokenizer = with_controls(GLM_TOKENS)
    encoder = family_encoder(FamilyChat("GLM", GLM_45, GLM_TOKENS, TALK, []), tokenizer)
    with pytest.raises(ValueError, match="no control token of the tokenizer ends it"):
        samples(encoder, messages=TALK)


def test_thoughts_that_a_template_leaves_out_are_refused() -> None:
    tokenizer = with_controls(IM)
    with pytest.raises(ValueError, match=r"leaves the thoughts of message 2 out \(reasoning_content\); name another"):
        samples(family_encoder(FamilyChat("ChatML", chatml(), IM, THOUGHT, []), tokenizer), messages=THOUGHT[:2])


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_one_of_three_names(name: str) -> None:
    tokenizer = with_controls(IM)
    messages = [THOUGHT[0], {"role": "assistant", "content": "2", name: "one and one"}]
    (sample,) = samples(family_encoder(FamilyChat("Qwen", QWEN_3, IM, THOUGHT, []), tokenizer), messages=messages)
    assert trained_text(sample, tokenizer) == ["<think>\none and one\n</think>\n\n2<|im_end|>"]
    messages[1][name] = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match="message 2 has thoughts that are int and no text"):
        read_record(json.dumps({"messages": messages}).encode(), format_name="auto")


def test_arguments_are_texts_for_all_conversations_of_a_template_that_wants_texts() -> None:
    chat = next(each for each in FAMILY_CHATS if each.template == DEEPSEEK_V3 and each.tools)
    tokenizer = with_controls(chat.controls)
    encoder = family_encoder(chat, tokenizer)
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    for arguments in ({}, {"x": "<é>"}, {}):
        call["function"] = {"name": "weather", "arguments": arguments}
        messages = [WITH_CALLS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        (sample,) = samples(encoder, messages=messages, tools=TOOLS)
        assert f"```json\n{json.dumps(arguments, ensure_ascii=False)}\n```" in trained_text(sample, tokenizer)[0]


# variables of a template


def setup_of(folder: Path, **config: Any) -> ChatSetup:
    data = DataConfig(tokenizer_type="huggingface", tokenizer_model=str(folder))
    return ChatSetup.of(ChatConfig(chat_date=DATE, **config), data, build_tokenizer(data))


def test_a_config_a_line_and_a_request_give_variables_to_the_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, IM, template=QWEN_3)
    off = setup_of(tmp_path, chat_template_kwargs='{"enable_thinking": false}')
    plain = setup_of(tmp_path)
    assert off.identity != plain.identity
    prompts = [setup.encoder(for_chats=True) for setup in (off, plain)]
    question = [{"role": "user", "content": "a"}]
    without, with_thoughts = (encoder.prompt(question) for encoder in prompts)
    tokenizer = off.tokenizer
    assert tokenizer.decode(without) == tokenizer.decode(with_thoughts) + "<think>\n\n</think>\n\n"
    assert prompts[1].prompt(question, variables={"enable_thinking": False}) == without
    assert prompts[0].prompt(question, variables={"enable_thinking": True}) == with_thoughts
    record = said("a", "b")
    (trained,) = samples(prompts[0], **record)
    assert trained_text(trained, tokenizer) == ["b<|im_end|>"]
    (of_line,) = samples(prompts[1], **record, chat_template_kwargs={"enable_thinking": False})
    assert of_line.mask.tolist() == trained.mask.tolist()
    with pytest.raises(ValueError, match="chat_template_kwargs must be an object"):
        samples(prompts[1], **record, chat_template_kwargs=3)


@pytest.mark.parametrize(
    ("text", "why"), [("{", r"is no JSON \(.*\); correct it"), ("[1]", "is no JSON object; write")]
)
def test_variables_that_are_no_object_are_refused(text: str, why: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, IM, template=QWEN_3)
    with pytest.raises(UserError, match=rf"chat_template_kwargs=.* {why}"):
        setup_of(tmp_path, chat_template_kwargs=text)


# where templates and stops lie


def test_a_template_may_be_in_a_json_file_and_files_of_their_own_come_first(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, IM, template="config")
    assert read_model_templates(tmp_path).sources == {"default": "config"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert read_model_templates(tmp_path).sources == {"default": "json"}
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_model_templates(tmp_path).sources == {"default": "jinja"}


def test_conversations_with_tools_have_the_model_s_template_for_them(tmp_path: Path) -> None:
    """Command R has three templates, and transformers takes `tool_use` where there are tools."""
    named = {"default": chatml(), "tool_use": QWEN_3, "rag": "no"}
    templates = [{"name": name, "template": template} for name, template in named.items()]
    save_tokenizer(tmp_path, IM, chat_template=templates)
    encoder = setup_of(tmp_path).encoder(for_chats=True)
    tokenizer = with_controls(IM)
    (sample,) = samples(encoder, messages=WITH_CALLS[:2], tools=TOOLS)
    assert "<tool_call>" in whole_text(sample, tokenizer)
    (sample,) = samples(encoder, **said("a", "b"))
    assert "<think>" not in whole_text(sample, tokenizer)
    (sample,) = samples(setup_of(tmp_path, chat_template="tool_use").encoder(for_chats=True), **said("a", "b"))
    assert "<think>" in whole_text(sample, tokenizer)


def test_the_stops_of_a_model_end_turns_that_its_template_leaves_open(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, GLM_TOKENS, template=GLM_45)
    tokenizer = with_controls(GLM_TOKENS)
    names = tokenizer.control_encoder().names
    stops = [names[name] for name in ("</s>", *GLM_STOPS)]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (sample,) = samples(setup_of(tmp_path).encoder(for_chats=True), messages=TALK)
    assert trained_text(sample, tokenizer)[-1].endswith("Two.<|user|>")
    assert sample.ends == (names["<|user|>"],)
    write_lines(tmp_path / "generation_config.json", [{"eos_token_id": "x"}])
    with pytest.raises(UserError, match="eos_token_id='x' must be a token id, or a list of them; correct it"):
        setup_of(tmp_path).encoder(for_chats=True)
