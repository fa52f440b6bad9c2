"""The table of objectives, by the names of --objective."""

from collections.abc import Callable

from megatronish.config.config import Config
from megatronish.config.fields import read_fields
from megatronish.core.names import OBJECTIVE_NAMES, options_of
from megatronish.objectives.masked import masked_objective
from megatronish.objectives.objective import CausalLM
from megatronish.objectives.pairs import AnyObjective
from megatronish.objectives.preference import CPO, DPO, IPO, KTO, ORPO, SimPO

OBJECTIVES: dict[str, Callable[..., AnyObjective]] = {
    "causal_lm": CausalLM,
    "masked_lm": masked_objective,
    "dpo": DPO,
    "ipo": IPO,
    "simpo": SimPO,
    "cpo": CPO,
    "orpo": ORPO,
    "kto": KTO,
}
"""Makers of objectives; keyword arguments are the options of the name in `OBJECTIVE_NAMES`, and the fields it reads."""


def objective_of(config: Config) -> AnyObjective:
    """The objective that a config names."""
    name = config.training.objective
    fields = read_fields(config)
    numbers = {field: fields[field] for field in OBJECTIVE_NAMES[name].reads}
    return OBJECTIVES[name](**options_of(OBJECTIVE_NAMES, name, config.training.objective_args), **numbers)
