"""Rules on the recomputation of activations."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import ConfigRule

_FULL_ONLY = (
    "recompute_method",
    "recompute_num_layers",
    "distribute_saved_activations",
    "offload_saved_activations",
)


def _recompute(config: Config) -> str | None:
    recompute, parallel = config.recompute, config.parallel
    granularity, setting = recompute.recompute_granularity, f"recompute_granularity={recompute.recompute_granularity}"
    if granularity != "full":
        for name in _FULL_ONLY:
            if (value := getattr(recompute, name)) != FIELDS[name].default:
                return (
                    f"{name}={str(value).lower()} belongs to full recomputation, not to {setting.lower()}; "
                    f"add --recompute-granularity full, or leave {FIELDS[name].flag} out"
                )
    if recompute.distribute_saved_activations:
        rule = "distribute_saved_activations shares them over tensor_model_parallel_size"
        if parallel.tensor_model_parallel_size == 1:
            return f"{rule}, which is 1; add --tp 2, or leave it out"
        if parallel.sequence_parallel:
            return f"{rule}, which --sequence-parallel does already; leave one of them out"
    return None


RULES = (
    ConfigRule(("recompute_granularity", *_FULL_ONLY, "tensor_model_parallel_size", "sequence_parallel"), _recompute),
)
