"""Test of examples/ray_train.py with a local Ray: two workers, one of which is killed, train as one process does."""

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import SECONDS, steps_of, tiny, train_on_ranks
from paths import ROOT
from ranks import wait_until


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'ray[train]'")
def test_workers_of_ray_train_go_on_where_a_killed_one_left(tmp_path: Path) -> None:
    run_dir, save = tmp_path / "run", tmp_path / "store"
    argv = tiny(run_dir, "--train-iters 120 --save-interval 10 --keep-last 2 --dp 2")
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--save", save.as_uri(), "--"]
    own = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w") as output:
        trainer = subprocess.Popen([*command, *argv], cwd=tmp_path, env=os.environ | own, stdout=output, stderr=output)
    told = (tmp_path / "output").read_text
    try:
        assert wait_until(lambda: any(save.glob("step_*/state.json")), timeout=SECONDS), told()
        (holder,) = re.findall(r"process (\d+) on", (run_dir / ".lock").read_text())
        os.kill(int(holder), signal.SIGKILL)
        assert trainer.wait(2 * SECONDS) == 0, told()
    finally:
        trainer.terminate()
        trainer.wait()
    assert "continuing from file://" in told()
    train_on_ranks(tiny(tmp_path / "one", "--train-iters 120"))
    one, two = steps_of(tmp_path / "one"), steps_of(run_dir)
    assert sorted(two) == sorted(one)
    for step, seen in one.items():
        assert two[step] == pytest.approx(seen, rel=1e-4), step
