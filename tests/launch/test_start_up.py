"""Tests of what a start costs in fresh processes: processor seconds and imports, which other load hardly changes."""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import tiny
from paths import ROOT

from megatronish.launch.imports import importing

# A rank that reports which modules it has imported by itself when its first step is done, on a line of its own: what
# another process has printed may lack the end of its line.
REPORTING = """
import os, sys
from megatronish.commands.pretrain import main
from megatronish.train import run
from megatronish.train.trainer import Trainer

whole_train, whole_step = run.train, Trainer.step

def step(self, micro_batches):
    record = whole_step(self, micro_batches)
    here = sorted(set(sys.modules) - at_fork)
    os.write(report, f"\\nrank {self.engine.mesh.world.rank} imports {' '.join(here)}\\n".encode())
    return record

def train(*args):
    global at_fork
    at_fork = set(sys.modules)
    return whole_train(*args)

run.train, Trainer.step = train, step
report = os.dup(1)
sys.exit(main(sys.argv[1:]))
"""


class Spent(NamedTuple):
    """A process that has ended: its status, what it printed, processor seconds with those of its children."""

    status: int
    output: str
    errors: str
    seconds: float


def spent(argv: Sequence[str], folder: Path) -> Spent:
    """Run a fresh interpreter to its end."""
    out, errors = folder / "out", folder / "errors"
    with out.open("w") as to_out, errors.open("w") as to_errors:
        process = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=to_out, stderr=to_errors)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Spent(process.returncode, out.read_text(), errors.read_text(), used.ru_utime + used.ru_stime)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [("--help", 0, "--hidden-size"), ("--num-layers 2 --hidden-siez 8", 2, "--hidden-size")],
    ids=["help", "a mistake"],
)
def test_help_and_errors_come_at_once(flags: str, status: int, message: str, tmp_path: Path) -> None:
    ended = spent(["-X", "importtime", "pretrain_gpt.py", *flags.split()], tmp_path)
    assert ended.status == status
    assert message in ended.output + ended.errors
    imported = set(re.findall(r"\| +([\w.]+)$", ended.errors, re.MULTILINE))
    assert "megatronish.config.read" in imported
    assert not imported & {"torch", "numpy", "matplotlib"}
    assert ended.seconds < 1.5  # 0.4 and 0.25 on a busy machine


@pytest.mark.processes
def test_ranks_share_the_imports_of_their_launcher(tmp_path: Path) -> None:
    flags = "--tp 2 --pp 2 --train-iters 1 --hidden-dropout 0 --attention-dropout 0"
    ended = spent(["-c", REPORTING, *tiny(tmp_path / "run", flags)], tmp_path)
    assert ended.status == 0, ended
    found = {int(rank): names.split() for rank, names in re.findall(r"^rank (\d) imports(.*)$", ended.output, re.M)}
    assert sorted(found) == list(range(4))
    for rank in range(1, 4):  # rank 0 opens trackers
        assert len(found[rank]) <= 4, found[rank]  # two now
    assert ended.seconds < 20  # 5 on a busy machine, the sample at the end included


def test_imports_are_not_looked_through_for_garbage() -> None:
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)
    gc.unfreeze()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()
