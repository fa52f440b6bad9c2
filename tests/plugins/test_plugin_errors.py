"""Tests of errors in a plug-in's own functions: the traceback, then a sentence that names the plug-in, and no hang."""

import traceback
from pathlib import Path

import pytest
from jobs import run_job, tiny
from plugged import forgotten

from megatronish.commands import preprocess

HOOK = """
from megatronish.plugins import register_hook
from megatronish.train.trainer import Hook

class Failing(Hook):
    def __init__(self, job):
        self.rank = job.mesh.world.rank

    def after_step(self, trainer, record):
        if self.rank == 1:
            raise KeyError("no such thing")

register_hook("failing", Failing)
"""
SCHEDULE = """
from megatronish.plugins import register_schedule

def generate(**sizes):
    return 1 / 0

register_schedule("failing", generate)
"""
OBJECTIVE = """
from megatronish.plugins import register_objective

class Failing:
    pass

register_objective("failing", Failing)
"""
TOKENIZER = """
from megatronish.plugins import register_tokenizer
from megatronish.tokenizer.plain import BytesTokenizer

class Failing(BytesTokenizer):
    def encode(self, text):
        return text.no_such_method()

register_tokenizer("failing", lambda data: Failing())
"""


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "flags", "where", "what"),
    [
        (HOOK, "--dp 2 --hook failing", "after_step", "KeyError: 'no such thing'"),
        (SCHEDULE, "--pp 2 --pipeline-schedule failing", "generate", "ZeroDivisionError: division by zero"),
        (OBJECTIVE, "--tp 2 --objective failing", "", "object has no attribute 'names'"),
    ],
    ids=["hook of one rank", "schedule", "object without its methods"],
)
def test_an_error_in_a_run_ends_all_ranks_and_names_the_plug_in(
    tmp_path: Path, text: str, flags: str, where: str, what: str
) -> None:
    path = tmp_path / "failing_plugin.py"
    path.write_text(text)
    ended = run_job(tiny(tmp_path / "run", f"--plugin {path} {flags}"), tmp_path)
    assert ended.status == 1, ended
    assert "Traceback (most recent call last)" in ended.errors
    last = last_line(ended.errors)
    assert last.startswith(f"plug-in {path} failed in {where}, {path}:" if where else f"plug-in {path} failed: ")
    assert last.endswith(f"{what}; correct the plug-in, or leave it out")


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_error_in_a_tokenizer_ends_preprocessing_and_names_the_plug_in(tmp_path: Path, workers: str) -> None:
    path = tmp_path / "failing_tokenizer.py"
    path.write_text(TOKENIZER)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    argv = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "p"), "--workers", workers]
    with forgotten(), pytest.raises(AttributeError) as caught:
        preprocess.main([*argv, "--plugin", str(path), "--tokenizer-type", "failing"])
    (sentence,) = caught.value.__notes__
    assert sentence.startswith(f"plug-in {path} failed in encode, {path}:")
    assert "AttributeError: 'str' object has no attribute 'no_such_method'; correct the plug-in" in sentence
    assert last_line("".join(traceback.format_exception(caught.value))) == sentence
    assert not list(tmp_path.glob("p*"))
