"""Memory of parameters: what frozen models hold, what building a sharded model takes, and where tensors begin."""

import gc
import re
from pathlib import Path

import pytest
import torch
from engines import NO_DROPOUT
from jobs import VOCABULARY, tiny
from ranks import run_ranks

from megatronish.config.read import read_config
from megatronish.engine.build import Trainable, build_engine, everything, nothing
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.parallel.data_parallel.zero import Zero
from megatronish.parallel.sharding import Sharding
from megatronish.train.start import start_mesh

SIZES = "--num-layers 6 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8"
LARGE = f"{SIZES} --dp 4 --zero-stage 3"


def bytes_alive() -> int:
    """Of all tensors of this process, each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def attention_alone(name: str, _sharding: Sharding) -> bool:
    return ".attention." in name


def held(place: Place, flags: str, trainable: str) -> tuple[int, int, int]:
    """Bytes that an engine keeps, its parameters in all, and those that learn."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    before = bytes_alive()
    which = nothing if trainable == "nothing" else attention_alone
    engine = build_engine(config, mesh, vocab_size=VOCABULARY, trainable=which)
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in engine.stage.model.parameters()]
    return (
        bytes_alive() - before,
        sum(count for count, _ in counts),
        sum(count for count, learns in counts if learns),
    )


@pytest.mark.parametrize("precision", ["--bf16", "--fp16", ""])
def test_an_evaluating_engine_holds_its_parameters_alone(precision: str) -> None:
    """2 bytes a parameter in 16 bits, not the 6 of a model with masters."""
    flags = f"--num-layers 4 --hidden-size 96 --ffn-hidden-size 384 {NO_DROPOUT} {precision}"
    ((kept, in_all, learning),) = run_ranks(1, held, flags, "nothing")
    element = 2 if precision else 4
    assert learning == 0
    assert element * in_all <= kept < element * in_all * 1.02


def test_what_is_frozen_of_a_learning_engine_has_no_master() -> None:
    """What learns has 2 bytes, and in fp32 a master, a gradient and two moments."""
    flags = f"--num-layers 4 --hidden-size 96 --ffn-hidden-size 384 {NO_DROPOUT} --bf16"
    ((kept, in_all, learning),) = run_ranks(1, held, flags, "attention")
    expected = 2 * in_all + (4 + 4 + 8) * learning
    assert 0 < learning < in_all / 2
    assert expected <= kept < expected * 1.02


def peak_while_building(place: Place, flags: str, trainable: Trainable = everything) -> tuple[int, int]:
    """By how many bytes this rank grows at most while it builds, and those of all parameters in fp32.

    A small engine is built first: the first engine of a process costs 11 to 17 MB more than its parameters, however
    large or small they are.
    """
    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    small, _ = read_config(tiny(Path("never-written"), flags[len(SIZES) :]))
    build_engine(small, mesh, vocab_size=VOCABULARY, trainable=trainable)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak()
    engine = build_engine(config, mesh, vocab_size=VOCABULARY, trainable=trainable)
    return peak() - before, 4 * sum(parameter.numel() for parameter in engine.stage.model.parameters())


def peak() -> int:
    """The most memory this process has held."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux, which tells the peak of memory")
def test_zero_3_never_holds_a_whole_stage() -> None:
    """A share of rows, its gradients and two moments, all of them a quarter: the parameters once, and not twice."""
    for grown, whole in run_ranks(4, peak_while_building, LARGE):
        assert whole > 70e6
        assert grown < 4 * whole / 4 + 12e6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux, which tells the peak of memory")
def test_what_is_frozen_is_never_whole_in_fp32() -> None:
    """Two bytes a parameter in bf16: an 8B model with adapters is built on a device that its 30 GiB would not fit."""
    ((grown, whole),) = run_ranks(1, peak_while_building, f"{SIZES} --bf16", nothing)
    assert whole > 70e6
    assert grown < whole / 2 + 12e6


def unaligned(place: Place, flags: str) -> list[str]:
    """Parameters of the model, and parts and gradients of buckets, that do not begin at a multiple of 16 bytes."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    engine: Engine = build_engine(config, start_mesh(config, place), vocab_size=VOCABULARY)
    sharing = engine.data_parallel
    assert isinstance(sharing, Zero)
    tensors = dict(engine.stage.model.named_parameters())
    for number, (plan, flat) in enumerate(zip(sharing.parameters.plans, sharing.parameters.flats, strict=True)):
        tensors[f"part {number}"] = plan.part(flat)  # type: ignore[assignment]
    for number, bucket in enumerate(sharing.buckets.buckets):
        tensors[f"gradients of part {number}"] = bucket.part  # type: ignore[assignment]
    return [name for name, tensor in tensors.items() if tensor.data_ptr() % 16]


@pytest.mark.parametrize("precision", ["--bf16", ""])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_parameters_and_parts_begin_at_multiples_of_16_bytes(zero_stage: int, precision: str) -> None:
    """Of odd sizes too: heads of 5 channels, their norms and biases, an MLP of 7 features, three ranks."""
    sizes = "--hidden-size 13 --kv-channels 5 --num-attention-heads 3 --ffn-hidden-size 7 --qk-layernorm"
    flags = f"{sizes} --dp 3 --zero-stage {zero_stage} --global-batch-size 3 {precision} --ddp-bucket-size 300"
    assert run_ranks(3, unaligned, flags) == [[], [], []]
