"""Tests of `megatronish serve` with the official client of OpenAI, and the real server in a process of its own."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, NO_BROWSER, browser
from chat_formats import chatml
from chat_models import write_adapter, write_chat_model
from paths import ROOT

from megatronish.commands.main import COMMANDS
from megatronish.inference.load import find_trained
from megatronish.tokenizer.build import build_tokenizer

serve = COMMANDS["serve"].main()

pytestmark = pytest.mark.peers("openai")
openai: Any = pytest.importorskip("openai", reason="openai is not installed here; see `make test-peers`")
pytest.importorskip("fastapi", reason="FastAPI is not installed here; see `make test-peers`")
pytest.importorskip("uvicorn", reason="uvicorn is not installed here; see `make test-peers`")

SAID: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "héllo"}]
CONTEXT = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and two adapters of it."""
    found = tmp_path_factory.mktemp("models")
    write_chat_model(found / "base", template=chatml() + "{{ suffix }}")
    for seed, name in enumerate("ab", 1):
        write_adapter(found / name, seed=seed)
    return found


@contextlib.contextmanager
def served(folder: Path, flags: str = "") -> Iterator[Any]:
    """A client of a server of the model that is ended by SIGTERM, with status 0."""
    words = [sys.executable, str(ROOT / "tools" / "serve.py"), "--load", str(folder / "base"), "--port", "0"]
    words += ["--adapter", str(folder / "a"), "--adapter", f"b={folder / 'b'}", "--device", "cpu"]
    words += ["--seq-length", str(CONTEXT), *flags.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # megatronish is not installed where its peers are
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving base, a, b at http://127.0.0.1:"), line
        assert process.stdout.readline() == f"to chat in a browser: {line.split()[-1].removesuffix('v1')}\n"
        yield openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0, timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    with served(folder) as found:
        yield found


def asked(client: Any, model: str = "base", **options: Any) -> Any:
    options = {"messages": SAID, "max_tokens": 20, "temperature": 0, **options}
    return client.chat.completions.create(model=model, **options)


def test_models_are_the_base_and_its_adapters(client: Any) -> None:
    assert [each.id for each in client.models.list()] == ["base", "a", "b"]
    assert client.models.retrieve("a").id == "a"


def test_an_answer_has_a_text_a_reason_and_a_usage(client: Any) -> None:
    answer = asked(client)
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length") and choice.message.content
    usage = answer.usage
    assert usage.completion_tokens == 20 and usage.total_tokens == usage.prompt_tokens + 20
    assert asked(client, max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3
    assert asked(client, max_tokens=None).usage.total_tokens <= CONTEXT
    texts = [asked(client, name).choices[0].message.content for name in ("base", "a", "b", "base")]
    assert len(set(texts)) == 3 and texts[0] == texts[3]


def test_a_request_gives_variables_to_the_template(client: Any) -> None:
    before = asked(client).usage.prompt_tokens
    given = {"chat_template_kwargs": {"suffix": "<|im_end|>é"}}  # which is text, and no control token
    assert asked(client, extra_body=given).usage.prompt_tokens == before + len("<|im_end|>é".encode())
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        asked(client, extra_body={"chat_template_kwargs": [1]})


def test_a_streamed_answer_is_the_whole_one(client: Any) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 30}
    answer = asked(client, "a", **options)
    whole = answer.choices[0]
    chunks = list(asked(client, "a", stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == whole.message.content
    assert chunks[-2].choices[0].finish_reason == whole.finish_reason
    assert (chunks[-1].choices, chunks[-1].usage) == ([], answer.usage)
    assert asked(client, "a", **{**options, "seed": 6}).choices[0].message.content != whole.message.content


def test_a_stop_string_ends_a_text_and_is_no_part_of_it(client: Any, folder: Path) -> None:
    options: dict[str, Any] = {"model": "base", "prompt": "abc", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**options)
    text = whole.choices[0].text
    assert whole.usage.prompt_tokens == 3 and whole.usage.completion_tokens == 40
    place = next(i for i in range(3, len(text) - 1) if "\ufffd" not in text[i : i + 2])
    stop = text[place : place + 2]
    for streams in (False, True):
        cut = client.completions.create(**options, stop=[stop, "never there"], stream=streams)
        pieces = list(cut) if streams else [cut]
        assert "".join(each.choices[0].text for each in pieces) == text[: text.index(stop)]
        assert pieces[-1].choices[0].finish_reason == "stop"
    tokens = build_tokenizer(find_trained(folder / "base").description.data).encode("abc")
    assert client.completions.create(**{**options, "prompt": tokens}).choices[0].text == text


def test_a_reader_that_leaves_ends_its_text(client: Any) -> None:
    with asked(client, stream=True, max_tokens=None) as stream:
        next(iter(stream))
    assert asked(client).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"model": "c"}, openai.NotFoundError, "model 'c' is not served; there are base, a, b"),
        ({"messages": []}, openai.BadRequestError, "messages: "),
        ({"messages": None}, openai.BadRequestError, "messages: "),
        ({"messages": [{"role": "king", "content": "x"}]}, openai.BadRequestError, "message 1 has the role 'king'"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, openai.BadRequestError, "and the model sees 400"),
        ({"temperature": -1}, openai.BadRequestError, "temperature: "),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens: "),
        ({"n": 2}, openai.BadRequestError, "n=2 is not supported; leave it out"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs=2 is not supported; leave it out"),
        ({"extra_body": {"top_k": 5}}, openai.BadRequestError, "top_k=5 is not supported; leave it out"),
        ({"stop": ["x"] * 17}, openai.BadRequestError, "stop has 17 strings, and 16 is the limit; leave some out"),
        (
            {"stop": ["x", "x" * 501]},
            openai.BadRequestError,
            "stop.1 has 501 characters, and 500 is the limit",
        ),
        ({"stop": ["x", 1]}, openai.BadRequestError, "stop.1 is int and no string"),
        ({"messages": ["hello"]}, openai.BadRequestError, "message 1 must be an object, not str"),
        (
            {"messages": [{**SAID[1], "x": json.loads("[" * 60 + "]" * 60)}]},
            openai.BadRequestError,
            "messages cannot be read: its lists and objects are more than 50 deep",
        ),
    ],
    ids=[
        *("model", "no messages", "null", "role", "long", "temperature", "max_tokens", "n", "top_logprobs", "top_k"),
        *("many stops", "long stop", "no stop", "no message", "deep"),
    ],
)
def test_a_bad_request_is_an_error_in_a_sentence(client: Any, options: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind) as error:
        asked(client, **{"model": "base", **options})
    assert words in error.value.body["message"] and error.value.body["type"] == "invalid_request_error"
    assert asked(client).usage.completion_tokens == 20


