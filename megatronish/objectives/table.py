"""The table of objectives, by name."""

from collections.abc import Callable

from megatronish.objectives.causal_lm import CausalLM
from megatronish.objectives.objective import Objective

OBJECTIVES: dict[str, Callable[[], Objective]] = {"causal_lm": CausalLM}
