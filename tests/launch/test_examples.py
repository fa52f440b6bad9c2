"""Tests of examples/launch: the files are well-formed, and the command in each is one that runs with its ranks."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

from megatronish.config.read import read_config
from megatronish.launch.place import ENV, LAUNCHERS

FOLDER = ROOT / "examples" / "launch"
NUM_RANKS = {"torchrun.sh": 16, "slurm.sbatch": 16, "mpirun.sh": 16, "trainjob.yaml": 16, "pytorchjob.yaml": 8}
SCRIPTS = [name for name in NUM_RANKS if not name.endswith(".yaml")]
YAML = [name for name in NUM_RANKS if name.endswith(".yaml")]
DOCUMENT = (ROOT / "docs" / "MANY_MACHINES.md").read_text(encoding="utf-8")


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def arguments_of(name: str) -> list[str]:
    """What pretrain_gpt.py is given."""
    if name.endswith(".yaml"):
        (listed,) = re.findall(r"args: \[(.*?)\]", text_of(name), re.DOTALL)
        return re.findall(r'"([^"]*)"', listed)
    (line,) = [line for line in text_of(name).replace("\\\n", " ").splitlines() if "pretrain_gpt.py" in line]
    return shlex.split(line.partition("pretrain_gpt.py")[2].rstrip("& "))


def test_every_example_is_tested_and_in_the_document() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names == NUM_RANKS.keys()
    assert names == {Path(path).name for path in re.findall(r"\(\.\./examples/launch/([^)]+)\)", DOCUMENT)}


@pytest.mark.parametrize("name", NUM_RANKS)
def test_the_flags_of_an_example_are_right_for_its_ranks(name: str) -> None:
    argv = arguments_of(name)
    config = ROOT / argv[argv.index("--config") + 1]
    assert read_config([*argv, "--config", str(config), "--mock-data"][2:], world_size=NUM_RANKS[name]).config.layout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_well_formed(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


@pytest.mark.parametrize("name", YAML)
def test_a_manifest_is_well_formed(name: str) -> None:
    text = text_of(name)
    assert "\t" not in text
    for opening, closing in ("[]", "{}"):
        assert text.count(opening) == text.count(closing)
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        assert indent % 2 == 0 or line.lstrip().startswith('"'), line
    yaml = pytest.importorskip("yaml", reason="a full check needs PyYAML, which no requirement brings")
    manifest = yaml.safe_load(text)
    assert {"apiVersion", "kind", "metadata", "spec"} == manifest.keys()


def test_the_document_has_every_variable_in_the_order_in_which_they_are_read() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|(.*)$", DOCUMENT, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(LAUNCHERS) + 2))
    assert [name for _, name, _ in rows[1:]] == [launcher.name for launcher in LAUNCHERS]
    for (_, _, variables), launcher in zip(rows[1:], LAUNCHERS, strict=True):
        named = {*launcher.rank, *launcher.size, *launcher.local_rank, *launcher.local_size, launcher.machines}
        assert named - {None} <= set(re.findall(r"`(\w+)`", variables))
    assert all(f"`{name}`" in DOCUMENT for name in ENV)
