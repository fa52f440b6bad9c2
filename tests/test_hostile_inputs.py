"""Test of files and flags by strangers: two inputs of each kind end in a sentence; `make attack` takes many more."""

import os
import subprocess
import sys

from all import PATH
from paths import TESTS


def test_two_malicious_inputs_of_each_kind_end_in_sentences() -> None:
    command = [sys.executable, str(TESTS / "attack" / "malformed.py"), "--hostile", "--each", "2", "--seed", "7"]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "| malicious inputs | 46 | 0 |" in ended.stdout
