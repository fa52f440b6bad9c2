"""Tests of --offload-folder: a run with it is that of the CPU offload to the bit, and its masters lie on a disk."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from engines import evaluated, open_job
from ranks import run_ranks
from torch import Tensor

from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.parallel import disk
from megatronish.parallel.disk import disk_of
from megatronish.report.statistics import num_zeros, params_norm
from megatronish.train.checkpoint_state import tensors_of

LARGE = "--hidden-size 96 --ffn-hidden-size 192 --global-batch-size 4"
STEPS = 3


class Seen(NamedTuple):
    """What a rank has seen of a run, and its tensors of a checkpoint; how many of these lie on a disk."""

    numbers: list[float]
    evaluation: tuple[float, int]
    tensors: dict[str, Tensor]
    on_disk: int


def seen(place: Place, flags: str, depth: int = 1) -> Seen:
    """Steps, an evaluation and norms, in chunks of 1,024 elements."""
    disk.CHUNK, disk.DEPTH = 1024, depth
    job = open_job(place, f"{LARGE} {flags}")
    engine = build_engine(job.config, job.mesh, vocab_size=job.vocab_size)
    numbers = []
    batch, batches = job.config.global_batch_size, job.batches_of(job.datasets.train)
    for step in range(STEPS):
        result = engine.step(batches(step * batch, batch), num_steps_done=step, learning_rate=1e-3, weight_decay=0.1)
        numbers += [result.loss, result.grad_norm, params_norm(engine), num_zeros(engine)]
    tensors = {name: each.local for name, each in tensors_of(engine, with_optimizer=True).items()}
    on_disk = sum(disk_of(tensor) is not None for tensor in tensors.values() if tensor.numel())
    return Seen(
        numbers, evaluated(engine, batches(0, batch)), {name: each.clone() for name, each in tensors.items()}, on_disk
    )


def assert_equal_to_memory(tmp_path: Path, flags: str, size: int, depth: int = 1) -> None:
    """Equality of a run on a disk and in the CPU's memory, in every bit."""
    expected = run_ranks(size, seen, flags)
    actual = run_ranks(size, seen, f"{flags} --offload-folder {tmp_path}", depth)
    for there, here in zip(expected, actual, strict=True):
        assert here.numbers == there.numbers
        assert here.evaluation == there.evaluation
        assert here.tensors.keys() == there.tensors.keys()
        for name, tensor in there.tensors.items():
            assert torch.equal(here.tensors[name], tensor), name
        assert there.on_disk == 0
        assert here.on_disk == sum(tensor.numel() > 0 for tensor in here.tensors.values())
    assert not list(tmp_path.iterdir()), "a file has a name"


OPTIMIZER, PARAMETERS = "--optimizer-cpu-offload", "--param-cpu-offload"
LAYOUTS = [
    (f"--dp 2 --zero-stage 1 {OPTIMIZER}", 2),
    (f"--dp 2 --zero-stage 2 --bf16 {OPTIMIZER}", 2),
    (f"--dp 2 --zero-stage 3 --bf16 {OPTIMIZER} --optimizer sgd", 2),
    (f"--dp 2 --zero-stage 3 {PARAMETERS}", 2),
    (f"--dp 2 --zero-stage 3 --bf16 {PARAMETERS} --optimizer muon", 2),
    (f"--dp 1 --zero-stage 3 {PARAMETERS} --bf16", 1),
    (f"--dp 1 --zero-stage 1 {OPTIMIZER} --optimizer muon", 1),
]


@pytest.mark.parametrize(("flags", "size"), LAYOUTS, ids=[flags for flags, _ in LAYOUTS])
def test_a_run_on_a_disk_is_that_in_memory_to_the_bit(tmp_path: Path, flags: str, size: int) -> None:
    assert_equal_to_memory(tmp_path, flags, size)
