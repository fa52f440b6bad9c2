"""Tests of chat templates that would fill the memory or never end: each is one sentence, in bounded time."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from chat_formats import QWEN_25, VERIFIED, ChatForm, chatml
from chat_tokenizers import DATE, encode, encoder, said, trained_text, with_controls
from sweeps import some_of
from template_bombs import DEEP, ENDLESS, FILLING

from megatronish.core.contained import ChildBounds, Contained, ContainedError
from megatronish.core.errors import UserError
from megatronish.data.chat import answers, template
from megatronish.data.chat.encoder import ChatEncoder
from megatronish.data.chat.template import BUILT_IN, ChatTemplate, Rendering, built_in_template

SMALL = ChildBounds(memory=200 << 20, seconds=0.3)
IM = ("<|im_start|>", "<|im_end|>")
SYSTEM = {"role": "system", "content": "Answer in one sentence, and never with a list. " * 2200}
BOMBS = {**FILLING, **ENDLESS, **DEEP}
NAMED = (
    *("tilde", "plus", "lists", "replace", "percent width", "format", "center", "ljust", "zfill", "indent", "tojson"),
    *("expandtabs", "join", "batch", "nested ranges", "sum", "slice", "lipsum", "folded", "brackets", "own list"),
)
"""Those of the default suite; --all-layouts and `make attack` take all."""


def made(source: str) -> ChatTemplate:
    return ChatTemplate(source, name="mine", controls=[], variables={}, date="2025-03-04")


def written(source: str) -> str:
    return made(source).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_fills_the_memory_or_does_not_end_is_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name not in NAMED and not request.config.getoption("--all-layouts"):
        pytest.skip("one of the many: --all-layouts takes all")
    monkeypatch.setattr(template, "BOUNDS", SMALL)
    before = time.process_time()
    with pytest.raises(ValueError, match=r"^the chat template mine ") as caught:
        written(BOMBS[name])
    assert len(str(caught.value)) < 2500
    assert time.process_time() - before < 1.0, "it was written in this process"


def test_what_exceeds_its_bounds_ends_the_command_and_not_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "BOUNDS", SMALL)
    with pytest.raises(
        UserError, match=r"mine takes more than 0.3 s; correct it, or name another with --chat-template"
    ):
        written(ENDLESS["nested ranges"])
    with pytest.raises(UserError, match="mine needs more than 200 MiB of memory; correct it"):
        written("{{ 'a' | center(9999999999 + messages | length) }}")
    with pytest.raises(UserError, match="mine writes more than 4 MiB"):
        written("{% for i in range(50) %}{{ 'a' * 100000 }}{% endfor %}")


SAID = said("a", "b", "c", "d")
LONG, VARIABLES = SYSTEM["content"], {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "source",
    [
        f"{{{{ 'a' * 400000 }}}}{chatml()}",
        chatml().replace("{{ '<|im_start|>user", "{{ 'a ' * 20000 ~ '<|im_start|>user"),
        chatml().replace("m['content']", "(m['content'] * 40000)"),
        f"{{% for i in range(99999) %}}{{{{ bos_token }}}}{{% endfor %}}{chatml()}",
    ],
    ids=["before", "in each message", "of the content", "of a variable"],
)
def test_a_text_out_of_proportion_to_its_messages_is_refused_before_it_is_tokenized(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child writes it in a thousandth of a second; its tokens would take this process a second for each chat."""
    strange = encoder(with_controls(IM), source, name="mine")
    monkeypatch.setattr(ChatEncoder, "_placed", None)
    before = time.process_time()
    told = r"mine writes [\d,]+ characters for messages and tools of \d\d; correct it, or name another with"
    with pytest.raises(UserError, match=told):
        encode(strange, SAID)
    with pytest.raises(UserError, match=told):
        strange.prompt(SAID["messages"])
    assert time.process_time() - before < 0.5


def text_of(source: str, messages: list[dict[str, Any]], tools: Sequence[Any] = ()) -> str:
    return ChatTemplate(source, name="mine", controls=[], variables=VARIABLES, date=DATE).render(messages, tools)


@pytest.mark.parametrize("form", some_of(VERIFIED, VERIFIED[::5]), ids=lambda form: form.models)
def test_a_long_system_prompt_fits_into_every_real_template(form: ChatForm) -> None:
    """In the messages, and in the template itself, which then writes it before every chat."""
    assert len(LONG) > 100_000
    assert len(text_of(LONG + form.template, SAID["messages"])) > 100_000
    with suppress(ValueError):  # a format may have no place for it
        text_of(form.template, [SYSTEM, *SAID["messages"]])


