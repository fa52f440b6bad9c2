"""Tests of packaging: the installed package has what the code imports, and the Makefile lists its targets."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools
from paths import ROOT

import megatronish.__main__
import megatronish.commands.main


def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: found.update(given))
    monkeypatch.chdir(ROOT)
    path = ROOT / "setup.py"
    exec(compile(path.read_text(), str(path), "exec"), {"__file__": str(path), "__name__": "__main__"})
    return found


def pins() -> dict[str, str]:
    """{package: version} of requirements.txt."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~ ]", requirement)[0]


def as_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def imported() -> set[str]:
    """Top-level names that the package, its scripts and its tools import."""
    found = set()
    for path in [*ROOT.glob("*.py"), *(ROOT / "megatronish").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module.partition(".")[0], node.module}
    return found


def test_the_package_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given = metadata(monkeypatch)
    assert given["name"] == "megatronish"
    assert given["python_requires"] == ">=3.11"
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "megatronish").rglob("*.py")}
    packages = {".".join(folder.parts) for folder in folders}
    assert set(given["packages"]) == packages, "a folder of megatronish/ lacks its __init__.py"


def test_building_needs_no_torch() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [name_of(requirement) for requirement in needed] == ["setuptools"]


def test_every_requirement_is_pinned_and_within_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    given, pinned = metadata(monkeypatch), pins()
    for requirement in given["install_requires"] + given["extras_require"]["test"]:
        assert name_of(requirement) in pinned
        lowest = requirement.partition(">=")[2]
        assert not lowest or as_tuple(lowest) <= as_tuple(pinned[name_of(requirement)])
    required = {name_of(requirement) for requirement in given["install_requires"] + given["extras_require"]["test"]}
    assert pinned.keys() - required == {"setuptools"}, "what make installs, pip installs too"
    assert next(iter(pinned)) == "torch", "torch comes first, so that nothing else brings a build of its own"


@pytest.mark.long
def test_every_requirement_is_imported_and_every_import_required(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {name_of(requirement) for requirement in metadata(monkeypatch)["install_requires"]}
    names = imported()
    if "torch.utils.tensorboard" in names:
        names.add("tensorboard")
    to_come = {"safetensors"}  # conversion of checkpoints will import it
    assert not required - names - to_come, "nothing imports these"
    # Extras, and what comes with them: PyYAML that one tool asks for, torch's fsspec, the server, the harness.
    names -= {"triton", "triton.language"}  # with CUDA builds of torch, which alone run these kernels
    names -= {"tiktoken", "yaml", "fsspec", "fastapi", "pydantic", "starlette", "uvicorn", "lm_eval", "huggingface_hub"}
    others = {name for name in names if "." not in name} - set(sys.stdlib_module_names) - {"megatronish", "setuptools"}
    assert not others - required, "these are imported and not required"


def test_make_alone_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  ([a-z-]+) +\S", listed, re.MULTILINE)) == set(phony.split())


def make_venv(python: object, venv: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "venv", f"PYTHON={python}", f"VENV={venv}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_old_interpreter_is_told_in_a_sentence(tmp_path: Path) -> None:
    old = tmp_path / "python"
    code = "import sys; sys.version_info = (3, 9); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$2"\n')
    old.chmod(0o755)
    done = make_venv(old, tmp_path / "venv")
    assert done.returncode != 0
    assert f"{old} is Python 3.9, but megatronish needs 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_interpreter_is_told_in_a_sentence(tmp_path: Path) -> None:
    done = make_venv("no-such-python", tmp_path / "venv")
    assert done.returncode != 0
    assert "there is no no-such-python here; name a Python 3.11 or newer" in done.stderr


def test_what_ci_runs_ends_with_the_tests() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert lines[0] == "make check"
    assert lines[1] == "make package"
    assert lines[2].startswith("make pretrain ")
    assert lines[-1] == "make test"


def test_the_page_on_an_index_has_no_link_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    given = metadata(monkeypatch)
    targets = re.findall(r"\]\(([^)]*)\)", given["long_description"])
    assert not [target for target in targets if not target.startswith("https://")]
    assert "megatronish" in given["long_description"].splitlines()[0]


def test_the_version_has_one_source_and_the_command_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = metadata(monkeypatch)
    assert given["version"] == megatronish.__version__
    assert given["entry_points"] == {"console_scripts": ["megatronish = megatronish.__main__:main"]}
    assert megatronish.__main__.main is megatronish.commands.main.main
