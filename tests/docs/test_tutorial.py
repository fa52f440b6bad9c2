"""Test of docs/TUTORIAL.md: all of its commands, run in order in an empty folder, at smaller sizes."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from paths import ROOT
from scripts import run_script

PAGE = (ROOT / "docs" / "TUTORIAL.md").read_text(encoding="utf-8")

SMALLER = {
    "--max-bytes": "300000",
    "--vocab-size": "512",
    "--exit-interval": "2",
    "--steps": "1",
    "--num-tokens": "5",
    "--train-iters": "2",
}
"""Values of flags that the page gives, replaced."""

SMALL_SIZES = {"num-layers": 2, "hidden-size": 32, "seq-length": 32, "train-iters": 4, "save-interval": 2}
SMALL_MODEL = [word for name, value in SMALL_SIZES.items() for word in (f"--{name}", str(value))]
"""Flags added to every command that takes the page's config."""


def page_commands() -> list[str]:
    """The commands of the page's `sh` blocks, a line each, without the one that makes the environment."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line != "make venv"]


def smaller(command: str) -> list[str]:
    """The words of a command of the page after `python`, at smaller sizes."""
    words = shlex.split(command)[1:]
    words = [SMALLER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    return words + SMALL_MODEL if "examples/tutorial.toml" in words else words


def run(command: str, folder: Path) -> str:
    """What a command of the page prints."""
    if not command.startswith("python "):
        return subprocess.run(
            command, shell=True, cwd=folder, capture_output=True, text=True, check=True, timeout=300
        ).stdout
    done = run_script(smaller(command), folder / "printed", at=folder, draws=True)
    assert done.status == 0, f"{command}\n{done.output[-3000:]}\n{done.errors[-3000:]}"
    return done.output + done.errors


@pytest.mark.processes
def test_the_tutorial_runs_from_text_to_a_fine_tuned_hugging_face_model(tmp_path: Path) -> None:
    (tmp_path / "tutorial").mkdir()
    for name in ("tools", "examples", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    printed = [run(command, tmp_path) for command in page_commands()]
    everything = "\n".join(printed)

    for line in re.findall(r"^megatronish on .*$", PAGE, re.MULTILINE):
        assert line in everything
    assert "stopped after step 2 of 4: --exit-interval is reached; start again to resume" in everything
    assert "continuing from runs/mine/checkpoints/step_00000002" in everything
    assert "dp 1 x tp 4 x pp 2 trains the same model" in everything
    assert "took the weights of tutorial/hf: step, optimizer and data order start from the beginning" in everything
    assert "bits/byte" in everything
    assert "saved runs/tuned/checkpoints/step_00000002" in everything
    held_in = {path.name for path in (tmp_path / "tutorial" / "hf").iterdir()}
    assert held_in == {"config.json", "model.safetensors", "tokenizer.model"}


def test_the_page_shows_the_messages_that_the_test_sees() -> None:
    for message in (
        "--exit-interval is reached",
        "continuing from runs/mine/checkpoints/step_00000100",
        "trains the same model",
        "took the weights of tutorial/hf",
    ):
        assert message in PAGE
