"""Check of the first step: a gradient has arrived at every parameter that learns.

A layer that is cut out of autograd, for example by a block that detaches its input, would keep its initial values for
the whole run, and no loss would show it. A gradient that is zero has arrived: that of LoRA's A is zero in the first
step, for B is. Autograd reports what arrives by hooks, which are removed after the step.
"""

from collections.abc import Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatronish.core.errors import RunError
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.mesh import Axis

NAMED = 3
"""Parameters that the error names."""


class GradientArrivals:
    """Learning parameters of this rank at which no gradient has arrived yet, until they are checked for once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._missing = {name: None for name, parameter in parameters.items() if parameter.requires_grad}
        self._hooks: list[RemovableHandle] | None = [
            parameters[name].register_post_accumulate_grad_hook(_Arrived(self._missing, name)) for name in self._missing
        ]

    def check(self, axis: Axis) -> None:
        """RunError on all ranks of the axis, the first time, if a parameter of one of them has had no gradient."""
        if self._hooks is not None:
            for hook in self._hooks:
                hook.remove()
            self._hooks = None
            all_or_none(axis, self._refuse_missing)

    def _refuse_missing(self) -> None:
        if not self._missing:
            return
        first, number = ", ".join(list(self._missing)[:NAMED]), len(self._missing)
        more = f" and {number - NAMED} more parameters" if number > NAMED else ""
        raise RunError(
            f"no gradient has reached {first}{more} in the first step, so they would never learn; look for a detach(), "
            "a no_grad() or an unused module on the way from them to the loss, or freeze them (requires_grad=False)"
        )


class _Arrived:
    """Hook that crosses a name off. It holds no parameter, so that nothing keeps a model alive."""

    def __init__(self, missing: dict[str, None], name: str) -> None:
        self.missing, self.name = missing, name

    def __call__(self, _parameter: nn.Parameter) -> None:
        self.missing.pop(self.name, None)
