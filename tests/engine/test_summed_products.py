"""Tests of steps as a GPU takes them in 16 bits, on a CPU: products added to sums in fp32, gradients divided by Adam.

In the place of the GEMM that has a result in fp32 is a product of copies of the factors in fp32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import PropertyMock, patch

import pytest
import torch
from engines import in_few_micro_batches, open_job, take_step, world_size_of
from ranks import run_ranks
from sweeps import some_of
from torch import Tensor

from megatronish.engine import build
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.ops import gradient_sum
from megatronish.optim.masters import TorchUpdate
from megatronish.train.setup import TrainingJob

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 --swiglu --disable-bias-linear"
UNTIED = "--untie-embeddings-and-output-weights"
LAYOUTS = {
    "one process": "",
    "experts": f"{EXPERTS} --dp 2 --ep 2 --zero-stage 1",
    "zero bubble": f"--num-layers 4 --pp 2 --pipeline-schedule zb-h1 {UNTIED}",
    "zero bubble in a V": "--num-layers 4 --pp 2 --pipeline-schedule zb-v --dp 2 --zero-stage 1",
    "zero bubble with experts": f"{EXPERTS} --num-layers 4 --pp 2 --pipeline-schedule zb-h1",
    "sequence parallel": "--tp 2 --sequence-parallel --dp 2 --zero-stage 1",
    "interleaved": "--num-layers 4 --pp 2 --num-layers-per-virtual-pipeline-stage 1",
    "computed again": "--recompute-granularity full --recompute-method uniform --dp 2",
    "ZeRO-2": "--dp 2 --zero-stage 2",
    "ZeRO-3": "--dp 2 --zero-stage 3",
}
FEW = ["one process", "experts", "zero bubble", "sequence parallel", "ZeRO-2"]


class Seen(NamedTuple):
    """What a rank has after steps: its gradients of the last one, and masters."""

    gradients: dict[str, Tensor]
    masters: dict[str, Tensor]


@contextmanager
def as_a_gpu_sums() -> Iterator[None]:
    """Meanwhile products of 16-bit factors are added to sums in fp32."""
    with (
        patch.object(gradient_sum, "sums_unrounded", lambda *_: True),
        patch.object(build, "sums_unrounded", lambda *_: True),
    ):
        yield


def train(job: TrainingJob, num_steps: int) -> Seen:
    """Some steps of a run."""
    engine = build_engine(job.config, job.mesh, vocab_size=job.vocab_size)
    for step in range(num_steps):
        take_step(job, engine, step)
    sharing = engine.data_parallel
    masters = {name: shard.master.clone() for name, shard in sharing.shards.items()}
    return Seen({name: gradient.clone() for name, gradient in sharing.gradients.items()}, masters)


def both(place: Place, flags: str) -> tuple[Seen, Seen]:
    """A step with rounded gradients, and one with products that are summed."""
    job = open_job(place, flags)
    rounded = train(job, 1)
    with as_a_gpu_sums():
        return rounded, train(job, 1)


@pytest.mark.parametrize("name", some_of(list(LAYOUTS), FEW))
def test_summed_products_are_gradients_that_are_not_rounded(name: str) -> None:
    """In every layout: as near to rounded ones as these are rounded, and where the sums are whole not the same."""
    flags = in_few_micro_batches(f"{LAYOUTS[name]} --bf16 --hidden-dropout 0 --attention-dropout 0 --clip-grad 0")
    differ = set()
    for rounded, summed in run_ranks(world_size_of(flags), both, flags):
        assert rounded.gradients.keys() == summed.gradients.keys()
        for parameter, gradient in summed.gradients.items():
            largest = float(rounded.gradients[parameter].abs().max())
            torch.testing.assert_close(gradient, rounded.gradients[parameter], rtol=0, atol=2**-7 * largest)
            if not torch.equal(gradient, rounded.gradients[parameter]):
                differ.add(parameter)
    products = {parameter for parameter in rounded.gradients if "fc1.weight" in parameter or "attention" in parameter}
    weights = {parameter for parameter in products if parameter.endswith("weight") and "norm" not in parameter}
    assert not differ if name == "ZeRO-3" else differ >= weights


def clipped(place: Place, flags: str) -> tuple[Seen, Seen]:
    """Steps that multiply their gradients, and steps whose kernel divides them."""
    job = open_job(place, flags)
    multiplied = train(job, 3)
    with patch.object(TorchUpdate, "divides", PropertyMock(return_value=True)):
        return multiplied, train(job, 3)


@pytest.mark.parametrize("flags", ["--dp 2 --zero-stage 1", "--tp 2 --bf16", "--dp 2 --zero-stage 3"])
def test_adam_may_divide_the_gradients_itself(flags: str) -> None:
    """A long gradient becomes as short; the division rounds otherwise than the product, in the last bit."""
    for multiplied, divided in run_ranks(2, clipped, f"{flags} --clip-grad 0.01"):
        for name, gradient in multiplied.gradients.items():
            torch.testing.assert_close(divided.gradients[name], gradient, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(divided.masters[name], multiplied.masters[name], rtol=1e-5, atol=1e-6)
