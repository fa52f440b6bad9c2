"""Plug-ins in tests: the examples of the cookbook, and a way to forget in this process what a plug-in registered."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paths import ROOT

from megatronish.core.names import BLOCK_NAMES, DATASET_NAMES, HOOK_NAMES, OBJECTIVE_NAMES, OPTIMIZER_NAMES
from megatronish.data.datasets import DATASETS
from megatronish.formats.hf.families import FAMILIES
from megatronish.model.block import BLOCKS
from megatronish.objectives.table import OBJECTIVES
from megatronish.optim.optimizer import OPTIMIZERS
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.specs.layers import LAYERS
from megatronish.tokenizer.build import TOKENIZERS
from megatronish.tokenizer.names import TOKENIZER_NAMES
from megatronish.train.trainer import HOOKS

EXAMPLES = ROOT / "examples" / "plugins"

TABLES: tuple[tuple[dict[str, Any], ...], ...] = (
    (BLOCK_NAMES, BLOCKS, LAYERS),
    (OPTIMIZER_NAMES, OPTIMIZERS),
    (OBJECTIVE_NAMES, OBJECTIVES),
    (DATASET_NAMES, DATASETS),
    (HOOK_NAMES, HOOKS),
    (TOKENIZER_NAMES, TOKENIZERS),
    (SCHEDULES,),
    (FAMILIES,),
)
"""The tables of each kind: they have the same names."""


def plug(*names: str) -> str:
    """Flags that name examples of the cookbook."""
    return " ".join(f"--plugin {EXAMPLES / name}.py" for name in names)


@contextmanager
def forgotten() -> Iterator[None]:
    """Afterwards the tables are what they were, and the modules of plug-ins can be imported anew."""
    tables = [(table, dict(table)) for kind in TABLES for table in kind]
    modules, path = set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        for name in sys.modules.keys() - modules:
            if _is_foreign(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
        sys.path[:] = path


def _is_foreign(file: str | None) -> bool:
    """Whether a module is neither ours nor installed."""
    if file is None:
        return False
    path = Path(file)
    own = [ROOT / "megatronish", ROOT / "tools", ROOT / "tests", Path(sys.prefix), Path(sys.base_prefix)]
    return not any(path.is_relative_to(folder) for folder in own)
