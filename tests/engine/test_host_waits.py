"""Tests of what a step makes the host wait for: reads of tensors, counted by the function that reads."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_job, take_step, world_size_of
from preference_runs import LORA, Case, Spread, config_of, write_preferences
from ranks import run_ranks
from sweeps import further
from torch.utils._python_dispatch import TorchDispatchMode

from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.train.setup import TrainingJob

# On a GPU each waits for the device. Of a tensor that is on the CPU they are free: what `cpu` has read is read as often
# as wanted.
READS = ("item", "tolist", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__", "nonzero")
SUMS = {"results.reduce_sums": 4}  # `cpu` for all of them, and three reads of what is there then
FREE = {
    "forward.weight_of": "counted on the CPU, before any forward",
    "balancing.largest_of_layers": "of the sums that reduce_sums has read",
    "balancing.idle_of_layers": "of the sums that reduce_sums has read",
    "balancing.not_finite": "of the sums that reduce_sums has read",
    "balancing.lacked_room": "of the sums that reduce_sums has read",
    "balancing.metrics": "of the sums that reduce_sums has read",
}


class Reads(TorchDispatchMode):
    """Counts reads of tensors by their readers: methods of tensors, and what operators read by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._is_counted = False  # by the method that is at work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not self._is_counted:
            self.found[reader()] += 1
        return func(*args, **(kwargs or {}))

    def counting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """The method of tensors, counted; what it calls in turn is not."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._is_counted:
                return read(*args, **kwargs)
            self.found[reader()] += 1
            self._is_counted = True
            try:
                return read(*args, **kwargs)
            finally:
                self._is_counted = False

        return counted


def reader() -> str:
    """The innermost function of the package, as module.function."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("megatronish."):
            return f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Reads of tensors meanwhile, by reader."""
    with pytest.MonkeyPatch.context() as patch, Reads() as reads:
        for name in READS:
            patch.setattr(torch.Tensor, name, reads.counting(getattr(torch.Tensor, name)))
        yield reads.found


def reads_of_a_step(place: Place, flags: str) -> dict[str, int]:
    """Reads of the second step of a run, those of tensors on the CPU left out."""
    job = open_job(place, flags)
    engine = job.build_engine()
    take_step(job, engine, 0)
    batch = job.config.global_batch_size
    micro_batches = job.batches_of(job.datasets.train)(batch, batch)
    with counted_reads() as found:
        engine.step(micro_batches, num_steps_done=1, learning_rate=1e-3, weight_decay=0.1)
    return {name: number for name, number in found.items() if name not in FREE}


@pytest.mark.processes
@pytest.mark.parametrize(
    "flags",
    [
        further(""),
        "--tp 2 --sequence-parallel --dp 1",
        "--dp 2 --use-distributed-optimizer",
        further("--pp 2 --global-batch-size 8"),
        "--fp16",
    ],
)
def test_a_step_of_a_dense_model_waits_for_the_device_once(flags: str) -> None:
    for found in run_ranks(world_size_of(flags), reads_of_a_step, flags):
        assert found == SUMS


@pytest.mark.processes
def test_a_layer_of_experts_waits_once_for_the_sizes_of_its_exchange() -> None:
    flags = "--num-experts 4 --moe-router-topk 2 --dp 2 --ep 2"
    for found in run_ranks(2, reads_of_a_step, flags):
        layers, micro_batches = 2, 2
        assert found.pop("dispatch._exchange_counts") == layers * micro_batches
        assert found == SUMS


@pytest.mark.processes
@pytest.mark.parametrize(
    "flags",
    [
        further("--dp 1"),
        further("--dp 1 --moe-expert-capacity-factor 1"),
        "--dp 2 --ep 2 --moe-expert-rank-capacity-factor 2",
        "--dp 2 --ep 2 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
    ],
)
def test_no_layer_of_experts_waits_whose_rows_stay_or_have_rooms(flags: str) -> None:
    """In 16 bits, in which all products are those of torch's operator, which takes sizes of the device."""
    flags = f"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --bf16 {flags}"
    for found in run_ranks(world_size_of(flags), reads_of_a_step, flags):
        assert found == SUMS


@pytest.mark.parametrize("size", [further(2), 6])
def test_pairs_wait_once_more_for_their_numbers_however_many_micro_batches(size: int, tmp_path: Path) -> None:
    config = config_of(Case("kto", {}, LORA), Spread(), str(write_preferences(tmp_path)))
    job = TrainingJob.open(config, Mesh.of(config.parallel))
    engine, batches = job.build_engine(), job.batches_of(job.datasets.train)(0, size)
    assert len(batches) == size
    with counted_reads() as found:
        engine.step(batches, num_steps_done=0, learning_rate=1e-3, weight_decay=0.1)
    read = {name: number for name, number in found.items() if name not in FREE}
    assert read == SUMS | {"forward._numbers": 2}


def test_every_way_to_read_a_tensor_is_counted() -> None:
    x = torch.ones(2)
    with counted_reads() as found:
        reads = [x[0].item(), x.tolist(), x.cpu(), int(x[0]), float(x[0]), bool(x[0]), x.nonzero(), x.numpy()]
        reads.append(torch.arange(3)[x[0].int()])
    assert len(reads) == 9
    assert found["elsewhere"] == 9, found
