"""Tests of the formats of chat data: what each becomes, how it is recognised, and the sentence for a bad line."""

import json
from typing import Any

import pytest

from megatronish.data.chat.conversation import Conversation, PlainText
from megatronish.data.chat.prepare import FORMATS, format_of, read_record

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def read(record: dict[str, Any], format_name: str = "auto") -> Conversation:
    found = read_record(json.dumps(record).encode(), format_name=format_name)[1]
    assert isinstance(found, Conversation)
    return found


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("openai", {"messages": [USER, ANSWER]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
        ("sharegpt", {"messages": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}),
        ("alpaca", {"instruction": "a", "input": "", "output": "b"}),
        ("prompt_completion", {"prompt": [USER], "completion": [ANSWER]}),
    ],
)
def test_every_format_becomes_the_same_messages(name: str, record: dict[str, Any]) -> None:
    assert format_of(record) == name
    assert read(record) == read(record, name) == Conversation((USER, ANSWER), (True, True))


def test_openai_messages_keep_what_templates_read_and_arguments_become_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    result = {"role": "tool", "content": "", "tool_call_id": "c1", "name": "f"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = read({"messages": [USER, {"role": "assistant", "tool_calls": [call]}, result, ANSWER], "tools": tools})
    assert found.messages[1]["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"x": [1]}}}]
    assert found.messages[1]["content"] is None
    assert (found.messages[2], found.tools) == (result, tuple(tools))
    assert read({"messages": [USER, ANSWER], "tools": json.dumps(tools)}).tools == tuple(tools)


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"messages": [{"role": "user", "content": parts}, ANSWER]}).messages[0]["content"] == "ab"


def test_sharegpt_has_a_system_and_calls_of_tools() -> None:
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "b"},
    ]
    found = read({"conversations": turns, "system": "s", "tools": '[{"name": "f"}]'})
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert (found.messages[0]["content"], found.tools, found.answers) == ("s", ({"name": "f"},), [2, 4])


def test_alpaca_puts_the_input_on_a_line_and_the_history_first() -> None:
    record = {"instruction": "i", "input": "n", "output": "o", "system": "s", "history": [["q", "r"]]}
    assert [message["content"] for message in read(record).messages] == ["s", "q", "r", "i\nn", "o"]


def test_texts_need_no_template() -> None:
    assert read_record(b'{"prompt": "a", "completion": "b"}', format_name="auto")[1] == PlainText("a", "b")
    assert read_record(b'{"text": "a"}', format_name="auto")[1] == PlainText("", "a")


def test_messages_may_be_left_out_of_training() -> None:
    messages = [USER, {**ANSWER, "train": False}, USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]
    assert read({"messages": messages}).counts == (True, False, True, False, True, True)
    assert all(message.keys() == {"role", "content"} for message in read({"messages": messages}).messages)
    prompt = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert read(prompt).counts == (True, False, True, True)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]
    assert read({"conversations": turns}).counts == (True, False)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"messages": []}, "messages must be a list of messages that is not empty"),
        ({"messages": ["a"]}, "message 1 must be an object, not str"),
        ({"messages": [USER]}, "no message is the assistant's, so there is nothing to learn"),
        ({"messages": [USER, {"role": "narrator", "content": "b"}]}, "message 2 has the role 'narrator'; roles are"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "message 2 of the assistant is empty"),
        ({"messages": [{"role": "user", "content": ""}, ANSWER]}, "message 1 of the user is empty"),
        ({"messages": [{"role": "system"}, USER, ANSWER]}, "message 1 of the role system has no content"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "message 1 has a content that is int and no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "a part of type 'image_url'"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "arguments are no JSON"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "[]"}]}]}, "arguments are no object"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{}]}]}, "a tool call without the name of a function"),
        ({"messages": [{**USER, "tool_calls": [{}]}, ANSWER]}, "must be a list of an assistant's message"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "message 2 has weight=0.5, which must be 0 or 1"),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "message 2 has train='no', which must be true or false"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "tools are no JSON"),
        ({"messages": [USER, ANSWER], "tools": "{}"}, "tools must be a list of objects"),
        ({"conversations": [{"from": "human"}]}, "turn 1 must be an object with `from` and `value`"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "function_call whose value is no JSON"),
        ({"instruction": "a"}, "message 2 of the assistant is empty"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "history must be a list of pairs"),
        ({"prompt": "a", "completion": [ANSWER]}, "must both be texts, or both be lists of messages"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"text": ""}, "text must be a text that is not empty"),
        ({"prompt": "a", "chosen": "b"}, "rejected is missing or empty"),
        ({"question": "a", "answer": "b"}, r"its keys \(answer, question\) are of no known format"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_one_sentence(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        read_record(json.dumps(record).encode(), format_name="auto")
    assert "\n" not in str(caught.value)


def test_a_named_format_is_read_and_no_other() -> None:
    others = {"prompt_completion", "input_target", "text", "pairs", "labelled"}
    assert set(FORMATS) == {"openai", "sharegpt", "alpaca"} | others
    with pytest.raises(ValueError, match=r"messages must be a list of messages"):
        read_record(b'{"text": "a"}', format_name="openai")
    with pytest.raises(ValueError, match=r"a line must be a JSON object, not list"):
        read_record(b"[]", format_name="auto")