def test_tools_with_long_descriptions_fit_however_they_are_written() -> None:
    parameters = {"type": "object", "properties": {f"p{number}": {"enum": [*range(20)]} for number in range(30)}}
    function = {"name": "f", "description": LONG, "parameters": parameters}
    tools = [{"type": "function", "function": function}] * 3
    for source in (QWEN_25, QWEN_25.replace("| tojson", "| tojson(indent=8)")):
        assert len(text_of(source, SAID["messages"], tools)) > 300_000
    small = [{"type": "function", "function": {**function, "description": ""}}]
    assert len(text_of(QWEN_25.replace("| tojson", "| tojson(indent=8)"), SAID["messages"], small)) > 30_000


def test_a_variable_of_the_tokenizers_files_may_be_long() -> None:
    source = "{{ default_system }}{{ messages[0].content }}"
    found = ChatTemplate(source, name="mine", controls=[], variables={"default_system": LONG}, date=DATE)
    assert found.render([{"role": "user", "content": "a"}]) == f"{LONG}a"


def test_many_slow_texts_exceed_the_bounds_together_and_many_quick_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "BOUNDS", ChildBounds(seconds=0.2, seconds_each=0.005))
    quick, slow = (
        made("{{ messages[0].content }}"),
        made("{% for n in range(8) %}{% for i in range(99999) %}{{ '' if i + i else 1 }}{% endfor %}{% endfor %}"),
    )
    for _ in range(300):
        quick.render([{"role": "user", "content": "a"}])

    def write_slowly() -> None:
        for _ in range(100):
            slow.render([{"role": "user", "content": "a"}])

    with pytest.raises(UserError, match=r"takes more than 0\.2 s"):
        write_slowly()


def test_a_refusal_moves_no_cursor_and_fills_no_screen() -> None:
    with pytest.raises(ValueError, match="refuses it: ") as caught:
        written("{{ raise_exception('\x1b[2J\x07' ~ 'x' * 500000) }}")
    assert "\\x1b[2J\\x07xxx" in str(caught.value)
    assert "characters]" in str(caught.value)
    assert len(str(caught.value)) < 2500


def test_templates_that_are_built_in_need_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    for name in BUILT_IN:
        made(built_in_template(name))
    with pytest.raises(TypeError):
        made("{{ messages[0].content }}")


def test_a_child_ends_with_its_owner_and_starts_anew_in_a_fork() -> None:
    child = Contained("builtins:_none_of_these")
    with pytest.raises(ContainedError):
        child.ask("a")
    upper = Contained("operator:methodcaller", "upper")
    assert upper.ask("a") == "A"
    assert pickle.loads(pickle.dumps(upper)).ask("b") == "B"
    assert upper._process is not None
    pid = upper._process.pid
    if (fork := os.fork()) == 0:
        os._exit(int(upper.ask("c") != "C" or upper._process.pid == pid))
    assert os.waitpid(fork, 0)[1] == 0, "the fork shares the child of its parent"
    assert upper.ask("d") == "D"
    del upper
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = """
import os, signal
from megatronish.core.contained import Contained
child = Contained("operator:methodcaller", "upper")
child.ask("a")
print(child._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    until = time.monotonic() + 20
    while Path(f"/proc/{done.stdout.strip()}/stat").exists() and time.monotonic() < until:
        if Path(f"/proc/{done.stdout.strip()}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    assert time.monotonic() < until, "the child lives on"


def test_a_conversation_of_many_turns_takes_time_in_proportion_and_finds_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = with_controls(IM)
    rendered: list[int] = []
    render_all = ChatTemplate.render_all

    def counted(self: ChatTemplate, renderings: Sequence[Rendering], tools: Sequence[object]) -> list[str | ValueError]:
        rendered.extend(len(each.messages) for each in renderings)
        return render_all(self, renderings, tools)

    monkeypatch.setattr(ChatTemplate, "render_all", counted)
    for turns in (200, 2000):
        rendered.clear()
        record = said(*(f"text {number}" for number in range(turns)), system="s")
        (sample,) = encode(encoder(tokenizer, chatml()), record)
        assert trained_text(sample, tokenizer) == [f"text {number}<|im_end|>" for number in range(1, turns, 2)]
        assert sum(rendered) < (2 * answers.MOST_RENDERED + 3) * turns


def test_answers_of_many_turns_that_a_template_writes_in_many_ways_are_found_or_refused() -> None:
    tokenizer = with_controls(IM)
    varied = chatml().replace("m['content']", "(loop.index0 % 7) ~ m['content']")
    record = said(*(f"text {number}" for number in range(400)))
    (sample,) = encode(encoder(tokenizer, varied), record)
    assert [text[1:] for text in trained_text(sample, tokenizer)] == [
        f"text {number}<|im_end|>" for number in range(1, 400, 2)
    ]
    unlike = chatml().replace("m['content']", "loop.index0 ~ m['content']")
    with pytest.raises(ValueError, match="it has 200 answers, which the chat template of the test writes in many ways"):
        encode(encoder(tokenizer, unlike), record)
