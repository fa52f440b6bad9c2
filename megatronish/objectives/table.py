"""The table of objectives, by the names of --objective."""

from collections.abc import Callable

from megatronish.config.names import OBJECTIVE_NAMES, options_of
from megatronish.config.training import TrainingConfig
from megatronish.objectives.causal_lm import CausalLM
from megatronish.objectives.objective import LogitsObjective, Objective

OBJECTIVES: dict[str, Callable[..., Objective | LogitsObjective]] = {"causal_lm": CausalLM}
"""Makers of objectives; their keyword arguments are the options of the name in `OBJECTIVE_NAMES`."""


def objective_of(training: TrainingConfig) -> Objective | LogitsObjective:
    """The objective that a config names."""
    return OBJECTIVES[training.objective](**options_of(OBJECTIVE_NAMES, training.objective, training.objective_args))
