"""Tests of the notebooks: all cells run, and what they say that they leave is there.

The first steps are run as they are, and their model has learned. The notebook for Colab gets a tiny model in the place
of the hub's, by its cell of settings.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from chat_models import write_chat_model
from jobs import Finished
from paths import ROOT
from scripts import run_code

NOTEBOOKS = ROOT / "examples" / "notebooks"


def cells(name: str) -> list[str]:
    """The code of each cell, in order, without the lines that are for the notebook and not for Python."""
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    codes = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(line for line in code.splitlines(keepends=True) if line[0] != "%") for code in codes]


def run_cells(codes: Sequence[str], folder: Path) -> Finished:
    """All cells one after the other in `folder`, in a namespace that they share, as a notebook's kernel runs them."""
    code = "names = {'__name__': '__main__'}\n" + "".join(f"exec({cell!r}, names)\n" for cell in codes)
    return run_code(code, folder, draws=True)


@pytest.mark.processes
def test_the_first_steps_run_and_the_model_learns_the_answer(tmp_path: Path) -> None:
    done = run_cells([*cells("first_steps"), "print('answer:', answer)"], tmp_path)
    assert done.status == 0, done.errors
    assert " Tuesday." in done.output
    assert "answer: Saturday, of course." in done.output
    assert (tmp_path / "first_steps" / "model" / "model.safetensors").exists()


@pytest.mark.processes
def test_the_notebook_for_colab_runs_with_a_tiny_model_in_its_settings(tmp_path: Path) -> None:
    write_chat_model(tmp_path / "tiny")
    installs, settings, *others = cells("colab")
    assert not installs.strip()
    names: dict[str, object] = {}
    exec(settings, names)
    smaller = {"base": "tiny", "train_iters": 2, "answer_tokens": 4}
    assert smaller.keys() < names.keys()
    assert str(names["base"]).count("/") == 1  # a name of the hub
    done = run_cells([settings, *(f"{name} = {value!r}" for name, value in smaller.items()), *others], tmp_path)
    assert done.status == 0, done.errors
    assert "iteration        2/       2" in done.output
    run_dir, saved = tmp_path / str(names["run_dir"]), tmp_path / str(names["saved"])
    assert {"metrics.jsonl", "checkpoints", "report.html"} <= {path.name for path in run_dir.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in saved.iterdir()}
    assert (saved / "model.safetensors").read_bytes() != (tmp_path / "tiny" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_has_the_form_of_its_format_and_cells_that_compile(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook["cells"])
    for code in cells(path.stem):
        compile(code, str(path), "exec")
    assert path.name in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert path.name in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_what_is_installed_on_colab_has_all_that_a_model_of_the_hub_needs() -> None:
    notebook = (NOTEBOOKS / "colab.ipynb").read_text(encoding="utf-8")
    installs = [line for line in notebook.splitlines() if "%pip install" in line]
    assert len(installs) == 1
    assert {"huggingface_hub", "megatronish-*.whl"} <= set(installs[0].split('"')[1].replace("\\n", "").split())
