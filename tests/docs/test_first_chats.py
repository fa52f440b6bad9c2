"""Test of "Your own chats, on a laptop" in docs/FINETUNING.md: chats and commands lead to the answer that it shows."""

import re
import shlex
from pathlib import Path

import pytest
from paths import ROOT
from scripts import run_script

PAGE = (ROOT / "docs" / "FINETUNING.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Your own chats, on a laptop\n")[2].partition("\n## ")[0]
CHATS, COMMANDS = re.findall(r"^```(?:text|sh)\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
TEXT = 200_000  # bytes, in the place of what `make quick` collects
SHORTER = ["--train-iters", "10", "--eval-iters", "0"]  # than `make quick` trains: chats are learned all the same


def run(words: list[str], folder: Path, *, text: str | None = None) -> str:
    """What a script of the checkout prints in `folder`."""
    done = run_script(words, folder / "printed", at=folder, text=text)
    assert done.status == 0, f"{words}\n{done.output[-3000:]}\n{done.errors[-3000:]}"
    return done.output


@pytest.mark.processes
def test_the_commands_lead_from_chats_to_the_answer_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "printed").mkdir()
    for name in ("tools", "pretrain_gpt.py", "finetune_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "chats.jsonl").write_text(CHATS)
    make_quick, finetune, chat = COMMANDS.replace("\\\n", " ").splitlines()
    assert make_quick == "make quick"

    run(["tools/collect_corpus.py", "--output", "demo/quick.jsonl", "--max-bytes", str(TEXT)], tmp_path)
    bytes_of = ["--tokenizer-type", "bytes", "--append-eod"]
    run(
        ["tools/preprocess_data.py", "--input", "demo/quick.jsonl", "--output-prefix", "demo/quick", *bytes_of],
        tmp_path,
    )
    run(["pretrain_gpt.py", "--config", "quick", *SHORTER], tmp_path)
    run(shlex.split(finetune)[1:], tmp_path)
    answered = run(shlex.split(chat)[1:], tmp_path, text="Who are you?\n").splitlines()
    assert "A very small model." in answered
    assert "Asked `Who are you?`, the model says `A very small" in SECTION
