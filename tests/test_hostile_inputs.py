"""Test of files and flags by strangers: an input of each kind ends in a sentence; `make attack` takes many more."""

import os
import subprocess
import sys

from all import PATH
from paths import TESTS


def test_a_malicious_input_of_each_kind_ends_in_a_sentence() -> None:
    command = [sys.executable, str(TESTS / "attack" / "malformed.py"), "--hostile", "--each", "1", "--seed", "7"]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "| malicious inputs | 25 | 0 |" in ended.stdout
