"""Tests of the command under the real torchrun: an error of the user is the last thing on the screen."""

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT


def test_an_error_of_the_user_comes_last_below_the_traceback_of_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "megatronish", "pretrain", "--config", "demo", "--mock-data", "--tp", "4", "--pp", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1  # torchrun's own; the ranks ended with 2
    sentence = "world size 2 must be divisible by tp 4 x pp 1 x cp 1 = 4; start 4 processes or a multiple of that"
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == "1 problem in the configuration:"
    assert lines[1].startswith(sentence)
    *_, headline, last, border = lines
    assert "Traceback (most recent call last):" in lines
    assert headline.endswith("1 problem in the configuration:")
    assert last.startswith(sentence)
    assert set(border) == {"="}
    assert list(tmp_path.iterdir()) == []
