"""Tests of data-parallel volume: bytes that a rank sends in a step, counted at the collectives, equal the formula.

A rank of N sends (N - 1) / N of what it gathers or reduce-scatters, and an all-reduce is one of each. What is counted
are the operations of torch.distributed that gloo is given, whoever calls them.
"""

from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from engines import NO_DROPOUT, Shape, open_job, shape_of, take_step, world_size_of
from jobs import tiny
from paths import ROOT
from ranks import run_ranks
from sweeps import some_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatronish.config.read import read_config
from megatronish.launch.place import Place

PAGE = (ROOT / "docs" / "SHARDING.md").read_text(encoding="utf-8")
SIZE = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}

# How many times its largest tensor a collective sends, before the factor (N - 1) / N.
SENDS = {"c10d::allreduce_": 2, "c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 1}
KINDS = {"c10d::_allgather_base_": "parameters"}  # all others are gradients


class Sent(NamedTuple):
    """Elements and bytes that a rank sends; elements of parameters also to the neighbours that keep them (hpZ)."""

    gradients: Fraction
    parameters: Fraction
    bytes: Fraction
    neighbours: Fraction = Fraction()


class Counting(TorchDispatchMode):
    """Counts what collectives send over some groups. Numbers, of losses and norms, are left out."""

    def __init__(self, sizes: dict[str, int], neighbours: str | None) -> None:
        super().__init__()
        self.sizes, self.neighbours = sizes, neighbours
        self.elements: defaultdict[tuple[str, torch.dtype], Fraction] = defaultdict(Fraction)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            size = self.sizes.get(group_of(args))
            largest = max(tensors_in(args), key=Tensor.numel)
            if size is not None and largest.numel() > 1:
                kind = KINDS.get(function.name(), "gradients")
                kind = "neighbours" if group_of(args) == self.neighbours else kind
                self.elements[kind, largest.dtype] += (
                    SENDS[function.name()] * largest.numel() * Fraction(size - 1, size)
                )
        return function(*args, **(kwargs or {}))

    def sent(self) -> Sent:
        """Elements of gradients and of parameters, and bytes, sent in all."""
        gradients, parameters, neighbours = (
            sum((count for (of, _), count in self.elements.items() if of == kind), Fraction())
            for kind in ("gradients", "parameters", "neighbours")
        )
        in_bytes = sum((count * SIZE[dtype] for (_, dtype), count in self.elements.items()), Fraction())
        return Sent(gradients, parameters, in_bytes, neighbours)


def group_of(args: Any) -> str:
    """The name of the group that a collective is given."""
    (group,) = (each for each in args if isinstance(each, torch.ScriptObject) and is_group(each))
    return dist.ProcessGroup.unbox(group).group_name


def is_group(given: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(given._type())


def tensors_in(args: Any) -> list[Tensor]:
    flat = [each for given in args for each in (given if isinstance(given, list | tuple) else [given])]
    return [each for each in flat if isinstance(each, Tensor)]


def send(place: Place, flags: str) -> tuple[Sent, Shape, int]:
    """What the second step sends, the shape of the stage, and of what is left of it around the layers."""
    job = open_job(place, flags)
    engine = job.build_engine()
    take_step(job, engine, 0)
    mesh = job.mesh
    dense = mesh.domains["dense"]
    axes = (dense.shard, dense.replicate, dense.secondary)
    sizes = {axis.group.group_name: axis.size for axis in axes if axis.group is not None}
    kept_over = dense.secondary.group
    with Counting(sizes, kept_over.group_name if kept_over is not None else None) as counting:
        take_step(job, engine, 1)
    around = [p for name, p in engine.stage.model.named_parameters() if not name.startswith("layers.")]
    ranks = dense.shard.size
    return counting.sent(), shape_of(engine), sum(-(-len(p) // ranks) * ranks * p.shape[1:].numel() for p in around)


def formula(flags: str, shape: Shape, around: int) -> Sent:
    """The table of docs/SHARDING.md, with the padding and with copies."""
    config = read_config(tiny(Path("never-written"), flags))[0]
    parallel, layout, stage = config.parallel, config.layout, config.parallel.zero
    ranks, copies = layout.dp * layout.cp, parallel.num_distributed_optimizer_instances
    shard_axis, replicate_axis = (ranks // copies, copies) if stage else (1, ranks)
    m = config.global_batch_size // (config.training.micro_batch_size * layout.dp)
    reductions, gathers = times(stage, m)
    part = Fraction(shard_axis - 1, shard_axis)
    # Every chunk of a stage that computes gathers what is around its layers; one of them has its gradients.
    chunks = parallel.num_chunks(config.model.num_layers) if stage == 3 else 1
    gathered = gathers * (shape.padded + (chunks - 1) * around)
    neighbours = Fraction()
    if (number := parallel.zero_hpz_partition_size) is not None:  # over all ranks once, in the first forward
        neighbours, gathered = Fraction(number - 1, number) * (gathered - shape.padded), shape.padded
    parameters = part * gathered
    copied = shape.kept if stage == 3 else shape.padded_share
    gradients = (reductions * part * shape.padded if stage else 0) + Fraction(
        2 * copied * (replicate_axis - 1), replicate_axis
    )
    element = 4 if config.training.precision == "fp32" else 2
    summed = 2 if parallel.grad_reduce_in_bf16 else 4
    return Sent(gradients, parameters, summed * gradients + element * (parameters + neighbours), neighbours)


def times(stage: int, m: int) -> tuple[int, int]:
    """How many times Psi (N - 1) / N a rank sends of gradients and of parameters, with m micro-batches."""
    return [(2, 0), (1, 1), (m, 1), (m, 2 * m)][stage]


SMALL = f"--ddp-bucket-size 3000 {NO_DROPOUT}"
HPZ = "--dp 4 --zero-stage 3 --zero-hpz-partition-size 2"
CASES = [
    *(f"--dp 3 --zero-stage {stage} --bf16" for stage in range(4)),
    *(f"--dp 2 --zero-stage {stage}" for stage in range(4)),
    "--dp 4 --zero-stage 1",
    *(f"--dp 4 --dp-replicate 2 --zero-stage {stage} --bf16" for stage in range(1, 4)),
    "--dp 1 --cp 2 --zero-stage 2 --bf16",
    *(f"--dp 2 --zero-stage {stage} --bf16 --grad-reduce-in-bf16" for stage in range(4)),
    "--dp 2 --zero-stage 1 --tp 2 --sequence-parallel --fp16 --loss-scale 16",
    "--dp 2 --zero-stage 1 --pp 2 --pipeline-schedule zb-h1 --optimizer-cpu-offload",
    "--dp 2 --zero-stage 3 --bf16 --recompute-granularity full --recompute-num-layers 2 --param-cpu-offload",
    "--dp 2 --zero-stage 3 --pp 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    f"{HPZ} --bf16",
    f"{HPZ} --micro-batch-size 3 --recompute-granularity full",
    f"{HPZ} --param-cpu-offload",
    f"{HPZ} --tp 2 --sequence-parallel --param-cpu-offload",
    f"{HPZ} --pp 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    "--dp 6 --zero-stage 3 --zero-hpz-partition-size 3",
    f"{HPZ} --cp 2 --dp-replicate 2",
]
FURTHER = [
    *(f"--dp 2 --zero-stage {stage}" for stage in (0, 1, 3)),  # as with three ranks
    "--dp 4 --zero-stage 1",
    *(f"--dp 4 --dp-replicate 2 --zero-stage {stage} --bf16" for stage in (1, 2)),
    *(f"--dp 2 --zero-stage {stage} --bf16 --grad-reduce-in-bf16" for stage in (0, 1, 3)),
    f"{HPZ} --micro-batch-size 3 --recompute-granularity full",
    f"{HPZ} --tp 2 --sequence-parallel --param-cpu-offload",
    f"{HPZ} --pp 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",  # chunks without neighbours are there
    f"{HPZ} --cp 2 --dp-replicate 2",  # as six ranks, and as copies without neighbours
]
"""Each differs in one number from another case of its stage."""

BATCHES = {1: 3, 2: 6, 3: 9, 4: 12, 6: 12}
"""Samples of a step for each dp: three micro-batches (of six ranks two), as formulas have factors of one and two."""


@pytest.mark.parametrize("case", some_of(CASES, [case for case in CASES if case not in FURTHER]))
def test_a_rank_sends_what_the_formula_says(case: str) -> None:
    flags = f"{case} {SMALL} --global-batch-size {BATCHES[int(case.split()[1])]}"
    for sent, shape, around in run_ranks(world_size_of(flags), send, flags):
        assert sent == formula(flags, shape, around)


def test_a_step_that_is_skipped_gathers_nothing() -> None:
    flags = f"--dp 2 --zero-stage 1 --fp16 --initial-loss-scale {2.0**60} {SMALL}"
    for sent, shape, _ in run_ranks(2, send, flags):
        assert (sent.gradients, sent.parameters) == (shape.padded_share, 0)


def test_the_table_of_what_is_sent_is_current() -> None:
    """Elements in Psi (N - 1) / N, as a function of m; bytes of 7 B parameters over 8 ranks."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| stage ")]
    assert len(rows) == 4
    for stage, (_, *cells) in enumerate(rows):
        for m in (1, 5):
            gradients, parameters = times(stage, m)
            assert [at(cell, m) for cell in cells[:3]] == [gradients, parameters, gradients + parameters]
        sent = [4 * gradients + 2 * parameters for gradients, parameters in (times(stage, m) for m in (1, 8))]
        expected = [f"{7 * 7 / 8 * each:.1f} GB" for each in sent]
        assert cells[3:] == expected, f"docs/SHARDING.md should say {expected} of stage {stage}"


def at(cell: str, m: int) -> int:
    """`m + 1` or `2 m` for so many micro-batches."""
    terms = [term.replace("m", "").strip() if "m" in term else term for term in cell.split(" + ")]
    return sum(int(term or 1) * (m if "m" in of else 1) for term, of in zip(terms, cell.split(" + "), strict=True))
