"""Tests of chats by templates of families: what is trained of calls and thoughts, variables, where templates lie."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_formats import chatml
from chat_tokenizers import DATE, said, save_tokenizer, trained_text, whole_text, with_controls, write_lines
from family_templates import (
    CALL,
    COMMAND_A,
    COMMAND_TOKENS,
    DEEPSEEK_V3,
    FAMILY_CHATS,
    GLM_45,
    GLM_STOPS,
    GLM_TOKENS,
    HARMONY,
    HARMONY_TOKENS,
    IM,
    KIMI_K2,
    KIMI_TOKENS,
    NUMBERED,
    QWEN_3,
    TALK,
    THOUGHT,
    TOOLS,
    WITH_CALLS,
    FamilyChat,
)

from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.core.errors import UserError
from megatronish.data.chat.conversation import checked_message
from megatronish.data.chat.encoder import ChatEncoder, EncodedChat
from megatronish.data.chat.prepare import read_record
from megatronish.data.chat.setup import ChatSetup, read_model_templates
from megatronish.data.chat.template import ChatTemplate, built_in_template
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer


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


def test_an_answer_that_two_tokens_end_ends_with_the_one_at_which_the_model_stops() -> None:
    """Also where beginnings tell nothing: each question changes what was written before."""
    tokenizer = with_controls(COMMAND_TOKENS)
    template = "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}" + COMMAND_A
    stops = ("<|END_OF_TURN_TOKEN|>",)
    encoder = family_encoder(FamilyChat("Command", template, COMMAND_TOKENS, TALK, [], stops=stops), tokenizer)
    (sample,) = samples(encoder, messages=TALK)
    answers = [f"<|START_RESPONSE|>{text}.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" for text in ("One", "Two")]
    assert trained_text(sample, tokenizer) == answers


def test_an_earlier_answer_that_ends_with_a_token_at_which_the_model_does_not_stop_is_a_sample_of_its_own() -> None:
    """gpt-oss: <|return|> ends the last answer, and <|end|>, at which nothing stops, those before it."""
    tokenizer = with_controls(HARMONY_TOKENS)
    chat = FamilyChat("gpt-oss", HARMONY, HARMONY_TOKENS, TALK, [], stops=("<|return|>", "<|call|>"))
    made = samples(family_encoder(chat, tokenizer), messages=TALK)
    texts = [trained_text(sample, tokenizer) for sample in made]
    assert texts == [[f"<|channel|>final<|message|>{text}.<|return|>"] for text in ("One", "Two")]


def test_answers_end_with_the_tokens_that_end_texts_and_calls() -> None:
    for controls, template, names in (
        (HARMONY_TOKENS, HARMONY, {"<|return|>", "<|call|>"}),
        (COMMAND_TOKENS, COMMAND_A, {"<|END_OF_TURN_TOKEN|>"}),
        (KIMI_TOKENS, KIMI_K2, {"<|im_end|>"}),
        (IM, chatml(), {"<|im_end|>"}),
    ):
        tokenizer = with_controls(controls)
        ends = family_encoder(FamilyChat("one", template, controls, [], []), tokenizer).ends_of_answers()
        assert {name for name, number in tokenizer.control_encoder().names.items() if number in ends} == names


def test_thoughts_that_a_template_leaves_out_are_refused() -> None:
    tokenizer = with_controls(IM)
    with pytest.raises(ValueError, match=r"leaves the thoughts of message 2 out \(reasoning_content\); name another"):
        samples(family_encoder(FamilyChat("ChatML", chatml(), IM, THOUGHT, []), tokenizer), messages=THOUGHT[:2])


def test_the_developer_s_message_that_a_template_leaves_out_is_refused() -> None:
    tokenizer = with_controls(IM)
    messages = [{"role": "developer", "content": "Be brief."}, *TALK[1:]]
    with pytest.raises(ValueError, match=r"leaves message 1, of the developer, out; name another"):
        samples(family_encoder(FamilyChat("Qwen", QWEN_3, IM, TALK, []), tokenizer), messages=messages)


def test_a_call_whose_number_does_not_tell_the_function_is_refused_where_no_name_is_written() -> None:
    tokenizer = with_controls(KIMI_TOKENS)
    encoder = family_encoder(FamilyChat("Kimi", KIMI_K2, KIMI_TOKENS, WITH_CALLS, []), tokenizer)
    for call in ({**NUMBERED, "id": "call_3"}, CALL):
        messages = [WITH_CALLS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
        with pytest.raises(ValueError, match="leaves the call of weather in message 2 out"):
            samples(encoder, messages=messages, tools=TOOLS)


def test_the_answer_before_an_answer_with_thoughts_begins_with_its_content() -> None:
    """Qwen 3 Thinking begins answers with <think> in the prompt, and writes none around earlier answers."""
    tokenizer = with_controls(IM)
    always = QWEN_3.replace(
        "{{- '<|im_start|>assistant\\n' -}}\n{%- if enable",
        "{{- '<|im_start|>assistant\\n<think>\\n' -}}\n{%- if enable",
    )
    assert always != QWEN_3
    (sample,) = samples(family_encoder(FamilyChat("Qwen", always, IM, TALK, []), tokenizer), messages=TALK)
    assert trained_text(sample, tokenizer) == ["One.<|im_end|>", "\n</think>\n\nTwo.<|im_end|>"]


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


@pytest.mark.parametrize(
    ("template", "controls", "around", "as_given"),
    [
        (QWEN_3, IM, ('"arguments": ', "}\n"), True),  # which asks if it is a text, as Kimi K2 does
        (KIMI_K2, KIMI_TOKENS, ("<|tool_call_argument_begin|>", "<|tool_call_end|>"), True),
        (built_in_template("chatml"), IM, ('"arguments": ', "}\n"), False),
    ],
    ids=["Qwen 3", "Kimi K2", "objects"],
)
def test_arguments_that_are_texts_are_written_as_they_are_by_a_template_that_takes_them(
    template: str, controls: Sequence[str], around: tuple[str, str], as_given: bool
) -> None:
    tokenizer = with_controls(controls)
    encoder = family_encoder(FamilyChat("one", template, controls, [], []), tokenizer)
    text = '{"x":1e5, "y": "\\u003c|im_end|>"}'
    # A text of the user's that looks like them decides nothing.
    question = {"role": "user", "content": text}
    written = text if as_given else '{"x": 100000.0, "y": "<|im_end|>"}'
    for arguments, wanted in ((text, written), ({"x": 1e5}, '{"x": 100000.0}')):
        numbered = {**NUMBERED, "function": {"name": "weather", "arguments": arguments}}
        call = {"role": "assistant", "content": None, "tool_calls": [numbered]}
        (sample,) = samples(encoder, messages=[question, call], tools=TOOLS)
        assert wanted.join(around) in trained_text(sample, tokenizer)[0]
        asked = np.array(encoder.prompt(checked([question, call, question]), TOOLS))
        assert wanted.join(around) in whole_text(EncodedChat(asked, np.zeros(len(asked), np.bool_)), tokenizer)


def test_a_conversation_that_a_template_refuses_does_not_show_how_it_takes_arguments() -> None:
    """Llama 3.1 takes one call at once: such a conversation is refused, whichever kind its arguments have."""
    one_alone = (
        "{% for m in messages if m.tool_calls and m.tool_calls[1] %}{{ raise_exception('one call') }}{% endfor %}"
    )
    tokenizer = with_controls(IM)
    encoder = family_encoder(FamilyChat("one", one_alone + built_in_template("chatml"), IM, [], []), tokenizer)
    calls = [{"type": "function", "function": {"name": "weather", "arguments": '{"x":1}'}}] * 2
    two, one = (
        [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": calls[:number]}]
        for number in (2, 1)
    )
    with pytest.raises(ValueError, match="refuses it: one call"):
        samples(encoder, messages=two, tools=TOOLS)
    (sample,) = samples(encoder, messages=one, tools=TOOLS)
    assert '"arguments": {"x": 1}}' in trained_text(sample, tokenizer)[0]


def checked(messages: list[Any]) -> list[Any]:
    """As the server reads them."""
    return [checked_message(number, message) for number, message in enumerate(messages, 1)]


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
