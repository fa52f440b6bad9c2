"""Tests of faults in numbers: flipped bits in copies, the origin of what is not finite, spikes of the gradient."""

import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import open_job, take_step, world_size_of
from jobs import checkpoints_of, run_job, tiny
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatronish.core.errors import RunError
from megatronish.engine.engine import Engine
from megatronish.engine.nan_origin import find_origin
from megatronish.engine.results import NotFiniteError
from megatronish.launch.place import Place
from megatronish.optim.loss_scale import FEWEST, NormSpikes
from megatronish.optim.optimizer import Optimizer
from megatronish.train import trainer as trainer_module
from megatronish.train.hooks.replicas import _hash, copies_of, differences

SMALL_MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8"
SMALL = f"{SMALL_MODEL} --global-batch-size 4"


class Flip(NamedTuple):
    """One bit of an element of a parameter, and the ranks that must be told to differ."""

    flags: str
    rank: int
    parameter: str
    told: str


FLIPS = [
    Flip("--dp 2", 1, "layers.0.mlp.fc1.weight", "differs between the ranks 0, 1 of replicate"),
    Flip("--dp 4 --zero-stage 1", 2, "layers.1.attention.qkv.weight", "differs on rank 2 from"),
    Flip("--dp 4 --dp-replicate 2 --zero-stage 3", 3, "layers.0.mlp.fc2.weight", "of replicate"),
    Flip("--tp 4", 1, "layers.0.attention_norm.weight", "differs on rank 1 from"),
    Flip("--pp 2", 0, "embedding.tokens.weight", "of embedding"),
]


