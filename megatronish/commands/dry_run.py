"""Dry run of single ranks: `--dry-run --rank R` of the training commands, in a process of its own.

torch asks only once whether there is a GPU, when it is imported; so the library that says yes is loaded before it, in a
process that imports nothing else first: `python -m megatronish.commands.dry_run FLAGS`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatronish.commands.configuration import read_config
from megatronish.commands.exit_status import exit_status
from megatronish.commands.main import ended
from megatronish.core.errors import RunError
from megatronish.core.files import refuse_unwritable_file


def dry_run_ranks(argv: Sequence[str]) -> int:
    """Dry run of the ranks of a checked command line in a new process; the exit status."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    kernels = os.environ.get("MEGATRONISH_KERNELS", "assumed")
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "MEGATRONISH_KERNELS": kernels}
    command = [sys.executable, "-m", "megatronish.commands.dry_run", *argv]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
    if child.returncode < 0:
        raise RunError(f"the dry run was ended by signal {-child.returncode}; if it was 9, it needs more host memory")
    return child.returncode


def main(argv: Sequence[str]) -> int:
    """Be that process; the exit status."""
    return exit_status(partial(_run, argv))


def _run(argv: Sequence[str]) -> int:
    from megatronish.dry_run.fake_cuda import load_fake_cuda
    from megatronish.ops.build import BuildError

    config, notes = read_config(argv)
    if config.log.dry_run_report is not None:
        refuse_unwritable_file(Path(config.log.dry_run_report), flag="--dry-run-report")
    try:
        library, device_type = load_fake_cuda(), "cuda"
    except BuildError as error:
        library, device_type = None, "meta"
        notes = [*notes, f"on the meta device, without kernels, flash attention and waits of a GPU, because {error}"]
    from megatronish.dry_run.run import dry_run

    if library is not None:
        library.install_fake_cuda()
    return dry_run(config, device_type=device_type, notes=notes)


if __name__ == "__main__":
    sys.exit(ended(lambda: main(sys.argv[1:])))
