"""The flag --plugin of the commands that load what a plug-in registers."""

from typing import Annotated

import tyro

PluginNames = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
"""Plug-ins to import, which runs their code: modules (my.module) or files (FILE.py). See docs/PLUGINS.md."""