def local_of(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def flip_and_compare(place: Place, flip: Flip) -> tuple[list[str], list[str], list[str]]:
    """What differs before, with the bit flipped, and with it flipped back."""
    job = open_job(place, f"{SMALL} {flip.flags}")
    engine = job.build_engine()
    take_step(job, engine, 0)
    found = [differences(engine)]
    parameters = {
        name.replace("input_norm", "attention_norm"): each for name, each in engine.stage.model.named_parameters()
    }
    for _ in range(2):
        if place.rank == flip.rank:
            bits = local_of(parameters[flip.parameter].detach()).view(-1)[-1:].view(torch.int32)
            bits.bitwise_xor_(torch.tensor(1 << 3, dtype=torch.int32))
        found.append(differences(engine))
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.parametrize("flip", FLIPS, ids=[flip.flags for flip in FLIPS])
def test_a_flipped_bit_is_found_and_its_parameter_and_ranks_are_named(flip: Flip) -> None:
    for before, flipped, after in run_ranks(world_size_of(flip.flags), flip_and_compare, flip):
        assert before == after == []
        assert any(flip.told in phrase for phrase in flipped), flipped
        assert any(flip.parameter.split(".")[-2] in phrase for phrase in flipped), flipped


EXPERTS = "--num-experts 2 --moe-router-topk 1 --ffn-hidden-size 8 --global-batch-size 6"
SHARES = [
    f"--dp 3 --tp 2 --sequence-parallel --zero-stage 3 {EXPERTS}",
    f"--dp 6 --dp-replicate 2 --zero-stage 3 {EXPERTS}",
    "--dp 2 --tp 2 --zero-stage 3 --sequence-parallel --num-experts 2 --moe-router-topk 1 "
    "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate",
    "--ffn-hidden-size 11 --dp 4 --zero-stage 3 --dp-replicate 2 --optimizer-cpu-offload",
]
"""Layouts in which a rank's share of a parameter is empty, or begins where no word of 8 bytes does."""


def compare_shares(place: Place, flags: str) -> tuple[list[str], int, int]:
    """What differs, and how many tensors of this rank are empty, or begin at an odd element."""
    job = open_job(place, f"{SMALL_MODEL} {flags}")
    engine = job.build_engine()
    held = [each for copies in copies_of(engine) if copies.axis.size > 1 for each in copies.tensors.values()]
    odd = [each for each in held if each.storage_offset() * each.element_size() % 8]
    return differences(engine), sum(each.numel() == 0 for each in held), len(odd)


@pytest.mark.parametrize("flags", SHARES)
def test_shares_that_are_empty_or_begin_anywhere_are_compared(flags: str) -> None:
    found = run_ranks(world_size_of(flags), compare_shares, flags)
    assert [differs for differs, *_ in found] == [[]] * len(found)
    assert any(num_empty + num_odd for _, num_empty, num_odd in found), "nothing here is empty or odd"


def test_a_hash_is_of_the_bits_wherever_and_of_whatever_type_they_are() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn, torch.bool):
        for size in (0, 1, 2, 3, 5, 7, 8):
            whole = (torch.arange(16) % 5).to(dtype)
            hashes = {int(_hash(torch.cat((whole[:at], whole[1 : 1 + size]))[at:])) for at in range(4)}
            assert len(hashes) == 1, (dtype, size)
            for at in range(8 * size * whole.element_size()):
                flipped = whole[1 : 1 + size].clone()
                flipped.view(torch.uint8)[at // 8] ^= 1 << at % 8
                assert dtype == torch.bool or int(_hash(flipped)) not in hashes, (dtype, size, at)


def plant_flip(after_step: int) -> None:
    """Planted in a job: after that step a bit is flipped in rank 1's copy of a weight, too high to be rounded away."""
    step = Optimizer.step

    def stepped(self: Optimizer, **options: object) -> None:
        step(self, **options)  # type: ignore[arg-type]
        if self.num_steps == after_step and torch.distributed.get_rank() == 1:
            shard = next(shard for shard in self.shards.values() if len(shard.pieces[0].sizes) > 1)
            shard.master.view(-1)[:1].view(torch.int32).bitwise_xor_(torch.tensor(1 << 22, dtype=torch.int32))

    Optimizer.step = stepped  # type: ignore[method-assign]


def test_a_run_stops_before_a_checkpoint_mixes_copies(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = tiny(run_dir, "--dp 2 --save-interval 2 --check-replicas-interval 1000")
    ended = run_job(argv, tmp_path, plant=plant_flip, plant_args=(3,))
    assert ended.status == 1 and "Traceback" not in ended.errors
    assert "ranks that should hold the same parameters do not after step 4" in ended.errors
    assert "They were the same after step 2. Nothing was saved" in ended.errors
    assert checkpoints_of(run_dir) == ["latest", "step_00000002"]


class Fault(NamedTuple):
    """A number that is not finite, planted into a module of one rank's stage."""

    flags: str
    rank: int
    module: str
    kind: str
    told: str


FAULTS = [
    Fault(
        "--tp 2 --pp 2", 3, "layers.1.mlp.fc1", "weight", "it begins on rank 3 with the weight layers.1.mlp.fc1.weight"
    ),
    Fault("--dp 2", 1, "layers.0.mlp.fc1", "output", "it begins on rank 1 with the output of layers.0.mlp.fc1 "),
    Fault("--pp 2 --pipeline-schedule zb-h1", 0, "layers.0.attention", "output", "output of layers.0.attention"),
    Fault(
        "--dp 2 --zero-stage 3", 1, "layers.1.mlp.fc2", "gradient", "of layers.1.mlp.fc1, where that of layers.1.mlp"
    ),
    Fault(
        "--recompute-granularity full",
        0,
        "layers.0.mlp.fc2",
        "gradient",
        "of layers.0.mlp.fc1, where that of layers.0.mlp",
    ),
    Fault("--dp 2", 0, "", "once", "every weight, output and gradient of a micro-batch is finite"),
]


def spoil_output(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    spoiled = output.clone()
    spoiled[1, 0, 2] = torch.inf
    return spoiled


class _SpoiledBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * torch.nan


def spoil_gradient(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return _SpoiledBackward.apply(output)  # type: ignore[no-untyped-call]


ROOMS = "--dp 2 --ep 2 --num-experts 4 --moe-ffn-hidden-size 16 --moe-expert-rank-capacity-factor"


def fail_with_experts(place: Place, flags: str) -> str:
    """The origin of a fault after the experts, where memory that was never written is no number."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return fail(place, Fault(flags, 1, "layers.1.attention", "output", ""))
    finally:
        torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize("factor", [2, 1], ids=["room for all", "computed again"])
def test_what_lies_in_rooms_of_experts_that_are_not_full_is_no_origin(factor: int) -> None:
    for told in run_ranks(2, fail_with_experts, f"{ROOMS} {factor}"):
        assert "it begins on rank 1 with the output of layers.1.attention " in told
        assert re.search(r"in the forward of micro-batch 0, sample \d+$", told)


def fail(place: Place, fault: Fault) -> str:
    """The origin that is found for a planted fault."""
    job = open_job(place, f"{SMALL} {fault.flags}")
    engine = job.build_engine()
    take_step(job, engine, 0)
    if place.rank == fault.rank and fault.kind != "once":
        module = engine.stage.model.get_submodule(fault.module)
        if fault.kind == "weight":
            local_of(module.weight.detach()).view(-1)[1] = torch.nan  # type: ignore[operator, union-attr]
        else:
            module.register_forward_hook(spoil_output if fault.kind == "output" else spoil_gradient)
    batches = job.batches_of(job.datasets.train)(4, 4)
    if fault.kind != "once":
        with pytest.raises(NotFiniteError):
            engine.step(batches, num_steps_done=1, learning_rate=1e-3, weight_decay=0.0)
    return find_origin(engine, batches, num_steps_done=1).phrase


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.kind} {fault.flags}" for fault in FAULTS])
def test_the_first_module_that_makes_a_number_not_finite_is_named(fault: Fault) -> None:
    found = run_ranks(world_size_of(fault.flags), fail, fault)
    assert len(set(found)) == 1
    assert fault.told in found[0]
    if fault.kind == "output":
        assert re.search(r"in the forward of micro-batch 0, sample \d+", found[0])


def test_a_gradient_far_longer_than_usual_is_left_out_but_not_four_times() -> None:
    rule, resumed = NormSpikes(5.0), NormSpikes(5.0)
    assert not any(rule.skips(norm, step=1) for norm in (100.0, *[1.0] * FEWEST))  # too few to know the usual
    assert not rule.skips(4.9, step=2) and rule.skips(5.1, step=3)
    resumed.load(rule.state())
    for each in (rule, resumed):
        assert each.skips(1e9, step=4) and each.skips(6.0, step=5)
        with pytest.raises(RunError, match="above 5 times the median 1, as it was in the 3 steps before"):
            each.skips(7.0, step=6)
    assert NormSpikes(None).state() == {} and not NormSpikes(None).skips(1e30, step=1)


def spoil_rank_one_which_is_slow_to_fail() -> None:
    """Planted in a job: a weight of rank 1 is no number after the first step, and rank 0 is the first to say so."""
    step, find = Engine.step, trainer_module.find_origin

    def stepped(engine: Engine, *args: Any, **named: Any) -> Any:
        result = step(engine, *args, **named)
        if engine.mesh.world.rank == 1:
            local_of(engine.stage.model.get_submodule("layers.1.mlp.fc2").weight.detach()).view(-1)[1] = torch.nan
        return result

    def found(engine: Engine, *args: Any, **named: Any) -> Any:
        origin = find(engine, *args, **named)
        time.sleep(1.0 if engine.mesh.world.rank == 1 else 0.0)
        return origin

    Engine.step, trainer_module.find_origin = stepped, found  # type: ignore[assignment, method-assign]


def test_the_rank_where_it_begins_is_the_one_that_failed(tmp_path: Path) -> None:
    flags = "--dp 2 --check-replicas-interval 0"
    ended = run_job(tiny(tmp_path / "run", flags), tmp_path, plant=spoil_rank_one_which_is_slow_to_fail)
    assert (ended.status, ended.errors.startswith("rank 1 failed: loss=nan")) == (1, True), ended.errors
    assert "it begins on rank 1 with the weight layers.1.mlp.fc2.weight" in ended.errors
