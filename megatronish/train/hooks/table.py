"""The table of hooks that plug-ins register, by the names of --hook."""

from collections.abc import Callable

from megatronish.config.sections.run import LogConfig
from megatronish.core.names import HOOK_NAMES, options_of_each
from megatronish.train.trainer import Hook

HOOKS: dict[str, Callable[..., Hook]] = {}
"""Makers of hooks: called on every rank with the `TrainingJob`, and with the options of the name in `HOOK_NAMES`."""


def hooks_of(log: LogConfig, job: object) -> list[Hook]:
    """The hooks that a config names, in its order. One without a name of its own keeps its state under that name."""
    found = []
    for name, options in options_of_each(HOOK_NAMES, log.hook, log.hook_args).items():
        hook = HOOKS[name](job, **options)
        hook.name = hook.name or name
        found.append(hook)
    return found
