"""What follows a step in a dry run: all that hooks compute of an engine, called once on tensors without memory.

A mistake there ends a run where it has the most to lose: at its first save. None of it counts as part of the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megatronish.checkpoint.background import HostCopies
from megatronish.dry_run.recorder import StepRecorder
from megatronish.engine.checkpoint_state import num_not_finite, tensors_of
from megatronish.engine.engine import Engine
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis
from megatronish.report.statistics import num_zeros, params_norm
from megatronish.train.hooks.replicas import differences


def call_hooks(engine: Engine, recorder: StepRecorder) -> None:
    """What is compared between copies, looked through before a save, saved, copied for a thread, and logged."""
    computed: dict[str, Callable[[], object]] = {
        "replicas": lambda: differences(engine),
        "finite": lambda: num_not_finite(engine),
        "checkpoint": lambda: HostCopies().of(tensors_of(engine, with_optimizer=True)),
        "params norm": lambda: params_norm(engine),
        "zeros": lambda: num_zeros(engine),
    }
    with objects_alike():
        for name, compute in computed.items():
            recorder.begin_part(name)
            recorder.ledger.begin(name)
            compute()


@contextmanager
def objects_alike() -> Iterator[None]:
    """Meanwhile every rank has the objects that this one has: they are pickled, and bytes without memory are none."""

    def gathered(value: object, axis: Axis) -> list[object]:
        return [value] * axis.size

    with patch.object(comm, "all_gather_object", gathered):
        yield
