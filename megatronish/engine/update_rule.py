"""The update rule: what becomes of a gradient between its reduction and the optimizer."""

import math
from typing import NamedTuple

from megatronish.engine.results import NotFiniteError
from megatronish.optim.loss_scale import LossScale
from megatronish.optim.loss_spikes import LossSpikes


class UpdateRule(NamedTuple):
    """Loss scale, clipping, and the check for what is not finite."""

    loss_scale: LossScale
    clip_grad: float
    check_finite: bool
    spikes: LossSpikes

    def factor(self, grad_norm: float) -> float:
        """What the gradient is multiplied by: it takes the loss scale out, and shortens what is above `clip_grad`."""
        factor = 1.0 / self.loss_scale.scale
        if self.clip_grad > 0 and grad_norm > self.clip_grad:
            factor *= self.clip_grad / (grad_norm + 1e-6)
        return factor

    def skips(self, grad_norm: float, *, step: int) -> bool:
        """Whether a step is left out: its gradient overflowed in fp16, or is far longer than usual."""
        if not math.isfinite(grad_norm):
            return self.loss_scale.skips_overflow
        return self.spikes.skips(grad_norm, step=step)

    def refuse_not_finite(self, loss: float, grad_norm: float, *, step: int, origin: str | None = None) -> None:
        """NotFiniteError, unless a smaller loss scale may help: then the step is left out and the run continues.

        `origin` says where the first number was that was not finite, if that is known.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_finite or not self.check_finite or self.loss_scale.can_shrink:
            return
        scale = self.loss_scale.scale
        too_large = f"; the loss scale of {scale} may be too large for fp16, too" if scale > 1 else ""
        found = f": {origin}" if origin else ""
        raise NotFiniteError(
            f"loss={loss} and grad_norm={grad_norm} in step {step} must be finite{found}; the parameters are as they "
            f"were before this step. Lower --lr, lengthen the warm-up, or look at the data of this step{too_large}"
        )
