"""Tests of compatibility: checkpoints, run configs and command lines of older versions are still read.

tests/golden/checkpoints holds two runs of commit b51d105: the checkpoint after step 2, the config that the run left,
its flags, and loss and gradient norm of all four steps. tests/golden/flags.txt holds every flag that was known then.
"""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from jobs import steps_of, tiny, train_on_ranks
from paths import GOLDEN

from megatronish.compat.megatron_flags.table import KNOWN
from megatronish.config.data_lists import DATA_LISTS
from megatronish.config.dump import resolved
from megatronish.config.fields import ALIASES, FIELDS
from megatronish.config.read import read_config

RUNS = sorted((GOLDEN / "checkpoints").iterdir())


def flags_of(run: Path) -> str:
    return (run / "flags.txt").read_text().strip()


def is_layout(flag: str) -> bool:
    return flag in ("--dp", "--tp", "--pp", "--zero-stage", "--sequence-parallel")


def without_layout(flags: str) -> str:
    """The same run in one process."""
    words = flags.split()
    kept = [
        word for i, word in enumerate(words) if not is_layout(word) and not (word.isdigit() and is_layout(words[i - 1]))
    ]
    return " ".join(kept)


@pytest.mark.parametrize("serial", [False, True], ids=["same layout", "one process"])
@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_a_checkpoint_of_before_is_gone_on_with(tmp_path: Path, run: Path, serial: bool) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    flags = without_layout(flags_of(run)) if serial else flags_of(run)
    argv = tiny(tmp_path, f"{flags} --train-iters 4 --global-batch-size 4")
    output = train_on_ranks(argv, world_size=read_config(argv).config.layout.world_size)
    assert "continuing from" in output
    tolerance = 2**-9 if "--fp16" in flags else 1e-5
    steps = steps_of(tmp_path)
    assert sorted(steps) == [3, 4]
    for number, expected in json.loads((run / "steps.json").read_text()).items():
        if int(number) in steps:
            assert steps[int(number)] == pytest.approx(expected, rel=tolerance), f"step {number}"


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_the_config_of_a_run_of_before_means_the_same(run: Path) -> None:
    before = tomllib.loads((run / "config.toml").read_text())
    now = resolved(read_config(["--config", str(run / "config.toml")]).config)
    assert {section: {name: now[section].get(name) for name in fields} for section, fields in before.items()} == before


def described() -> dict[str, str]:
    """Every flag with what becomes of it: its section and default, what it stands for, or its status."""
    found = {f"--{name.replace('_', '-')}": f"[{each.section}] {each.default!r}" for name, each in FIELDS.items()}
    found |= {f"--{alias}": f"is --{name.replace('_', '-')}" for alias, name in ALIASES.items()}
    found |= {f"--{name}": "lists data" for name in DATA_LISTS}
    return found | {f"--{name}": f"{known.status} {known.num_values}" for name, known in KNOWN.items()}


def test_every_flag_of_before_is_still_there() -> None:
    """A refused flag may come to work; one that works may not come to mean something else."""
    now = described()
    for line in (GOLDEN / "flags.txt").read_text().splitlines():
        flag, _, meaning = line.partition(" ")
        assert flag in now, flag
        if not meaning.startswith("refused"):
            assert now[flag] == meaning, flag
