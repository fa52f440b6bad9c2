"""Table of all flags of Megatron-LM, and of its older forks, that are not fields here, and their look-up by name.

A flag of Megatron-LM either is a field with the same name and meaning, or stands in `KNOWN`: it *means* fields of other
names, or it is *idle* (accepted, because it changes no number of the run), or something more exact is done *instead*,
or it is *refused*, with a remedy. Values in `harmless` turn the others into an idle flag.
"""

from megatronish.compat.megatron_flags.families import FAMILY_FLAGS, Known, negation
from megatronish.compat.megatron_flags.model import EXPERTS, FUSION, MODEL, PRECISION, RECOMPUTE
from megatronish.compat.megatron_flags.parallel import COMMUNICATION, PIPELINE, SHARDING
from megatronish.compat.megatron_flags.records import CHECKPOINT, DATA, DEEPSPEED, LOG, TOKENIZER, TRAINER
from megatronish.compat.megatron_flags.training import LOOP, OPTIMIZER, RESILIENCE

KNOWN: dict[str, Known] = (
    MODEL
    | PRECISION
    | RECOMPUTE
    | FUSION
    | PIPELINE
    | COMMUNICATION
    | SHARDING
    | LOOP
    | OPTIMIZER
    | RESILIENCE
    | DATA
    | TOKENIZER
    | CHECKPOINT
    | LOG
    | DEEPSPEED
    | TRAINER
    | EXPERTS
    | FAMILY_FLAGS
)


def known_flag(name: str) -> Known | None:
    """What a flag that is no field is, by its name without dashes in front; None if it is unknown."""
    if name in KNOWN:
        return KNOWN[name]
    opposite = KNOWN.get(name.removeprefix("no-") if name.startswith("no-") else f"no-{name}")
    return negation(opposite) if opposite is not None else None
