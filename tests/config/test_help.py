"""Tests of the help of the commands that train: a page by task, and a page of all flags."""

import re
from itertools import chain

import pytest

from megatronish.config.fields import FIELDS
from megatronish.config.help import TASKS, print_help
from megatronish.config.marks import REQUIRED


def page(program: str, capsys: pytest.CaptureFixture[str], *, shows_all: bool = False) -> str:
    with pytest.raises(SystemExit) as ending:
        print_help(program, shows_all=shows_all)
    assert ending.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "task"), [("pretrain_gpt.py", "pretrain"), *((f"megatronish {task}", task) for task in TASKS)]
)
def test_a_page_has_the_flags_of_its_task_and_says_how_many_more_there_are(
    program: str, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(program, capsys)
    names = list(chain.from_iterable(group.split() for group in TASKS[task].values()))
    assert len(names) == len(set(names)) and text.count("\n") < 200
    for name in names:
        assert f"{FIELDS[name].flag} " in text or f"{FIELDS[name].flag}, " in text
    assert f"--help-all shows {len(FIELDS) - len(names)} more" in text


def test_a_page_of_another_program_is_that_of_pretraining(capsys: pytest.CaptureFixture[str]) -> None:
    assert page("pretrain_t5.py", capsys).count("\n") == page("pretrain_gpt.py", capsys).count("\n")


def test_all_flags_have_a_place_on_the_page_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    text = page("megatronish finetune", capsys, shows_all=True)
    shown = set(re.findall(r"(?<![\w-])--[\w-]+", text))
    assert {field.flag for field in FIELDS.values()} <= shown


def test_a_required_flag_has_no_default_and_one_that_is_left_out_none(capsys: pytest.CaptureFixture[str]) -> None:
    text = page("megatronish pretrain", capsys, shows_all=True)
    for flag in (field.flag for field in FIELDS.values() if REQUIRED in field.marks):
        entry = text.split(f" {flag} ")[1].split(" --")[0]
        assert "(required)" in entry
    assert "(default: 0)" in text and "(default: None)" not in text and "(default: )" not in text
