"""Test of `make finetune`: all of its commands at smaller sizes, and the data that it makes."""

import json
from pathlib import Path

import pytest
from scripts import run_script

SMALLER = "--num-layers 2 --hidden-size 32 --seq-length 64 --eval-interval 10 --train-iters"


def run(folder: Path, *words: object) -> str:
    """What a script of the checkout prints."""
    done = run_script(words, folder, draws=True)
    assert done.status == 0, f"{done.output[-3000:]}\n{done.errors[-3000:]}"
    return done.output


@pytest.mark.sweep
@pytest.mark.processes
def test_the_demonstration_runs_from_a_base_to_exports(tmp_path: Path) -> None:
    text, tokenizer = tmp_path / "text.jsonl", tmp_path / "small.model"
    run(tmp_path, "tools/collect_corpus.py", "--output", text, "--max-bytes", 200000)
    run(tmp_path, "tools/train_tokenizer.py", "--input", text, "--output", tokenizer, "--vocab-size", 512)
    flags = ("--tokenizer-type", "sentencepiece", "--tokenizer-model", tokenizer, "--append-eod")
    run(tmp_path, "tools/preprocess_data.py", "--input", text, "--output-prefix", tmp_path / "text", *flags)
    of_base = (
        f"{SMALLER} 4 --split 1,0,0 --dp 1 --tokenizer-model {tokenizer} --data-path {tmp_path}/text_text_document"
    )
    where = ("--folder", tmp_path / "demo", "--tokenizer", tokenizer)
    short = ("--base-flags", of_base, "--tuning-flags", "--train-iters 4 --lr-warmup-iters 1 --eval-interval 10")

    printed = run(tmp_path, "examples/finetune.py", *where, *short)
    assert "megatronish on 4 ranks: dp 2 x tp 2 x pp 1" in printed
    assert "lora of the frozen model" in printed and "trained tokens" in printed
    assert printed.count("$ python tools/generate.py") == 2
    assert "step    4" in printed and "##########" in printed
    assert (tmp_path / "demo" / "lora" / "loss.png").exists()
    held_in = {path.name for path in (tmp_path / "demo" / "peft").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= held_in
    assert (tmp_path / "demo" / "hf" / "model.safetensors").exists()


@pytest.mark.processes
def test_the_questions_have_short_answers_and_lack_the_one_that_is_asked(tmp_path: Path) -> None:
    run(tmp_path, "examples/python_questions.py", "--output", tmp_path / "questions.jsonl", "--most", 10_000)
    chats = [json.loads(line)["messages"] for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert len(chats) > 2000
    questions = {user["content"] for user, _ in chats}
    assert len(questions) == len(chats) and "What does shutil.copyfile do?" not in questions
    assert "What does shutil.copytree do?" in questions
    assert all(answer["role"] == "assistant" and 4 < len(answer["content"]) <= 90 for _, answer in chats)
