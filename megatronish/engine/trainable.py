"""Choice of the parameters that learn; the others are frozen."""

from collections.abc import Callable

from megatronish.model.adapters import is_adapter
from megatronish.parallel.pipeline.stage import ModelStage
from megatronish.parallel.sharding import Sharding

Trainable = Callable[[str, Sharding], bool]
"""Whether a parameter learns, by its name and what it is."""


def everything(_name: str, _sharding: Sharding) -> bool:
    """Choice of an engine that trains the whole model."""
    return True


def adapters_alone(name: str, _sharding: Sharding) -> bool:
    """Choice of an engine with adapters: the model itself is frozen."""
    return is_adapter(name)


def nothing(_name: str, _sharding: Sharding) -> bool:
    """Choice of an engine that only evaluates: neither gradients nor masters nor optimizer states."""
    return False


def freeze(stage: ModelStage, trainable: Trainable) -> dict[str, Sharding]:
    """Take what is not trainable out of autograd; the shardings of what is left to learn.

    A module may have frozen parameters of its own at construction: they stay frozen.
    """
    learning = {}
    for name, parameter in stage.model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and trainable(name, stage.shardings[name]))
        if parameter.requires_grad:
            learning[name] = stage.shardings[name]
    return learning
