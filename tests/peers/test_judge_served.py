"""Test of `megatronish judge` with `megatronish serve`: a base and an adapter of it answer, a test's server judges."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_models import write_adapter, write_chat_model
from chat_servers import Body, Reply, chat_server
from paths import ROOT

from megatronish.commands.judge import main

pytestmark = pytest.mark.peers("fastapi")
pytest.importorskip("fastapi", reason="FastAPI is not installed here; see `make test-peers`")
pytest.importorskip("uvicorn", reason="uvicorn is not installed here; see `make test-peers`")

QUESTIONS = [
    {"question_id": 1, "category": "math", "turns": ["1?", "2?"]},
    {"question_id": 2, "category": "writing", "turns": ["Say it.", "Again."]},
]


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """URL of a server of a tiny model, `base`, and its adapter, `tuned`."""
    write_chat_model(folder / "base")
    write_adapter(folder / "adapter", seed=1)
    words = [sys.executable, str(ROOT / "tools" / "serve.py"), "--load", str(folder / "base"), "--port", "0"]
    words += ["--adapter", f"tuned={folder / 'adapter'}", "--device", "cpu", "--seq-length", "400"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving base, tuned at http://127.0.0.1:"), line
        yield line.split()[-1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def prefer_long(body: Body) -> str | Reply:
    """Verdict of a judge that sees nothing and prefers A."""
    return "[[A]]" if "Decide" in body["messages"][0]["content"] else "[[5]]"


def test_a_base_and_its_adapter_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f"{json.dumps(each)}\n" for each in QUESTIONS))
    with served(tmp_path) as url, chat_server(prefer_long, ("judge",)) as judge:
        flags = ["--questions", str(questions), "--output", str(tmp_path / "out"), "--judge", f"judge={judge.url}"]
        flags += ["--model", f"base={url}", "--model", f"after={url}#tuned", "--max-tokens", "12", "--retries", "1"]
        assert main(flags) == 0
        answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
        assert len(answers) == 8 and all(each["answer"] for each in answers)
        texts = {name: [each["answer"] for each in answers if each["model"] == name] for name in ("base", "after")}
        assert texts["base"] != texts["after"]

        assert main([*flags, "--mode", "pairwise"]) == 0  # the answers of the first command
        assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 8
        assert "| base  | after   | 0    | 4    | 0" in capsys.readouterr().out

        # A seed gives the same answers again, at a temperature, too.
        assert main([*flags, "--output", str(tmp_path / "again")]) == 0
        again = [json.loads(line) for line in (tmp_path / "again" / "answers.jsonl").read_text().splitlines()]
        key = [(each["request"], each["answer"]) for each in answers]
        assert sorted(key) == sorted((each["request"], each["answer"]) for each in again)

        capsys.readouterr()
        assert main([*flags, "--max-tokens", "13", "--limit", "1", "--model", f"x={url}#missing"]) == 2
        assert "the server has no model missing; it has base, tuned; name one behind" in capsys.readouterr().err
        assert main([*flags, "--max-tokens", "350", "--limit", "1"]) == 2
        assert "refuses a request with status 400: " in capsys.readouterr().err
