"""torch.compile as every part of this package calls it: with a folder of graphs that is this user's alone.

torch's compiler keeps the libraries that it makes in the temporary directory, in a folder with the user's name, and
loads what it finds there. Another user of the machine may have made that folder before.
"""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from megatronish.core.private import cache_folder, private_folder

CACHE, HEADERS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def compile_function(function: Callable[..., Any], *, most_graphs: int, **options: Any) -> Callable[..., Any]:
    """The function, compiled at its first calls, into at most so many graphs; `options` are those of torch.compile."""
    keep_graphs_private()
    compiled = torch.compile(function, **options)  # which imports the compiler: a run without it does not wait for that
    settings = torch._dynamo.config  # of the process: not every version of torch takes this limit with the function
    settings.recompile_limit = max(settings.recompile_limit, most_graphs)
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, 2 * most_graphs)
    return compiled


def keep_graphs_private() -> None:
    """Let the compiler use its own folder only if this user made it, else one of the user's cache.

    A folder that the user names in the environment is the user's choice. But the import of the compiler names its own
    folder there, too; and headers that it compiles lie in its own folder in any case.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = os.path.abspath(default_cache_dir())
    try:
        private_folder(Path(folder))
    except OSError:
        os.environ[HEADERS], config.cpp_cache_precompile_headers = "0", False
        if os.environ.get(CACHE, folder) == folder:
            os.environ[CACHE] = _other_folder()


def _other_folder() -> str:
    try:
        return str(private_folder(cache_folder() / "torchinductor"))
    except OSError:
        return mkdtemp(prefix="torchinductor_")
