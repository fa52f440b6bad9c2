"""Tests of the layering: which package may import which, read from the source without running it."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from paths import ROOT

PACKAGE = ROOT / "megatronish"

# A part is a folder or a file of megatronish/, or of a folder whose parts stand in different rows. It may import itself
# and the rows above its own. Parts that are files may import each other within a row.
ROWS = (
    ("core",),
    ("tokenizer.names", "tokenizer.settings"),
    ("compat.megatron_flags",),
    ("parallel.schedules",),
    ("config",),
    ("compat.importers", "launch"),
    ("watch",),
    ("parallel.mesh",),
    (
        "parallel.all_or_none",
        "parallel.block_codes",
        "parallel.bucketing",
        "parallel.comm",
        "parallel.deep_ep",
        "parallel.disk",
        "parallel.pinned",
        "parallel.ranges",
        "parallel.sharding",
        "parallel.streams",
        "parallel.symmetric",
        "specs",
    ),
    ("parallel.stages",),
    (
        "tokenizer.build",
        "tokenizer.control_tokens",
        "tokenizer.faster",
        "tokenizer.hugging_face",
        "tokenizer.plain",
        "tokenizer.sentence_piece",
        "tokenizer.tiktoken_file",
        "tokenizer.tokenizer",
        "tokenizer.trial",
    ),
    ("ops", "estimate.costs"),
    ("layers", "attention"),
    ("model",),
    ("objectives",),
    ("optim",),
    ("parallel.pipeline", "parallel.data_parallel", "data"),
    ("checkpoint", "estimate.planner"),
    ("estimate.links", "estimate.disk_room"),
    ("estimate.room",),
    ("formats",),
    ("engine",),
    ("report",),
    ("train",),
    ("inference", "plugins", "dry_run", "verify"),
    ("commands",),
    ("__main__",),
)
ROW_OF = {part: number for number, row in enumerate(ROWS) for part in row}
SPLIT = {f"megatronish.{part.partition('.')[0]}" for part in ROW_OF if "." in part}

# The only places that may use torch.distributed: groups are made in one, collectives called in one; what libraries of
# torch send is theirs.
MAY_USE_TORCH_DISTRIBUTED = (
    "parallel/mesh.py",
    "parallel/comm.py",
    "launch/",
    "checkpoint/",
    "estimate/links/",
    "parallel/data_parallel/fully_sharded.py",
    "parallel/data_parallel/units.py",
    "dry_run/",
)

# What answers before torch is imported, so that --help, --dry-run errors and planning are instant.
WITHOUT_TORCH = (
    "config/*.py",
    "config/sections/*.py",
    "compat/importers/*.py",
    "compat/megatron_flags/*.py",
    "config/rules/*.py",
    "formats/start.py",
    "formats/hf/[!t]*.py",
    "core/[!f]*.py",
    "core/f[!i]*.py",
    "core/files.py",
    "parallel/schedules/*[!g].py",
    "optim/schedules.py",
    "optim/loss_scale.py",
    "specs/*.py",
    "parallel/bucketing.py",
    "estimate/costs/*.py",
    "estimate/links/definitions.py",
    "estimate/links/fit.py",
    "estimate/links/settings.py",
    "watch/*.py",
    "estimate/planner/*.py",
    "tokenizer/names.py",
    "tokenizer/settings.py",
    "__init__.py",
    "__main__.py",
    "commands/*.py",
)
RUNS_A_MODEL = {"chat", "evaluate", "generate", "language_model", "model_loading", "perplexity", "probing", "serve"}
"""Modules of commands/ that import torch: they are imported once the flags are read."""
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


FRAGMENT = 80
"""Lines below which a file that a single other one of its folder imports belongs into that."""
LEAVES = {
    "formats/hf/families.py": "a family of models is one file, or a part of that of its ancestors",
    "objectives/table.py": "objectives of one kind are one file",
    "optim/optimizer.py": "the optimizers of torch and apex are one file, any other is one",
    "parallel/schedules/table.py": "schedules with a split backward are one file, the others another",
    "tokenizer/build.py": "a kind of tokenizer is one file",
    "report/trackers/table.py": "a tracker is one file, whose library is imported only where it is used",
    "train/hooks/of_run.py": "a hook is one file",
    "model/attention.py": "a way of context parallelism is one file",
}
"""Tables of which each leaf is a file, however short: what one copies to add another."""
APART = {
    "estimate/links/draw_png.py": "matplotlib is imported where a picture is drawn",
    "commands/dry_run.py": "its flags and errors wait for no torch",
}
"""Short files with one reader that stay apart, and why."""


class Import(NamedTuple):
    """A line that imports, or uses, a module."""

    path: Path
    line: int
    module: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def module_of(path: Path) -> str:
    """Name of a module by its path: megatronish/parallel/schedules/plan.py -> megatronish.parallel.schedules.plan."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """megatronish.core.files -> core, megatronish.parallel.comm -> parallel.comm; None for what is not ours."""
    package, *names = module.split(".")
    if package != "megatronish" or not names or module in SPLIT:
        return None
    return next((part for n in (2, 1) if (part := ".".join(names[:n])) in ROW_OF), names[0])


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_of(path) for path in FILES}


def imports_of(path: Path, source: str) -> Iterator[Import]:
    """Every module that a file imports anywhere, in functions too; also `torch.distributed` where only used."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_of(path).split(".") if path.name == "__init__.py" else module_of(path).split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield Import(path, node.lineno, inner if inner in {*MODULES, "torch.distributed"} else module)
        elif (
            isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node) == "torch.distributed"
        ):
            yield Import(path, node.lineno, "torch.distributed")