def sent(client: Any, path: str, body: str) -> tuple[int, bytes, float]:
    """Status and answer to a request that the client library would not make, and the seconds until it came."""
    begin = time.monotonic()
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=60)
    connection.request("POST", f"/v1/{path}", body=body, headers={"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read(), time.monotonic() - begin


MOST = 2**21 - 1000
USER = {"role": "user", "content": "a"}
COSTLY: dict[str, tuple[str, dict[str, Any], str]] = {
    "lists of wrong messages": ("chat/completions", {"messages": [1] * (MOST // 3)}, "messages, more than fit into"),
    "many messages": ("chat/completions", {"messages": [USER] * (MOST // 36)}, "messages, more than fit into"),
    "a long message": ("chat/completions", {"messages": [{**USER, "content": "a" * MOST}]}, "more than fit into"),
    "a message of parts": ("chat/completions", {"messages": [{**USER, "content": ["a"] * (MOST // 5)}]}, "more than"),
    "a long role": ("chat/completions", {"messages": [{"role": "a" * MOST, "content": "a"}]}, "more than fit into"),
    "a role in an error": ("chat/completions", {"messages": [{**USER, "role": "a" * 20_000}]}, "has the role 'aaaa"),
    "stops of wrong types": ("chat/completions", {"messages": [USER], "stop": [1] * (MOST // 3)}, "16 is the limit"),
    "long stops": ("chat/completions", {"messages": [USER], "stop": ["a" * 8000] * 250}, "16 is the limit"),
    "biases": (
        "chat/completions",
        {"messages": [USER], "logit_bias": {str(number): 1 for number in range(150_000)}},
        "is not supported",
    ),
    "deep tools": ("chat/completions", {"messages": [USER], "tools": "DEEP"}, "is not supported"),
    "a long name": ("chat/completions", {"messages": [USER], "model": "a" * MOST}, "is not served"),
    "lists of wrong prompts": ("completions", {"prompt": [{}] * (MOST // 4)}, "must be one text or a list of tokens"),
    "many prompts": ("completions", {"prompt": [""] * (MOST // 4)}, "send several prompts one by one"),
    "many tokens": ("completions", {"prompt": [1] * (MOST // 3)}, "tokens, more than fit into"),
    "a long prompt": ("completions", {"prompt": "a" * MOST}, "characters, more than fit into"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_request_that_would_cost_much_is_refused_at_first_sight_and_in_few_words(client: Any, name: str) -> None:
    path, asked_for, words = COSTLY[name]
    body = json.dumps({"model": "base", **asked_for}, separators=(",", ":"))
    status, answer, _ = sent(client, path, body.replace('"DEEP"', "[" * 900 + "]" * 900))
    assert status in (400, 404) and words in json.loads(answer)["error"]["message"]
    assert len(answer) < 4000


def test_a_prompt_that_takes_a_template_long_keeps_nobody_waiting(tmp_path: Path, folder: Path) -> None:
    slow = "{% for i in range(99999) %}{{ '' if i + i else '' }}{% endfor %}" * 20
    write_chat_model(tmp_path / "base", template=f"{{% if messages | length > 2 %}}{slow}{{% endif %}}{chatml()}")
    for name in "ab":
        (tmp_path / name).symlink_to(folder / name)
    with served(tmp_path) as other, ThreadPoolExecutor(1) as thread:
        body = json.dumps({"model": "base", "messages": SAID * 3, "max_tokens": 2})
        start, others = time.monotonic(), list[tuple[float, float]]()
        long = thread.submit(sent, other, "chat/completions", body)
        while not long.done():
            begin = time.monotonic()
            other.models.list()
            others.append((begin - start, time.monotonic() - start))
        status, _, seconds = long.result()
    assert status == 200
    assert [each for each in others if seconds / 4 < each[0] and each[1] < 3 * seconds / 4], "all others had to wait"


def test_an_error_that_a_client_is_sent_has_no_password(tmp_path: Path, folder: Path) -> None:
    write_chat_model(tmp_path / "base", template="{{ raise_exception('not at ftp://user:PeW0rd@host/x') }}")
    for name in "ab":
        (tmp_path / name).symlink_to(folder / name)
    with served(tmp_path) as other, pytest.raises(openai.BadRequestError) as error:
        asked(other)
    assert "not at ftp://user:***@host/x" in error.value.body["message"]


def test_an_unknown_address_is_an_error_in_the_same_form(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.embeddings.create(model="base", input="x")
    assert error.value.body["message"] == "POST /v1/embeddings: Not Found"


def test_several_ranks_answer_as_one_does(client: Any, folder: Path) -> None:
    with served(folder, "--tp 2") as other:
        for name in ("base", "b"):
            assert asked(other, name).choices[0].message.content == asked(client, name).choices[0].message.content


def test_what_keeps_a_server_from_starting_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = f"--load {folder / 'base'} --device cpu"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(f"{load} --port {port}".split()) == 2
    expected = f"--host 127.0.0.1 --port {port} cannot be listened at: Address already in use; choose another --port"
    assert capsys.readouterr().err == f"{expected}, or 0 for any\n"
    assert serve(f"{load} --port 0 --adapter base={folder / 'a'}".split()) == 2
    assert "--adapter has the name base, which is that of the model itself" in capsys.readouterr().err
    assert serve(f"{load} --port 70000".split()) == 2
    assert "--port 70000 must be from 0 to 65535" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert serve(load.split()) == 2
    assert capsys.readouterr().err == "fastapi is not installed; pip install 'megatronish[serve]'\n"


def test_a_model_without_a_template_completes_and_does_not_chat(tmp_path: Path, folder: Path) -> None:
    write_chat_model(tmp_path / "base", template=None)
    for name in "ab":
        (tmp_path / name).symlink_to(folder / name)
    with served(tmp_path) as plain:
        assert plain.completions.create(model="base", prompt="x", max_tokens=4).usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError) as error:
            asked(plain)
        assert "has no chat template; name one with --chat-template" in json.dumps(error.value.body)


def test_other_hosts_and_large_requests_are_refused(folder: Path) -> None:
    with served(folder, "--max-request-bytes 5000") as client:
        for headers, body, status in (({"Host": "evil.example"}, "{}", 403), ({}, "x" * 6000, 413), ({}, "{}", 400)):
            connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=60)
            connection.request("POST", "/v1/completions", body=body, headers=headers)
            assert connection.getresponse().status == status


def test_the_server_says_that_it_is_well(client: Any) -> None:
    assert json.load(urllib.request.urlopen(str(client.base_url).removesuffix("v1/") + "health", timeout=30)) == {
        "status": "ok",
        "models": ["base", "a", "b"],
    }


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_two_models_answer_on_a_page(client: Any, tmp_path: Path) -> None:
    address = str(client.base_url).removesuffix("v1/")
    texts = [asked(client, model, messages=[{"role": "user", "content": "<b>x"}]) for model in ("base", "b")]
    with browser(tmp_path) as page:
        page.open(address)
        page.wait_for("document.querySelectorAll('#first option').length === 3 && !at('send').disabled")
        page.run("at('second').value = 'b'; at('second').dispatchEvent(new Event('change')); 0")
        page.run("at('temperature').value = 0; at('max_tokens').value = 20; at('text').value = '<b>x'; 0")
        page.run("at('form').requestSubmit(); 0")
        page.wait_for("document.querySelectorAll('.speed').length === 2")
        assert page.run("Array.from(document.querySelectorAll('.assistant'), (each) => each.textContent)") == [
            answer.choices[0].message.content for answer in texts
        ]
        assert page.run("Array.from(document.querySelectorAll('.user'), (each) => each.textContent)") == ["<b>x"] * 2
        page.run("at('max_tokens').value = 0; at('text').value = 'more'; at('form').requestSubmit(); 0")
        page.wait_for("document.querySelectorAll('.error').length === 2")
        assert "max_tokens" in page.run("document.querySelector('.error').textContent")
        assert not [told for told in page.complaints if "400" not in told]


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_a_page_that_knows_no_models_keeps_the_question_and_says_so(tmp_path: Path) -> None:
    """A file of its own has no server to ask."""
    with browser(tmp_path) as page:
        page.open((ROOT / "megatronish" / "inference" / "chat_page.html").as_uri())
        page.run("at('text').value = 'early'; at('form').requestSubmit(); 0")
        assert page.run("at('text').value") == "early"
        page.wait_for("document.querySelectorAll('.error').length === 1")
        assert "load the page again" in page.run("document.querySelector('.error').textContent")
