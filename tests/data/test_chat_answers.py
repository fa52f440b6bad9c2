"""Tests of which tokens are trained: public formats, thoughts, tools, marks and beginnings, and what is refused."""

import json
from typing import Any

import pytest
from chat_formats import QWEN_3, QWEN_25, REFUSED, VERIFIED, ChatForm, chatml
from chat_tokenizers import encode, encoder, said, trained_text, whole_text, with_controls
from sweeps import some_of

from megatronish.config.sections.data import TrainOn
from megatronish.data.chat.answers import UnclearError
from megatronish.data.chat.template import BUILT_IN, WITH_TOOLS, built_in_template

IM = ("<|im_start|>", "<|im_end|>")
ARGUMENTS = '{"city": "Ulm", "days": 1}'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def expected(form: ChatForm, contents: list[str]) -> list[str]:
    """What must be trained of answers with these contents."""
    found, ends = [], form.ends
    for number, content in enumerate(contents):
        is_last = number == len(contents) - 1
        before = ends.before if ends.before_last is None or not is_last else ends.before_last
        after = ends.after if ends.after_last is None or not is_last else ends.after_last
        found.append(before + (content.strip() if form.trims else content) + after)
    return found


@pytest.mark.parametrize("form", VERIFIED, ids=lambda form: form.models)
@pytest.mark.parametrize(
    "contents",
    some_of([["first é", "second"], [" first\n", "\n second  "], ["only"]], [[" first\n", "\n second  "]]),
    ids=repr,
)
def test_the_answers_of_public_formats_are_found_with_their_ends(form: ChatForm, contents: list[str]) -> None:
    tokenizer = with_controls(form.controls)
    questions = [f"question {number}" for number in range(len(contents))]
    record = said(*(text for pair in zip(questions, contents, strict=True) for text in pair))
    if form.has_system:
        record["messages"].insert(0, {"role": "system", "content": "Be brief."})
    (sample,) = encode(encoder(tokenizer, form.template), record)
    assert trained_text(sample, tokenizer) == expected(form, contents)
    names = {number: name for name, number in tokenizer.control_encoder().names.items()}
    ends = {form.ends.after, form.ends.after_last or form.ends.after}
    assert {names[token] for token in sample.ends} <= {end.strip() for end in ends}, "an end is one control token"


def test_thirty_formats_are_verified() -> None:
    assert len(VERIFIED) >= 30


@pytest.mark.parametrize("models", REFUSED)
def test_a_format_that_ends_no_answer_is_refused_by_name(models: str) -> None:
    tokenizer = with_controls(["<|system|>", "<|user|>", "<|assistant|>"])
    with pytest.raises(UnclearError, match=rf"no control token .* ends it.* the chat template {models} does not fit"):
        encode(encoder(tokenizer, REFUSED[models], name=models), said("a", "b"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_find_their_answers(name: str) -> None:
    tokenizer = with_controls(
        [*IM, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"]
    )
    record = said("a", "first", "b", "second", system="Be brief.")
    (sample,) = encode(encoder(tokenizer, built_in_template(name)), record)
    end = {
        **dict.fromkeys(WITH_TOOLS, "<|im_end|>"),
        "llama3": "<|eot_id|>",
        "gemma": "<end_of_turn>",
        "phi3": "<|end|>",
    }.get(name, "</s>")
    space = {"llama2": (" ", " "), "mistral": (" ", ""), "vicuna": (" ", "")}.get(name, ("", ""))
    texts = ("first", "<think>\n\n</think>\n\nsecond" if name == "qwen3" else "second")
    assert trained_text(sample, tokenizer) == [f"{space[0]}{text}{space[1]}{end}" for text in texts]


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in WITH_TOOLS])
def test_built_in_templates_without_a_place_for_tools_refuse_them(name: str) -> None:
    tokenizer = with_controls(IM)
    with pytest.raises(ValueError, match=r"it has no place for tools"):
        encode(encoder(tokenizer, built_in_template(name)), {**said("a", "b"), "tools": TOOLS})


def call(number: int = 1, text: str | None = None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"city": "Ulm", "days": number})}
    return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": function}]}


def with_tools(text: str | None = None) -> dict[str, Any]:
    return {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "Weather?"},
            call(text=text),
            {"role": "tool", "content": "7 degrees"},
            {"role": "assistant", "content": "It is cold."},
        ],
    }


@pytest.mark.parametrize(
    ("models", "called", "end"),
    [
        (
            "Qwen 2.5",
            f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>',
            "<|im_end|>",
        ),
        ("Llama 3.1", f'{{"name": "weather", "parameters": {ARGUMENTS}}}<|eot_id|>', "<|eot_id|>"),
        ("Mistral 7B v0.3", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]</s>', "</s>"),
    ],
)
def test_calls_of_tools_are_trained_and_their_results_are_not(models: str, called: str, end: str) -> None:
    form = next(each for each in VERIFIED if each.models == models)
    tokenizer = with_controls(form.controls)
    (sample,) = encode(encoder(tokenizer, form.template), with_tools())
    assert trained_text(sample, tokenizer) == [called, f"{form.ends.before}It is cold.{end}"]
    assert "7 degrees" in whole_text(sample, tokenizer)


