"""What follows a step in a run, and takes as long as a step: an evaluation, a second step, the origin of NaN."""

from collections.abc import Sequence

import torch

from megatronish.dry_run.rank import call_hooks, objects_alike, take_step
from megatronish.dry_run.recorder import StepRecorder
from megatronish.engine.engine import Engine
from megatronish.engine.nan_origin import find_origin
from megatronish.model.batch import MicroBatch
from megatronish.parallel import comm
from megatronish.parallel.pipeline.cuda_graph import ReplayingExecutor
from megatronish.train.checkpoint_state import tensors_of
from megatronish.train.hooks.replicas import _hash, copies_of


def all_that_follows(engine: Engine, batches: Sequence[MicroBatch], recorder: StepRecorder) -> None:
    """As of a run with every hook, on as few micro-batches as the schedule takes."""
    mesh, replays = engine.mesh, isinstance(engine.executor, ReplayingExecutor)
    if replays:
        engine.executor.record = lambda work: work  # it is captured from the second step on
    few = batches[: mesh.pp.size if engine.stage.stages.num_chunks > 1 else 2 if replays else 1]
    recorder.begin_part("evaluation")
    engine.evaluate(few)
    take_step(engine, few, recorder)
    call_hooks(engine, recorder)
    recorder.begin_part("origin")
    with objects_alike():
        find_origin(engine, few, num_steps_done=2)


def planted(engine: Engine, batches: Sequence[MicroBatch], _recorder: StepRecorder) -> dict[str, str]:
    """What is said of mistakes that were in the code once, or could be: masters are on the CPU, all else on a GPU."""

    def look_through_all() -> None:
        own = [each.local for each in tensors_of(engine, with_optimizer=False).values() if each.local.numel()]
        torch.stack([torch.stack(torch.aminmax(each)) for each in own])

    def hash_where_it_lies() -> None:
        for axis, tensors in copies_of(engine):
            if axis.size > 1 and tensors:
                torch.stack([_hash(each) for each in tensors.values()])

    def add_on_the_host() -> None:
        comm.all_reduce(torch.zeros(()), engine.mesh.tp)

    def add_a_number_in_place() -> None:
        torch.zeros(()).add_(torch.zeros((), device=engine.mesh.device))

    said = {}
    for mistake in (look_through_all, hash_where_it_lies, add_on_the_host, add_a_number_in_place):
        try:
            mistake()
        except RuntimeError as error:
            said[mistake.__name__] = str(error)
    return said
