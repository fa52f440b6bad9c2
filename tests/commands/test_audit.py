"""Tests of `megatronish audit`: its numbers, the marked samples, and the page."""

import sys
from pathlib import Path

import pytest
from chat_formats import chatml
from chat_tokenizers import said, save_tokenizer, write_lines

from megatronish.commands.audit import main

IM = ("<|im_start|>", "<|im_end|>")


@pytest.fixture
def chats(tmp_path: Path) -> list[str]:
    """Flags for a file of chats in which something of everything is wrong."""
    save_tokenizer(tmp_path / "tokenizer", IM, template=chatml())
    lines = [
        said("question", "answer"),
        said("q", "y" * 200),
        said("x" * 200, "late"),
        said("q", "a", train=False),
        "{",
    ]
    path = write_lines(tmp_path / "chats.jsonl", lines)
    return ["--data-path", str(path), "--tokenizer-model", str(tmp_path / "tokenizer"), "--seq-length", "100"]


def test_the_numbers_of_the_audit(chats: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(chats) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    prompt = len(head) - len("<|im_start|>") * 2 - len("<|im_end|>") + 3  # each control token is one
    trained = len("answer") + 1 + 101 - prompt - len("q")
    tokens = prompt + len("question") + len("answer") + 2 + 101
    assert lines[1].startswith("chats: 5 lines, format openai, chat template of ")
    assert lines[2:8] == [
        "  samples          3",
        f"  tokens           {tokens}, longest sample {prompt + 200 + len('late') + 2}",
        f"  trained tokens   {trained} ({100 * trained / tokens:.1f} %)",
        "  cut off          2 (66.7 %), 2 lost the end of an answer",
        "  dropped samples  2: 1 too long, 1 without a trained token",
        "  bad lines        1; 1: the line is no JSON that can be read (Expecting property name enclosed in double "
        "quotes: line N column N (char N))",
    ]
    assert lines[8:11] == [
        "  answers end with <|im_end|> in 3 samples",
        "  double BOS       0",
        f"rows: 2 of 100 tokens, {100 * tokens / 202:.1f} % filled (packed)",
    ]
    assert any("chats.jsonl:5: the line is no JSON that can be read" in line for line in lines)


def test_trained_tokens_are_marked_and_the_page_has_them_too(
    chats: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*chats, "--html", str(tmp_path / "page.html"), "--train-on", "last", "--no-pack-samples"]) == 0
    output = capsys.readouterr().out
    assert "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n\u27e6answer<|im_end|>\u27e7\n" in output
    assert "(one chat a row)" in output and "\033" not in output
    assert "<mark>answer&lt;|im_end|&gt;</mark>" in (tmp_path / "page.html").read_text()


def test_trained_tokens_are_green_in_a_terminal(
    chats: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(chats) == 0
    assert "\033[32manswer<|im_end|>\033[0m" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--seq-length", "0"], "--seq-length 0 must be at least 1"),
        (["--html", "/no/such/page.html"], "--html /no/such/page.html cannot be written"),
        (["--chat-template", "phi3"], "the chat template phi3 does not fit the tokenizer"),
        (["--train-on", "everything"], "--train-on everything must be one of assistant, last or all"),
        (["--data-path", "0.5", "a.jsonl", "0.5"], "weights and prefixes must alternate"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_status_2(
    chats: list[str], more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*chats, *more]) == 2
    assert sentence in capsys.readouterr().err