@cache
def all_imports() -> list[Import]:
    """Those of all files."""
    return [found for path in FILES for found in imports_of(path, path.read_text())]


def test_every_way_to_import_is_seen() -> None:
    source = """
from ...config.sections.model import ModelConfig
from . import plan
from megatronish.parallel import comm
def f():
    import torch
    from megatronish.train.trainer import train
    torch.distributed.barrier()
"""
    found = [(each.line, each.module) for each in imports_of(PACKAGE / "parallel/schedules/made_up.py", source)]
    assert sorted(found) == [
        (2, "megatronish.config.sections.model"),
        (3, "megatronish.parallel.schedules.plan"),
        (4, "megatronish.parallel.comm"),
        (6, "torch"),
        (7, "megatronish.train.trainer"),
        (8, "torch.distributed"),
    ]


def test_every_part_of_the_package_has_a_row() -> None:
    missing = {part for module in MODULES if (part := part_of(module)) and part not in ROW_OF}
    assert not missing, f"{missing} stand in no row of ROWS: say whom they may import"


def test_the_readme_names_every_folder() -> None:
    section = (ROOT / "README.md").read_text().partition("## The code\n")[2].partition("\n## ")[0]
    words = set(re.findall(r"\w+", section))
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert folders <= words, f"the README has no line for {folders - words}"


@pytest.mark.long
def test_imports_go_down_the_layers() -> None:
    breaks = []
    for found in all_imports():
        source, target = part_of(module_of(found.path)), part_of(found.module)
        if source is None or target is None or source == target or target not in ROW_OF:
            continue
        files = all((PACKAGE / f"{part.replace('.', '/')}.py").exists() for part in (source, target))
        if ROW_OF[target] > ROW_OF[source] or (ROW_OF[target] == ROW_OF[source] and not files):
            breaks.append(f"{found.where}: {source} must not import {target}")
    assert not breaks, "\n".join(breaks)


def test_no_module_imports_itself_round_a_corner() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in all_imports():
        if found.module in MODULES:
            graph[module_of(found.path)].add(found.module)
    # Modules without what they import, layer after layer: what is never free stands on a cycle, or above one.
    left = dict(graph)
    while free := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in free}
    assert not left, f"a cycle of imports among {sorted(left)}"


def test_files_hold_together() -> None:
    importers: dict[str, set[Path]] = {}
    for found in all_imports():
        importers.setdefault(found.module, set()).add(found.path)
    fragments = []
    for path in FILES:
        readers = importers.get(module_of(path), set()) - {path}
        length, name = len(path.read_text().splitlines()), path.relative_to(PACKAGE).as_posix()
        if 0 < length < FRAGMENT and len(readers) == 1 and name not in APART:
            (reader,) = readers
            if reader.parent == path.parent and reader.relative_to(PACKAGE).as_posix() not in LEAVES:
                fragments.append(f"{name} ({length} lines) belongs into {reader.name}")
    assert not fragments, "\n".join(fragments)


def test_torch_distributed_stays_where_it_belongs() -> None:
    breaks = [
        f"{found.where}: {found.module}; go through comm.py"
        for found in all_imports()
        if found.module.startswith("torch.distributed")
        and not str(found.path.relative_to(PACKAGE)).startswith(MAY_USE_TORCH_DISTRIBUTED)
    ]
    assert not breaks, "\n".join(breaks)


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [path for path in FILES if path.stem in SHAPELESS_NAMES or path.parent.name in SHAPELESS_NAMES]


def test_package_files_are_empty_but_for_that_of_the_public_api() -> None:
    files = [path for path in FILES if path.name == "__init__.py" and path != PACKAGE / "__init__.py"]
    assert not [path for path in files if path.read_text().strip()]


IMPORTED = """
import importlib, json, sys

for pattern, modules in json.loads(sys.argv[1]).items():
    for name in modules:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{pattern}: {modules} import torch")
for name in sys.argv[2:]:
    importlib.import_module(name)
if "matplotlib" in sys.modules:
    sys.exit("commands import matplotlib")
"""


def test_planning_needs_no_torch_and_no_command_the_library_of_pictures() -> None:
    """The latter takes a second to import, and what draws can do without it."""
    without_torch = {}
    for pattern in WITHOUT_TORCH:
        fit = [p for p in PACKAGE.glob(pattern) if p.parent.name != "commands" or p.stem not in RUNS_A_MODEL]
        assert fit, f"no file fits {pattern}"
        without_torch[pattern] = sorted(map(module_of, fit))
    commands = sorted(module_of(path) for path in (PACKAGE / "commands").glob("[a-z]*.py"))
    argv = [sys.executable, "-c", IMPORTED, json.dumps(without_torch), *commands]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
