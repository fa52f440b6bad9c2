"""Origin of a number that is not finite: the failed step is computed once more, with every module watched.

After a `NotFiniteError` the parameters are as they were before the step, and data, dropout and order follow from names:
computed again, the step makes the same numbers. Looked for, in this order:

1. a weight that is not finite already;
2. a module whose output is not finite although its inputs and weights are;
3. a gradient that is not finite on its way back, where that of the module after it was.

Ranks look before gradients are summed, for afterwards all replicas hold what one of them made. It costs nothing until
it is needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from megatronish.checkpoint.all_or_none import from_all
from megatronish.model.batch import MicroBatch
from megatronish.pipeline.executor import Executor
from megatronish.schedule.plan import Action
from megatronish.train.engine import Engine

KINDS = ("weight", "output", "gradient")
"""What is found, the surest first."""
OVERFLOW = (
    "every weight, output and gradient of a micro-batch is finite: a number was too large only in the "
    "sum of gradients or in their norm, or it was no number of the model, and memory or device are at fault"
)


class Found(NamedTuple):
    """Where a rank first met a number that is not finite."""

    kind: str
    phrase: str


@dataclass
class Watch:
    """Watch of a rank's modules during a step; `found` is the first thing of each kind."""

    found: dict[str, Found] = field(default_factory=dict)
    action: Action | None = None
    batch: MicroBatch | None = None
    last_finite: str = ""
    """The module whose output had a finite gradient last."""

    def note(self, kind: str, phrase: str) -> None:
        """Keep the first of its kind."""
        self.found.setdefault(kind, Found(kind, phrase))

    def where(self, tensor: Tensor) -> str:
        """The micro-batch at work and, of a tensor [s, B, ...], the samples."""
        assert self.action is not None
        place = f"in the {_NAMES[self.action.kind]} of micro-batch {self.action.micro_batch}"
        batch = self.batch
        if batch is None or tensor.dim() < 3 or tensor.shape[1] != len(batch.tokens):
            return place
        bad = [i for i in range(tensor.shape[1]) if not _is_finite(tensor[:, i])]
        samples = ", ".join(str(int(batch.sample_ids[i])) for i in bad[:4])
        return f"{place}, sample{'s' if len(bad) > 1 else ''} {samples}" if bad else place


_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def find_origin(engine: Engine, micro_batches: Sequence[MicroBatch], *, num_steps_done: int) -> str:
    """One sentence: the rank and the module where it begins. Collective; every rank returns the same."""
    watch = Watch()
    for name, parameter in engine.stage.model.named_parameters():
        if not _is_finite(parameter.detach()):
            watch.note("weight", f"the weight {name}")
    if isinstance(engine.executor, Executor):
        with watched(engine.stage.model, watch), torch.compiler.set_stance("force_eager"):
            engine.compute_again(micro_batches, num_steps_done=num_steps_done, begin_action=partial(_begin, watch))
    everybody = from_all(engine.mesh.world, lambda: watch.found)
    for kind in KINDS:
        ranks = [rank for rank, found in enumerate(everybody) if kind in found]
        if ranks:
            others = f" (and on {_ranks(ranks[1:])} too)" if len(ranks) > 1 else ""
            return f"it begins on rank {ranks[0]} with {everybody[ranks[0]][kind].phrase}{others}"
    return OVERFLOW


def _begin(watch: Watch, action: Action, batch: MicroBatch) -> None:
    watch.action, watch.batch = action, batch


@contextmanager
def watched(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Have every module report to the watch meanwhile."""
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(partial(_after_forward, watch, name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _after_forward(watch: Watch, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    outputs = [each for each in _tensors(output) if each.is_floating_point()]
    if all(map(_is_finite, _tensors((args, kwargs)))):
        for each in outputs:
            if not _is_finite(each) and "output" not in watch.found:
                watch.note("output", f"the output of {name} ({type(module).__name__}) {watch.where(each)}")
    for each in outputs:
        if each.requires_grad and not each.is_leaf:
            each.register_hook(partial(_on_gradient, watch, name))


def _on_gradient(watch: Watch, name: str, gradient: Tensor) -> None:
    if "gradient" in watch.found:
        return
    if _is_finite(gradient):
        watch.last_finite = name
        return
    after = f", where that of {watch.last_finite} was finite" if watch.last_finite else ""
    watch.note("gradient", f"the gradient of the output of {name}{after}, {watch.where(gradient)}")


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for each in values:
            yield from _tensors(each)


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.is_floating_point() or local.numel() == 0:
        return True
    low, high = torch.aminmax(local.detach())  # NaN goes through both
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
