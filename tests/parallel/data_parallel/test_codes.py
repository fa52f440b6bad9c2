"""Tests of qgZ and qwZ: sums are within their bound, vectors are exact, and codes are what is sent."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import NO_DROPOUT, in_few_micro_batches, take_step, world_size_of
from jobs import steps_of, tiny, train_on_ranks
from ranks import run_ranks
from sweeps import further
from test_sharing_volume import group_of, tensors_in
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatronish.config.read import read_config
from megatronish.estimate.costs.traffic import expected_traffic
from megatronish.launch.place import Place
from megatronish.parallel.block_codes import LARGEST_CODE, add_decoded, encode
from megatronish.parallel.bucketing import CODE_BLOCK, bytes_of_block
from megatronish.parallel.data_parallel.coded_sums import start_coded_sum
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.parallel.stages import Stages
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_is_read_back_is_off_by_half_a_scale_at_most(dtype: str) -> None:
    torch.manual_seed(0)
    blocks = torch.randn(20_000, CODE_BLOCK) * torch.logspace(-12, 3, 20_000).unsqueeze(1)  # in several pieces
    blocks[5] = 0.0
    sent, back = torch.empty(20_000, bytes_of_block(dtype), dtype=torch.uint8), torch.zeros_like(blocks)
    encode(blocks, dtype, sent)
    add_decoded(sent, dtype, back)
    scale = blocks.abs().amax(1, keepdim=True) / LARGEST_CODE[dtype]
    assert ((back - blocks).abs() <= 0.5001 * scale).all()
    assert not back[5].any()
    largest = torch.where(blocks.abs() == blocks.abs().amax(1, keepdim=True), blocks, 0.0)
    assert torch.allclose(back[largest != 0], largest[largest != 0], rtol=1e-6)  # of a block, in either sign


def terms(axis: Axis, size: int) -> Tensor:
    """Gradients of this rank, of another size on each."""
    torch.manual_seed(axis.rank)
    return torch.randn(size) * 10.0**axis.rank


def sum_on(place: Place, dtype: str, size: int) -> tuple[Tensor, Tensor]:
    """This rank's gradient, and the sum of its part."""
    from megatronish.config.sections.parallel import ParallelConfig

    mesh = Mesh.of(ParallelConfig(data_parallel_size=place.world_size, zero_stage=1), place)
    axis = mesh.domains["dense"].shard
    flat = terms(axis, size)
    own = flat.chunk(axis.size)[axis.rank].clone()
    return flat, start_coded_sum([flat.view(axis.size, -1)], axis, dtype, own=[own]).wait()[0]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_an_element_of_a_sum_is_within_its_bound(dtype: str) -> None:
    ranks, size = 3, 3 * 5 * CODE_BLOCK
    found = run_ranks(ranks, sum_on, dtype, size)
    exact = torch.stack([flat for flat, _ in found]).double().sum(0)
    for rank, (part, (_, summed)) in enumerate(zip(exact.chunk(ranks), found, strict=True)):
        largest = torch.stack(
            [
                flat.chunk(ranks)[rank].view(-1, CODE_BLOCK).abs().amax(1)
                for other, (flat, _) in enumerate(found)
                if other != rank
            ]
        )
        bound = (largest.sum(0) / (2 * LARGEST_CODE[dtype])).repeat_interleave(CODE_BLOCK)
        error = (summed - part).abs()
        assert (error <= 1.001 * bound).all()
        assert error.max() > 0.2 * bound.max()  # the bound is no wide one


class Kept(NamedTuple):
    """A rectangle of the global gradient of a parameter that a rank keeps."""

    name: str
    is_vector: bool
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


def jobs_of(place: Place, runs: Sequence[str]) -> Iterator[TrainingJob]:
    """This rank's part of runs that have one layout, and meet once."""
    configs = [read_config(tiny(Path("never-written"), flags))[0] for flags in runs]
    mesh = start_mesh(configs[0], place)
    return (TrainingJob.open(config, mesh) for config in configs)


def gradients_of(place: Place, runs: Sequence[str]) -> list[list[Kept]]:
    """What this rank keeps of each gradient after a step of each run."""
    return [_gradients_of(job) for job in jobs_of(place, runs)]


def _gradients_of(job: TrainingJob) -> list[Kept]:
    engine = job.build_engine()
    take_step(job, engine, 0)
    return [
        Kept(name, sharding.is_vector, sharding.shape, piece.global_offset, piece.view(gradient).clone())
        for name, gradient in engine.data_parallel.gradients.items()
        for sharding in [engine.stage.shardings[name]]
        for piece in engine.data_parallel.shards[name].pieces
    ]


def whole(ranks: Iterable[list[Kept]]) -> dict[str, tuple[bool, Tensor]]:
    """{name: (is a vector, its gradient)}."""
    gradients: dict[str, tuple[bool, Tensor]] = {}
    for kept in (each for rank in ranks for each in rank):
        _, into = gradients.setdefault(kept.name, (kept.is_vector, torch.full(kept.shape, float("nan"))))
        place = tuple(slice(at, at + size) for at, size in zip(kept.offset, kept.values.shape, strict=True))
        into[place] = kept.values
    return gradients


