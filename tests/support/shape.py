"""Shape of the package in numbers, measured from its source and one traced step: `python -m tests.support.shape`.

What is measured, and how, so that two commits can be compared:

- files, lines: of megatronish/, without empty `__init__.py`.
- files with one importer in their folder: a single file of the package imports them, and it lies next to them. Leaves
  of a table are files that their importer only lists (`LEAF_TABLES`).
- files that a step crosses: whose functions run in the third step of configs/quick.toml, hooks and threads included.
  What a clock decides is left out, health.json once a second and goodput.json every five: else a busy machine has more.
- a walk of `config`: from `train.run.train`, along every call that is handed the whole `Config` under a name of its
  own, in the order of the text. Rooms are the files it enters; a climb is a move to a file of a higher row.
- comments: lines of a comment alone, per 1,000 lines, in the twenty files with the most branches.
"""

import ast
import contextlib
import io
import itertools
import math
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatronish"
NO_COST_MODELS = ("links", "room.py", "disk_room.py")
"""What of estimate/ is measured and not estimated."""
LEAF_TABLES = (
    "compat/megatron_flags/table.py",
    "formats/hf/families.py",
    "model/table.py",
    "objectives/table.py",
    "optim/optimizer.py",
    "parallel/schedules/table.py",
    "report/trackers/table.py",
    "tokenizer/build.py",
    "train/hooks/of_run.py",
)
"""Files that only list what they import, one subject a file: a leaf is what one copies to add another."""
LAYER_KINDS = ("ExpertsSpec", "AttentionSpec", "MlpSpec", "LayerSpec", "MLPSpec")
NUM_HARDEST = 20
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.BoolOp, ast.ExceptHandler, ast.comprehension, ast.match_case)


def module_of(path: Path) -> str:
    """Dotted name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {path: text for path in sorted(PACKAGE.rglob("*.py")) if (text := path.read_text()).strip()}
TREES = {path: ast.parse(text) for path, text in SOURCES.items()}
PATHS = {module_of(path): path for path in SOURCES}


def imported_names(path: Path) -> Iterator[tuple[str, Path, str]]:
    """(name here, file, name there) of what a file imports from others of the package; "" there is the file itself."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in PATHS:
                    yield alias.asname or alias.name, PATHS[inner], ""
                elif node.module in PATHS:
                    yield alias.asname or alias.name, PATHS[node.module], alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in PATHS:
                    yield alias.asname or alias.name, PATHS[alias.name], ""


def lonely_files() -> list[tuple[Path, Path]]:
    """Files with one importer, which lies in the same folder, and that importer."""
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path in SOURCES:
        for _, target, _ in imported_names(path):
            importers[target].add(path)
    pairs = [(path, next(iter(readers))) for path, readers in importers.items() if len(readers) == 1]
    return sorted((path, reader) for path, reader in pairs if path.parent == reader.parent and path != reader)


def rows() -> dict[str, int]:
    """Row of every part of the package, as tests/test_layering.py has them."""
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROWS":
            scope: dict[str, Any] = {}
            exec(compile(ast.Module([node], []), "rows", "exec"), scope)  # a literal of our own test
            return {part: number for number, row in enumerate(scope["ROWS"]) for part in row}
    raise AssertionError("tests/test_layering.py has no ROWS")


def part_of(path: Path, rows: dict[str, int]) -> str:
    """Part that a file belongs to: its folder, or the part of that which has a row of its own."""
    names = module_of(path).split(".")[1:]
    return next((part for n in (2, 1) if (part := ".".join(names[:n])) in rows), names[0])


