"""Public API of megatronish: the names that `__init__.pyi` imports, each loaded when it is first used.

docs/API.md describes them. `import megatronish` is quick, because it loads neither torch nor any other library. Names
that are not in the list are internal and may change.
"""

import sys

# Before any module is read whose syntax an older Python does not know: a checkout can be started with any.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.stderr.write("megatronish needs Python 3.11 or newer, and this is %s: " % sys.version.split()[0])  # noqa: UP031
    sys.stderr.write("make venv PYTHON=python3.12 makes an environment with another one\n")
    raise SystemExit(2)

import ast
import functools
import importlib
import pkgutil
from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """A public name, at its first use; the module then keeps it."""
    if name == "__all__":
        return sorted(_modules())
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_modules()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})


@functools.cache
def _modules() -> dict[str, str]:
    """{public name: the module that has it}, from the stub, which type checkers and editors read too."""
    stub = pkgutil.get_data(__name__, "__init__.pyi")
    assert stub is not None
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports if node.module for alias in node.names}