def test_the_built_in_templates_of_qwen_write_what_qwen_reads() -> None:
    tokenizer = with_controls(IM)
    own = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    begun = f"{asked}b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    wanted = {
        "qwen25": f"{own}{begun}d<|im_end|>",
        "qwen3": f"{begun}<think>\n\n</think>\n\nd<|im_end|>",
    }
    for name, text in wanted.items():
        (sample,) = encode(encoder(tokenizer, built_in_template(name)), said("a", "b", "c", "d"))
        assert whole_text(sample, tokenizer).strip() == text
    (sample,) = encode(encoder(tokenizer, built_in_template("qwen3")), said("a", "<think>\nx\n</think>\n\nb"))
    assert whole_text(sample, tokenizer).strip() == f"{asked}<think>\nx\n</think>\n\nb<|im_end|>"


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_the_built_in_templates_with_tools_write_calls_as_they_describe_them(name: str) -> None:
    tokenizer = with_controls(IM)
    samples = encode(encoder(tokenizer, built_in_template(name)), with_tools())
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 1}}\n</tool_call><|im_end|>'
    trained = [text for sample in samples for text in trained_text(sample, tokenizer)]
    assert [text.removeprefix("<think>\n\n</think>\n\n") for text in trained] == [called, "It is cold.<|im_end|>"]


# what templates leave out

BARE = "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
BARE += "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WRITES_TOOLS = "{{ tools | tojson if tools }}"
CALLS_ALONE = BARE.replace("m.content", "m.tool_calls[0].function | tojson if m.tool_calls else m.content")
TEXT_FOR_NOW = BARE.replace("m.content", "(m.content if loop.last) ~ m.tool_calls if m.tool_calls else m.content")


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize(
    ("template", "record", "left_out"),
    [
        (BARE, with_tools(), "the tool weather"),
        (WRITES_TOOLS + BARE, with_tools(), "the call of weather in message 2"),
        (BARE, said("a", "b", system="Be brief."), "message 1, of the system,"),
        (WRITES_TOOLS + CALLS_ALONE, with_tools("I will look."), "the text next to the call in message 2"),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    template: str, record: dict[str, Any], left_out: str, train_on: TrainOn
) -> None:
    """It would write None for an answer that is a call, and that is what a model would learn."""
    made = encoder(with_controls(IM), template, name="mine", train_on=train_on)
    with pytest.raises(ValueError, match=f"the chat template mine leaves {left_out} out; name another"):
        encode(made, record)


def test_a_text_next_to_a_call_that_a_template_writes_while_it_is_the_last_is_trained() -> None:
    """As gpt-oss does: where messages follow, such a text is left out, as thoughts are."""
    tokenizer = with_controls(IM)
    samples = encode(encoder(tokenizer, WRITES_TOOLS + TEXT_FOR_NOW), with_tools("I will look."))
    trained = [text for sample in samples for text in trained_text(sample, tokenizer)]
    assert trained[0].startswith("I will look.[{") and trained[1] == "It is cold.<|im_end|>"


# thoughts


THOUGHT = "<think>\nhm {}\n</think>\n\nanswer {}"


def test_thoughts_of_the_last_answer_are_trained() -> None:
    tokenizer = with_controls(IM)
    (sample,) = encode(encoder(tokenizer, QWEN_3), said("a", "first", "b", THOUGHT.format(2, 2)))
    assert trained_text(sample, tokenizer) == ["first<|im_end|>", f"{THOUGHT.format(2, 2)}<|im_end|>"]


def test_thoughts_that_the_template_drops_later_make_a_sample_of_each_answer() -> None:
    """Trained as the model will see it: earlier thoughts are gone, those of its own answer are there."""
    tokenizer = with_controls(IM)
    record = said("a", THOUGHT.format(1, 1), "b", THOUGHT.format(2, 2))
    first, second = encode(encoder(tokenizer, QWEN_3), record)
    assert trained_text(first, tokenizer) == [f"{THOUGHT.format(1, 1)}<|im_end|>"]
    assert trained_text(second, tokenizer) == [f"{THOUGHT.format(2, 2)}<|im_end|>"]
    assert "hm 1" not in whole_text(second, tokenizer) and "answer 1" in whole_text(second, tokenizer)


# the two ways are compared


def test_ways_that_disagree_are_refused() -> None:
    """The first control token after the content is another one than the last of the turn."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}</s>{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UnclearError, match=r"two ways to find its end disagree; name another with --chat-template"):
        encode(encoder(with_controls(IM), template), said("a", "b"))


def test_generation_blocks_that_mark_other_text_are_refused() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'user' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UnclearError, match=r"its {% generation %} blocks mark other text"):
        encode(encoder(with_controls(IM), template), said("a", "b"))


def test_a_template_that_no_way_can_follow_is_refused() -> None:
    """It takes contents apart, and writes how many messages there are first."""
    template = (
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] | upper | replace('B', 'bb') | reverse }}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(UnclearError, match=r"message 2 .* cannot be said with the chat template of the test"):
        encode(encoder(with_controls(IM), template), said("a", "b"))


def test_marks_that_change_the_text_find_nothing() -> None:
    """The template writes the length of the last content first, so marks change it and longer dialogues too."""
    template = "{{ messages[-1]['content'] | length }}" + chatml()
    with pytest.raises(UnclearError, match=r"message 2 .* cannot be said"):
        encode(encoder(with_controls(IM), template), said("a", "first", "b", "second one"))


def test_an_answer_at_the_beginning_is_found() -> None:
    tokenizer = with_controls(IM)
    record = {"messages": [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "x"}]}
    (sample,) = encode(encoder(tokenizer, chatml()), record)
    assert trained_text(sample, tokenizer) == ["Hello<|im_end|>"]


def test_qwen_groups_the_results_of_tools_and_the_calls_are_found_nevertheless() -> None:
    tokenizer = with_controls(IM)
    record = with_tools()
    record["messages"].insert(3, {"role": "tool", "content": "8 degrees"})
    (sample,) = encode(encoder(tokenizer, QWEN_25), record)
    assert [text[:11] for text in trained_text(sample, tokenizer)] == ["<tool_call>", "It is cold."]