class Walk:
    """The way of a `Config` through the calls that are handed the whole of it."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self._seen: set[tuple[Path, str]] = set()

    def follow(self, path: Path, function: str, parameter: str) -> None:
        """Enter a function (or Class.method) by one of its parameters, and every function that it is handed to."""
        if (path, function) in self._seen:
            return
        self._seen.add((path, function))
        self._enter(path)
        definition = _definition(path, function)
        if definition is None:
            return
        names = {name: (file, inner) for name, file, inner in imported_names(path)}
        for node in ast.walk(definition):
            if isinstance(node, ast.Call):
                self._call(node, path, parameter, names)

    def _call(self, node: ast.Call, path: Path, parameter: str, names: dict[str, tuple[Path, str]]) -> None:
        given = [number for number, word in enumerate(node.args) if ast.unparse(word) == parameter]
        named = [word.arg for word in node.keywords if word.arg and ast.unparse(word.value) == parameter]
        if not given and not named:
            return
        head, _, member = ast.unparse(node.func).partition(".")
        file, inner = names.get(head, (path, head))
        function = ".".join(part for part in (inner, member) if part)
        definition = _definition(file, function)
        if definition is None:
            return
        is_method = bool(definition.args.args) and definition.args.args[0].arg in ("self", "cls")
        arguments = [word.arg for word in definition.args.args][is_method:]
        self.follow(file, function, named[0] if named else arguments[min(given[0], len(arguments) - 1)])
        self._enter(path)

    def _enter(self, path: Path) -> None:
        if not self.files or self.files[-1] != path:
            self.files.append(path)

    def climbs(self) -> int:
        """Moves to a file of a higher row than the one before."""
        row = rows()
        numbers = [row[part_of(path, row)] for path in self.files]
        return sum(after > before for before, after in itertools.pairwise(numbers))


def _definition(path: Path, function: str) -> ast.FunctionDef | None:
    """The function, the method `Class.method`, or the constructor of a class."""
    body: list[ast.stmt] = TREES[path].body
    for part in function.split("."):
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == part:
                return node
            if isinstance(node, ast.ClassDef) and node.name == part:
                body = node.body
                break
        else:
            return None
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)


class Crossed(NamedTuple):
    """Files whose functions ran in a step, and the calls between two files."""

    files: set[str]
    hops: int


def crossed_files(step: int = 3) -> Crossed:
    """What a step of configs/quick.toml crosses, from the beginning of it to the beginning of the next."""
    from megatronish.config.read import read_config
    from megatronish.launch.place import Place
    from megatronish.train.hooks import goodput, health
    from megatronish.train.run import train
    from megatronish.train.trainer import Hook, StepRecord, Trainer

    health.FEWEST_SECONDS = goodput.WRITE_SECONDS = math.inf  # written in the first step alone
    files: set[str] = set()
    hops = 0
    prefix = f"{PACKAGE}/"

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal hops
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefix):
            files.add(name.removeprefix(prefix))
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else name
            hops += caller != name and caller.startswith(prefix)

    class Tracer(Hook):
        """A hook that traces from the end of one step to the end of the next, in all threads that begin later, too."""

        def after_step(self, trainer: Trainer, record: StepRecord) -> None:
            traced = watch if record.step == step - 1 else None
            threading.setprofile(traced)
            sys.setprofile(traced)

    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", str(ROOT / "configs/quick.toml"), "--mock-data", "--train-iters", str(step + 1)]
        words += ["--eval-iters", "0", "--device", "cpu", "--run-dir", folder]
        with contextlib.redirect_stdout(io.StringIO()):
            train(read_config(words).config, [], Place(), hooks=[Tracer()])
    return Crossed(files, hops)


def hardest_files() -> list[Path]:
    """The files with the most branches."""
    branches = {path: sum(isinstance(node, BRANCHES) for node in ast.walk(tree)) for path, tree in TREES.items()}
    return sorted(branches, key=lambda path: -branches[path])[:NUM_HARDEST]


def is_cost_model(path: Path) -> bool:
    """Whether a file estimates what a layout costs."""
    folder, *rest = path.relative_to(PACKAGE).parts
    return folder == "estimate" and rest[0] not in NO_COST_MODELS


def comment_lines(text: str) -> int:
    """Lines that are a comment and nothing else."""
    return sum(line.lstrip().startswith("#") for line in text.splitlines())


def main() -> None:
    """Print the table."""
    lines = sum(len(text.splitlines()) for text in SOURCES.values())
    lonely = lonely_files()
    leaves = [path for path, reader in lonely if reader.relative_to(PACKAGE).as_posix() in LEAF_TABLES]
    walk = Walk()
    walk.follow(PACKAGE / "train" / "run.py", "train", "config")
    crossed = crossed_files()
    costs = [text for path, text in SOURCES.items() if is_cost_model(path)]
    asked = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if any(kind in ast.unparse(node.args[1]) for kind in LAYER_KINDS)
    ]
    hardest = "".join(SOURCES[path] for path in hardest_files())
    shelf = {path.relative_to(PACKAGE).parts[0] for path in SOURCES} - {"__init__.py", "__main__.py"}
    table = {
        "files / lines of megatronish/": f"{len(SOURCES)} / {lines:,}",
        "files with one importer in their folder": f"{len(lonely)}, of which {len(leaves)} are leaves of tables",
        "files that a step of quick.toml crosses": f"{len(crossed.files)} ({crossed.hops} calls between files)",
        "rooms / climbs of a walk of `train:config`": f"{len(set(walk.files))} / {walk.climbs()}",
        "lines of cost and memory models": f"{sum(len(text.splitlines()) for text in costs):,}",
        "isinstance on kinds of layers": str(len(asked)),
        "names on the top shelf": str(len(shelf)),
        f"comment lines per 1,000 in the {NUM_HARDEST} hardest files": (
            f"{1000 * comment_lines(hardest) / len(hardest.splitlines()):.0f}"
        ),
    }
    for name, value in table.items():
        print(f"{name:56} {value}")


if __name__ == "__main__":
    main()
