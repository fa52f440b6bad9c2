"""Section [plugins] of a config: plug-ins, modules of the user that are imported before the rest of a config is read.

A plug-in registers names (`megatronish/plugins.py`), which flags then take like any other. It is named by the dotted
name of a module or by the path of a .py file. The current working directory is importable, and so is the folder of such
a file. They come last on the path: a file of the user hides no installed module.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from megatronish.config.marks import ADDS_UP
from megatronish.core.errors import UserError

MARK = "__megatronish_plugin__"  # variable of a plug-in's modules: its name, as --plugin gives it


@dataclass(frozen=True)
class PluginsConfig:
    """Modules that extend what the other sections may name."""

    plugin: Annotated[tuple[str, ...], ADDS_UP] = ()
    """Modules (my.module or FILE.py) imported before the rest is read; they may register names. See docs/PLUGINS.md."""


def module_name(plugin: str) -> str:
    """Name of the module of a plug-in: of a file, its name without .py."""
    return Path(plugin).stem if plugin.endswith(".py") else plugin


def import_plugins(plugins: Iterable[str]) -> list[str]:
    """Import plug-ins that are not yet imported; a line for each that says where it was found.

    UserError for one that is not found, and for one that fails, with the file and the line of its own error.
    """
    return [f"plug-in {plugin}: {_import(plugin)}" for plugin in plugins]


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import(plugin: str) -> str:
    """Import a plug-in; returns the path of its file."""
    name, path = module_name(plugin), Path(os.path.realpath(plugin)) if plugin.endswith(".py") else None
    if path is None and not re.fullmatch(r"\w+(\.\w+)*", plugin):
        raise UserError(
            f"--plugin {plugin or repr(plugin)} is no module; write my.module, or the path of a file that ends in .py"
        )
    if path is not None and not path.is_file():
        raise UserError(f"--plugin {plugin} does not exist; correct the path")
    if path is not None and "." in name:
        raise UserError(f"--plugin {plugin} has a dot in its name, as no module has; rename the file")
    for folder in (Path.cwd(), *(() if path is None else (path.parent,))):
        _make_importable(folder)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script may end in sys.exit()
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"--plugin {plugin} is not found, neither in {Path.cwd()} nor among the installed modules; correct the "
                "name, or give the path of its .py file"
            ) from error
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(f"--plugin {plugin} cannot be imported: {_place(error, name)}: {what}") from error
    _mark(name, plugin)
    file = getattr(module, "__file__", None)
    if path is not None and (file is None or Path(file).resolve() != path):
        raise UserError(f"--plugin {plugin}: the name {name} is taken by {file or 'Python itself'}; rename the file")
    return file or f"package {name}"


def _mark(name: str, plugin: str) -> None:
    """Note in the modules of a plug-in what it is called, for the errors of its functions."""
    for module in [name, *(other for other in sys.modules if other.startswith(f"{name.partition('.')[0]}."))]:
        vars(sys.modules[module])[MARK] = plugin


@contextmanager
def naming_plugins() -> Iterator[None]:
    """Add to an error that a function of a plug-in raises a last line which names the plug-in, after the traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        sentence = _fault(error)
        if sentence is not None and sentence not in getattr(error, "__notes__", ()):
            error.add_note(sentence)
        raise


def _fault(error: Exception) -> str | None:
    """Sentence that names the plug-in whose function, or whose object, led to an error; None if there is none."""
    what = traceback.format_exception_only(error)[-1].strip()
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if MARK in frame.f_globals]
    if frames:
        frame, line = frames[-1]
        where = f"in {frame.f_code.co_name}, {frame.f_code.co_filename}:{line}"
        return f"plug-in {frame.f_globals[MARK]} failed {where}: {what}; correct the plug-in, or leave it out"
    owner = sys.modules.get(type(getattr(error, "obj", None)).__module__)  # of an attribute that is not there
    if owner is not None and MARK in vars(owner):
        return f"plug-in {vars(owner)[MARK]} failed: {what}; correct the plug-in, or leave it out"
    return None


def _place(error: BaseException, name: str) -> str:
    """File and line of an error: the last line of the plug-in's own package that was at work."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    top = name.partition(".")[0]
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [(file, line) for module, file, line in frames if module.partition(".")[0] == top]
    file, line = (own or [(file, line) for _, file, line in frames])[-1]
    return f"{file}:{line}"
