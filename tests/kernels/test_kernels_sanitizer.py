"""Tests of the kernels on a GPU under compute-sanitizer, for errors that the emulator cannot detect."""

import os
import shutil
import subprocess
import sys

import pytest
from kernel_runs import kernels
from paths import TESTS

from megatronish.ops.report import FAMILIES


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_the_sanitizer_is_content(family: str, tool: str) -> None:
    kernels("cuda")
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not here")
    options = ["--report-api-errors=no"] if tool == "memcheck" else []  # torch looks for functions that need not be
    pytest_command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", "not 2_to_the_31"]
    done = subprocess.run(
        [
            sanitizer,
            f"--tool={tool}",
            *options,
            "--error-exitcode=99",
            *pytest_command,
            str(TESTS / "kernels" / f"test_kernels_{family}.py"),
        ],
        capture_output=True,
        text=True,
        check=False,
        # Each tensor an allocation of its own, so that an access beyond its end is one beyond all.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
