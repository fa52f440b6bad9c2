"""The table of models, by the names of --model-type."""

from megatronish.model.bert import Bert
from megatronish.model.gpt import GPT
from megatronish.model.t5 import T5

MODELS: dict[str, type[GPT]] = {"gpt": GPT, "bert": Bert, "t5": T5}
"""Models that share the layers and their execution; `ENDS` of specs/ends.py has what is outside of their layers."""
