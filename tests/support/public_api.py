"""Text of the public API: every public name with its parameters, for tests/golden/public_api.txt.

After a change on purpose: `python tests/support/public_api.py > tests/golden/public_api.txt`.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import megatronish

MODULES = {
    "megatronish": megatronish.__all__,
    "megatronish.parallel.comm": None,
    "megatronish.launch.local": ["launch"],
    "megatronish.specs.layers": ["layer_specs"],
}
"""{module: its public names}; None is every public function that it defines."""
SIMPLE = (int, float, str, bool, type(None))


def public_api() -> str:
    """A line for each name: functions, classes, methods and properties of classes, and tables."""
    lines = [line for module, names in MODULES.items() for line in _of_module(module, names)]
    return "\n".join([*lines, ""])


def _of_module(name: str, names: list[str] | None) -> Iterator[str]:
    module = importlib.import_module(name)
    if names is None:
        functions = inspect.getmembers(module, inspect.isfunction)
        names = [each for each, value in functions if value.__module__ == name and not each.startswith("_")]
    for each in sorted(names):
        yield from _of_value(f"{name}.{each}", getattr(module, each))


def _of_value(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield from _of_class(name, value)
    elif callable(value):
        yield name + parameters(value)
    else:
        yield f"{name}: {type(value).__name__}"


def _of_class(name: str, value: type) -> Iterator[str]:
    if value.__name__.endswith("Config"):
        yield f"{name}: its fields are the flags of tests/golden/flags.txt"
        return
    is_called = not issubclass(value, Exception) and not getattr(value, "_is_protocol", False)
    yield name + parameters(value) if is_called else name
    for each, member in sorted(vars(value).items()):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if each.startswith("_"):
            continue
        if inspect.isfunction(function):
            yield f"{name}.{each}{parameters(function)}"
        elif isinstance(member, property):
            yield f"{name}.{each}"


def parameters(value: Any) -> str:
    """`(a, *, b=1)`: names, kinds and simple defaults; types are the type checker's to compare."""
    signature = inspect.signature(value)
    changed = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=each.default if each.default is each.empty or isinstance(each.default, SIMPLE) else _Something(),
        )
        for each in signature.parameters.values()
        if each.name != "self" and each.name != "cls"
    ]
    return str(inspect.Signature(changed))


class _Something:
    """A default that is not shown: its text may have an address in it."""

    def __repr__(self) -> str:
        return "..."


if __name__ == "__main__":
    print(public_api(), end="")
