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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatronish.engine.engine import Engine
from megatronish.engine.results import NotFiniteError
from megatronish.model.batch import MicroBatch
from megatronish.parallel.all_or_none import from_all
from megatronish.parallel.data_parallel.fully_sharded import held
from megatronish.parallel.pipeline.executor import Executor
from megatronish.parallel.schedules.plan import Action

KINDS = ("weight", "output", "gradient")
"""What is found, the surest first."""
OVERFLOW = (
    "every weight, output and gradient of a micro-batch is finite: a number was too large only in the "
    "sum of gradients or in their norm, or it was no number of the model, and memory or device are at fault"
)


class FirstOfKind(NamedTuple):
    """What a rank first met of a kind: `samples` are places in the micro-batch, of a tensor [s, B, ...]."""

    phrase: str
    samples: tuple[int, ...] = ()


class Origin(NamedTuple):
    """Where a number that is not finite begins: a phrase for the error, and the rank if it is known."""

    phrase: str
    rank: int | None


@dataclass
class Watch:
    """Watch of a rank's modules during a step: the first thing of each kind, once the action it fell in has ended."""

    micro_batches: Sequence[MicroBatch]
    told: dict[str, str] = field(default_factory=dict)
    last_finite: str = ""
    """The module whose output had a finite gradient last."""
    _found: dict[str, FirstOfKind] = field(default_factory=dict)

    def is_done(self, kind: str) -> bool:
        """Whether something of this kind was found."""
        return kind in self.told or kind in self._found

    def note(self, kind: str, phrase: str, tensor: Tensor) -> None:
        """Keep what was found, with the samples of a tensor [s, B, ...] that it is in."""
        batch = self.micro_batches[0].tokens.shape[0]
        has_samples = tensor.dim() >= 3 and tensor.shape[1] == batch
        bad = [i for i in range(batch) if not _is_finite(tensor[:, i])] if has_samples else []
        self._found[kind] = FirstOfKind(phrase, tuple(bad[:4]))

    def after_action(self, action: Action, _start: float, _end: float) -> None:
        """Say of what was found in which action it was."""
        for kind, (phrase, samples) in self._found.items():
            ids = [str(int(self.micro_batches[action.micro_batch].sample_ids[i])) for i in samples]
            named = f", sample{'s' if len(ids) > 1 else ''} {', '.join(ids)}" if ids else ""
            self.told[kind] = f"{phrase} in the {_NAMES[action.kind]} of micro-batch {action.micro_batch}{named}"
        self._found.clear()


_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def find_origin(engine: Engine, micro_batches: Sequence[MicroBatch], *, num_steps_done: int) -> Origin:
    """The rank and the module where it begins. Collective; every rank returns the same."""
    watch = Watch(micro_batches)
    for name, parameter in engine.stage.model.named_parameters():
        if not _is_finite(parameter.detach()):
            watch.told.setdefault("weight", f"the weight {name}")
    if isinstance(engine.executor, Executor):  # the actions of a replayed graph call no modules
        engine.observers.append(watch.after_action)
        with (
            watched(engine.stage.model, watch),
            torch.compiler.set_stance("force_eager"),
            suppress(NotFiniteError),
        ):
            # Rows of experts that are padding may have any values, and they are no origin.
            engine.gradients(micro_batches, num_steps_done=num_steps_done, pads=False)
        engine.observers.remove(watch.after_action)
    everybody = from_all(engine.mesh.world, lambda: watch.told)
    for kind in KINDS:
        ranks = [rank for rank, notes in enumerate(everybody) if kind in notes]
        if ranks:
            others = f" (and on {_ranks(ranks[1:])} too)" if len(ranks) > 1 else ""
            return Origin(f"it begins on rank {ranks[0]} with {everybody[ranks[0]][kind]}{others}", ranks[0])
    return Origin(OVERFLOW, None)


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
    outputs = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
    if not watch.is_done("output") and all(map(_is_finite, _tensors((args, kwargs)))):
        bad = next((tensor for tensor in outputs if not _is_finite(tensor)), None)
        if bad is not None:
            watch.note("output", f"the output of {name} ({type(module).__name__})", bad)
    for tensor in outputs:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(partial(_on_gradient, watch, name))


def _on_gradient(watch: Watch, name: str, gradient: Tensor) -> None:
    if watch.is_done("gradient"):
        return
    if _is_finite(gradient):
        watch.last_finite = name
        return
    after = f", where that of {watch.last_finite} was finite," if watch.last_finite else ""
    watch.note("gradient", f"the gradient of the output of {name}{after}", gradient)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _is_finite(tensor: Tensor) -> bool:
    local = held(tensor.detach())
    if not local.is_floating_point() or local.numel() == 0:
        return True
    low, high = torch.aminmax(local)  # NaN goes through both
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