SIZES = "--hidden-size 48 --num-attention-heads 4 --ddp-bucket-size 4000 --global-batch-size 8"
SMALL = f"{SIZES} {NO_DROPOUT} --clip-grad 0"
TWELVE = f"{SIZES.replace('size 8', 'size 12')} {NO_DROPOUT}"
CASES = [
    "--dp 2 --zero-stage 1",
    further("--dp 4 --zero-stage 2"),
    further("--dp 4 --zero-stage 3"),
    further("--dp 2 --zero-stage 1 --pp 2 --pipeline-schedule zb-h1"),
    "--dp 2 --zero-stage 2 --tp 2 --sequence-parallel --pp 2",
    "--dp 2 --cp 2 --zero-stage 3",
    further("--dp 2 --cp 2 --zero-stage 3 --tp 2 --sequence-parallel"),
    further("--dp 4 --dp-replicate 2 --zero-stage 1 --no-overlap-grad-reduce"),
    "--dp 4 --dp-replicate 2 --zero-stage 3 --bf16",
    "--dp 2 --ep 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear --zero-stage 2 --tp 2",
    further("--dp 4 --ep 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear --zero-stage 3"),
    further("--dp 4 --zero-stage 3 --zero-hpz-partition-size 2 --recompute-granularity full --recompute-num-layers 1"),
]


@pytest.mark.parametrize("case", CASES)
def test_vectors_are_exact_and_matrices_are_near(case: str) -> None:
    flags = in_few_micro_batches(f"{case} {SMALL}")
    runs = [flags, *(f"{flags} --zero-quantized-gradients {dtype}" for dtype in ("int8", "int4"))]
    exact, *coded = map(whole, zip(*run_ranks(world_size_of(flags), gradients_of, runs), strict=True))
    for dtype, most, gradients in zip(("int8", "int4"), (0.012, 0.2), coded, strict=True):
        errors = []
        for name, (is_vector, gradient) in gradients.items():
            expected = exact[name][1]
            assert not gradient.isnan().any(), name
            if is_vector:
                assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max())), name
            else:
                errors.append(float((gradient - expected).norm() / expected.norm()))
                assert errors[-1] <= most, (dtype, name)
        assert max(errors) > most / 10, "nothing was rounded"


class SentBytes(TorchDispatchMode):
    """Counts bytes of the largest tensor of each collective over a group, by operation of torch.distributed."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group, self.sent = group, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and group_of(args) == self.group:
            self.sent[function.name()] += max(each.nbytes for each in tensors_in(args))
        return function(*args, **(kwargs or {}))


def send(place: Place, runs: Sequence[str]) -> list[tuple[Counter[str], dict[str, int]]]:
    """What the second step of each run sends over the ranks that share, and what is expected."""
    return [_send(job) for job in jobs_of(place, runs)]


def _send(job: TrainingJob) -> tuple[Counter[str], dict[str, int]]:
    engine = job.build_engine()
    take_step(job, engine, 0)
    group = job.mesh.domains["dense"].shard.group
    assert group is not None
    with SentBytes(group.group_name) as counting:
        take_step(job, engine, 1)
    config = job.config
    stages = Stages.of(config.parallel, config.model, vocab_size=job.vocab_size, seq_length=config.training.seq_length)
    expected = expected_traffic(config, stages.loads(1)[0], 0, vocab_size=job.vocab_size)
    return counting.sent, {kind: size for (axis, kind), size in expected.items() if axis == "shard"}


@pytest.mark.parametrize("case", ["--dp 3 --zero-stage 1", "--dp 2 --zero-stage 2 --bf16", "--dp 3 --zero-stage 3"])
def test_the_codes_are_what_is_sent(case: str) -> None:
    flags = f"{in_few_micro_batches(f'{case} {TWELVE}')} --zero-quantized-gradients int4"
    for ((sent, expected),) in run_ranks(world_size_of(flags), send, [flags]):
        assert sent["c10d::alltoall_base_"] == expected["all-to-all"] > 0
        assert sent["c10d::_reduce_scatter_base_"] == expected["reduce-scatter"] > 0  # of vectors
        assert expected["reduce-scatter"] < expected["all-to-all"]


WEIGHTS = "--zero-quantized-weights int8 --zero-quantized-weights-block 16"


@pytest.mark.parametrize("case", ["--dp 3 --zero-stage 1", "--dp 2 --zero-stage 2 --bf16", "--dp 3 --zero-stage 3"])
def test_weights_are_sent_as_codes(case: str) -> None:
    flags = in_few_micro_batches(f"{case} {TWELVE}")
    for (plain, _), (sent, expected) in run_ranks(world_size_of(flags), send, [flags, f"{flags} {WEIGHTS}"]):
        assert sent["c10d::_allgather_base_"] == expected["all-gather"] > 0
        width = 2 if "bf16" in case else 4
        assert sent["c10d::_allgather_base_"] < 1.1 * 20 / (16 * width) * plain["c10d::_allgather_base_"]


@pytest.mark.parametrize(
    "codes", ["--zero-stage 2 --zero-quantized-gradients int8", further(f"--zero-stage 3 {WEIGHTS}")]
)
def test_a_run_has_the_same_bits_again_and_when_it_is_resumed(codes: str, tmp_path: Path) -> None:
    flags = in_few_micro_batches(f"{SIZES} --dp 2 {codes} --train-iters 3 --save-interval 1")
    train_on_ranks(tiny(tmp_path / "whole", flags), world_size=2)
    train_on_ranks(tiny(tmp_path / "cut", f"{flags} --exit-interval 1"), world_size=2)
    train_on_ranks(tiny(tmp_path / "cut", flags), world_size=2)
    assert len(steps_of(tmp_path / "whole")) == 3
    assert steps_of(tmp_path / "whole") == steps_of(tmp_path / "cut")
