"""Tests of docs/TRAINED.md: a model of bytes against gzip, at a small size, and the picture of the runs."""

import gzip
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from paths import ROOT
from scripts import run_script

sys.path += [str(ROOT / "docs" / "pictures"), str(ROOT / "examples")]
TEXTS = [f"def number_{number}():\n    return {number}\n" * 9 for number in range(41)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def test_held_out_texts_are_not_learned_and_compressed_as_they_are(corpus: Path, tmp_path: Path) -> None:
    byte_model = importlib.import_module("byte_model")
    learned, held_out = byte_model.divided(corpus, tmp_path / "demo")
    texts = {path: [json.loads(line)["text"] for line in path.read_text().splitlines()] for path in (learned, held_out)}
    whole = "".join(TEXTS[::20])
    assert "".join(texts[held_out]) == whole, "no byte is lost"
    assert "".join(texts[learned]) == "".join(text for text in TEXTS if text not in TEXTS[::20])
    assert set(texts[held_out]) == {f"def number_{number}():\n    return {number}\n" for number in (0, 20, 40)}
    bits = byte_model.compressed(learned, held_out)
    assert bits["gzip -9, all pieces in one file"] == 8 * len(gzip.compress(whole.encode(), 9)) / len(whole)
    alone, after = (bits[f"deflate, each {how}"] for how in ("piece by itself", "after 32 KiB of learned text"))
    assert after < alone


def test_pieces_begin_with_functions_and_classes(tmp_path: Path) -> None:
    byte_model = importlib.import_module("byte_model")
    pieces = ["import os\n", "class A:\n", "    def f():\n        def g(): ...\n", "    async def h(): ...\nx = 1\n"]
    corpus = tmp_path / "one.jsonl"
    corpus.write_text(json.dumps({"text": "".join(pieces)}) + "\n")
    _, held_out = byte_model.divided(corpus, tmp_path)
    assert [text.decode() for text in byte_model.pieces_of(held_out)] == pieces


@pytest.mark.sweep
@pytest.mark.processes
def test_the_model_of_bytes_is_trained_and_compared(corpus: Path, tmp_path: Path) -> None:
    small = (
        "--num-layers",
        1,
        "--hidden-size",
        32,
        "--seq-length",
        128,
        "--micro-batch-size",
        2,
        "--train-iters",
        2,
        "--lr-wsd-decay-iters",
        1,
        "--eval-interval",
        2,
    )
    where = ("--corpus", corpus, "--folder", tmp_path / "demo", "--run-dir", tmp_path / "run")
    done = run_script(("examples/byte_model.py", *where, "--", *small, "--sample-tokens", 2), tmp_path)
    assert done.status == 0, f"{done.output[-2000:]}\n{done.errors[-2000:]}"
    bits = {
        name.strip(): float(value) for name, value in re.findall(r"^(.{42}) ([\d.]+) bits", done.output, re.MULTILINE)
    }
    assert len(bits) == 5
    assert 6 < bits["the model, each piece by itself"] < 12  # near that of 257 equal chances: it has seen two batches


def test_the_picture_is_drawn_of_the_runs(tmp_path: Path) -> None:
    draw_trained = importlib.import_module("draw_trained")
    for folder in draw_trained.CURVES.values():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    assert [axes.get_title() for axes in draw_trained.draw(tmp_path).axes] == list(draw_trained.CURVES)


def test_the_target_runs_what_the_page_names() -> None:
    (recipe,) = re.findall(r"^nightly:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    page = (ROOT / "docs" / "TRAINED.md").read_text(encoding="utf-8")
    for line in recipe.replace("$(MAKE) --no-print-directory", "make").splitlines():
        assert line.strip() in page
