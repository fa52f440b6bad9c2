"""Trial of the packages: an sdist and a wheel are built, installed into a fresh environment and used outside of it.

`make package` runs it with the interpreter of .venv, whose libraries the fresh environment sees: nothing is downloaded.
The wheel is built from the sdist, so that what is left out there is missing here.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/docs/test_words.py",
    "tests/test_package.py",
    "tests/theorem/test_golden_losses.py",
    "tests/commands",
    "tests/data",
)
FAST = ("-m", "pytest", "--fast", "-p", "no:cacheprovider")

# Tiny, and of real text: two shards, joined. Each line runs in an empty folder.
COMMANDS = """
megatronish --version
megatronish --help
python -m megatronish --version
megatronish collect-corpus --output text.jsonl --max-bytes 200000
megatronish preprocess --input text.jsonl --output-prefix shards/one --tokenizer-type bytes --append-eod
megatronish preprocess --input text.jsonl --output-prefix shards/two --tokenizer-type bytes --append-eod
megatronish merge --input shards --output-prefix merged
megatronish pretrain --config quick --mock-data --train-iters 2 --eval-iters 1 --device cpu
megatronish pretrain --config quick --data-path merged --train-iters 2 --eval-iters 1 --run-dir run --dp 2 --device cpu
megatronish pretrain --config demo --mock-data --dp 1 --tp 1 --pp 1 --train-iters 2 --eval-iters 0 --device cpu
megatronish generate --load run --num-tokens 5 --device cpu
megatronish convert --from megatronish --to megatron --load run --save converted
megatronish verify --config demo --mock-data --dp 1 --tp 2 --pp 1 --steps 1 --num-layers 2 --device cpu
megatronish draw --stages 2 --microbatches 4
megatronish recipes --copy llama-3.1-8b/lora-1x24gb
"""


def main() -> int:
    """Build and try; the exit status."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megatronish-package-") as folder:
        work = Path(folder)
        sources = unpacked(build_sdist(work), into=work / "sources")
        refuse_missing(sources)
        wheel = build_wheel(sources, work)
        environment = new_environment(work / "environment")
        try_wheel(index_of(wheel, work / "index"), environment, empty=work / "empty")
        print("the tests of the sdist", flush=True)
        call(sys.executable, *FAST, *TESTS, folder=sources)
    print(f"packages: built, installed, used and removed in {time.monotonic() - start:.0f} s")
    return 0


def call(*words: object, folder: Path, quiet: bool = False) -> str:
    """Run a command; its output. Ends this program with that output if the command fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(word) for word in words]
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout or ''}\n{' '.join(command)} ended with status {done.returncode}")
    return done.stdout or ""


def build_sdist(work: Path) -> Path:
    """The sdist, built by setuptools itself from a copy of the repository: nothing is left behind in it."""
    copy = work / "copy"
    tracked = call("git", "ls-files", "-z", folder=ROOT, quiet=True).split("\0")
    for name in filter(None, tracked):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(work)!r}))"
    call(sys.executable, "-c", code, folder=copy, quiet=True)
    (found,) = work.glob("*.tar.gz")
    return found


def unpacked(sdist: Path, *, into: Path) -> Path:
    """The folder in the sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (folder,) = into.iterdir()
    return folder


def refuse_missing(sources: Path) -> None:
    """The sdist has every file of the repository."""
    tracked = call("git", "ls-files", "-z", folder=ROOT, quiet=True).split("\0")
    missing = [name for name in filter(None, tracked) if not (sources / name).is_file()]
    if missing:
        sys.exit(f"the sdist lacks {', '.join(missing)}; add them to MANIFEST.in")


def build_wheel(sources: Path, work: Path) -> Path:
    """The wheel that pip makes of the unpacked sdist."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", work, sources, folder=work, quiet=True)
    (found,) = work.glob("*.whl")
    return found


def index_of(wheel: Path, folder: Path) -> Path:
    """A private index with this wheel alone: a page for each package that links to its files (PEP 503)."""
    page = folder / "megatronish"
    page.mkdir(parents=True)
    wheel.rename(page / wheel.name)
    digest = hashlib.sha256((page / wheel.name).read_bytes()).hexdigest()
    (page / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}#sha256={digest}">{wheel.name}</a>\n')
    return folder


def new_environment(folder: Path) -> Path:
    """A fresh environment that sees the libraries of this interpreter, and not this checkout."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def try_wheel(index: Path, environment: Path, *, empty: Path) -> None:
    """Install the wheel of an index, use its commands in an empty folder, remove it, and see that nothing is left.

    The index has nothing else, so what the wheel needs must be in the environment, in versions that it takes.
    """
    empty.mkdir()
    programs, before = environment / "bin", files_of(environment)
    # The pip of this interpreter works for the other one, which needs none of its own.
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", programs / "python")
    (wheel,) = index.glob("megatronish/*.whl")
    call(*pip, "install", "--dry-run", "--no-index", wheel, folder=empty, quiet=True)
    # Among the libraries is this checkout's own entry: it is neither taken for the wheel nor removed.
    own = ("--no-deps", "--ignore-installed")
    call(*pip, "install", *own, "--index-url", index.as_uri(), "megatronish", folder=empty, quiet=True)
    for line in COMMANDS.split("\n"):
        program, *flags = line.split() or [""]
        if program:
            print(f"$ {line}", flush=True)
            call(programs / program, *flags, folder=empty, quiet=program != "megatronish" or "--help" in flags)
    call(*pip, "uninstall", "--yes", "megatronish", folder=empty, quiet=True)
    left = {path for path in files_of(environment) - before if "__pycache__" not in path.parts}
    if left:
        sys.exit(f"pip uninstall left {', '.join(map(str, sorted(left)))}")


def files_of(folder: Path) -> set[Path]:
    """All files in a folder."""
    return {path for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
