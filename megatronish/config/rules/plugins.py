"""Rules on the options of names that plug-ins register."""

from collections.abc import Mapping

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import ConfigRule
from megatronish.core.errors import UserError
from megatronish.core.names import (
    BLOCK_NAMES,
    DATASET_NAMES,
    HOOK_NAMES,
    OBJECTIVE_NAMES,
    OPTIMIZER_NAMES,
    Choice,
    options_of_each,
)


def _options(field: str, table: Mapping[str, Choice]) -> ConfigRule:
    """The rule that the words of --FIELD-args are options of the name, or of the names, of --FIELD."""

    def complaint(config: Config) -> str | None:
        names, words = (getattr(getattr(config, FIELDS[name].section), name) for name in (field, arguments))
        try:
            options_of_each(table, [names] if isinstance(names, str) else names, words)
        except UserError as error:
            return f"{arguments}: {error}"
        return None

    arguments = f"{field.removesuffix('_type')}_args"
    return ConfigRule((field, arguments), complaint)


RULES = (
    _options("block", BLOCK_NAMES),
    _options("optimizer", OPTIMIZER_NAMES),
    _options("objective", OBJECTIVE_NAMES),
    _options("dataset_type", DATASET_NAMES),
    _options("hook", HOOK_NAMES),
)
