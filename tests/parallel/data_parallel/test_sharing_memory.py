"""Tests of data-parallel memory: parameters, gradients and optimizer states of a rank equal the formula, with padding.

Measured on engines that have trained for two steps. Every storage is counted once, wherever it is reached from, and
what Python holds besides what the formula names is nothing.
"""

import gc
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from engines import NO_DROPOUT, Shape, open_job, shape_of, take_step, world_size_of
from jobs import tiny
from paths import ROOT
from ranks import run_ranks
from sweeps import some_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatronish.config.read import read_config
from megatronish.engine.engine import Engine
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.costs.model_state import ZeroSettings, model_state
from megatronish.launch.place import Place
from megatronish.parallel.data_parallel.gradients import MAX_PENDING
from megatronish.parallel.data_parallel.zero import Zero

Storages = Mapping[int, int]
"""Where each begins -> its bytes."""

SMALL = "--ddp-bucket-size 3000"  # several buckets, which end inside no parameter but are padded
PAGE = (ROOT / "docs" / "SHARDING.md").read_text(encoding="utf-8")


class Held(NamedTuple):
    """Bytes, by what reaches them first; `beside` is reached from nothing of the engine that is known here."""

    parameters: int
    gradients: int
    optimizer: int
    beside: int


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    local = (each._local_tensor if isinstance(each, DTensor) else each for each in tensors)
    found = (each.untyped_storage() for each in local)
    return {each.data_ptr(): each.nbytes() for each in found if each.nbytes()}


def alive() -> list[Tensor]:
    """Every tensor that Python has made since `gc.freeze`."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not isinstance(each, DTensor)]


def without(these: Storages, *others: Storages) -> int:
    return sum(size for place, size in these.items() if not any(place in other for other in others))


def left_beside(known: Storages) -> int:
    """Bytes of tensors that nothing known reaches. gloo's threads let go of a sum a moment after it was waited for."""
    patience = time.monotonic() + 10
    while True:
        # Adam counts its steps in a number beside each master.
        everything = {place: size for place, size in storages(alive()).items() if size > 4}
        beside = without(everything, known)
        if not beside or time.monotonic() > patience:
            return beside
        time.sleep(0.01)


def gradients_of(engine: Engine) -> list[Tensor]:
    """Where they add up on the device."""
    sharing = engine.data_parallel
    if not isinstance(sharing, Zero):
        return [p.grad for p in engine.stage.model.parameters() if p.grad is not None]
    buckets = sharing.buckets.buckets
    return [bucket.part for bucket in buckets] + [bucket.flat for bucket in buckets if bucket.flat is not None]


def hold(place: Place, flags: str) -> tuple[Held, Shape]:
    job = open_job(place, flags)
    gc.freeze()  # what was there before is not looked at, which takes long
    engine = job.build_engine()
    for step in range(2):
        take_step(job, engine, step)
    parameters, gradients = storages(engine.stage.model.parameters()), storages(gradients_of(engine))
    masters = engine.optimizer.masters.values()
    read = [master.grad for master in masters if master.grad is not None]
    states = [state for states in engine.optimizer.state.values() for state in states.values()]
    optimizer = storages([*masters, *read, *states])
    known = parameters | gradients | optimizer
    beside = left_beside(known)
    gc.unfreeze()
    held = Held(
        sum(parameters.values()),
        without(gradients, parameters),
        without(optimizer, parameters, gradients),
        beside,
    )
    return held, shape_of(engine)


def formula(flags: str, shape: Shape) -> Held:
    """Bytes: the table of docs/SHARDING.md, with the padding."""
    config = read_config(tiny(Path("never-written"), flags))[0]
    stage, is_fp32 = config.parallel.zero, config.training.precision == "fp32"
    offload = config.parallel.optimizer_cpu_offload
    moments = 4 if "--optimizer sgd" in flags else 8
    if stage == 3:
        copies = 8 if offload else 0  # masters and gradients of their own
        return Held(4 * shape.padded_share, 4 * shape.kept, (moments + copies) * shape.kept, 0)
    masters = 4 if offload or not is_fp32 else 0
    return Held(
        parameters=(4 if is_fp32 else 2) * shape.padded,
        gradients=4 * (shape.padded if stage < 2 else shape.padded_share),
        optimizer=(masters + (4 if offload else 0)) * shape.padded_share + moments * shape.kept,
        beside=0,
    )


CASES = [
    *(f"--zero-stage {stage} --bf16" for stage in range(4)),
    *(f"--dp 2 --zero-stage {stage} {precision}" for stage in range(4) for precision in ("", "--bf16")),
    *(f"--dp 2 --zero-stage {stage} --fp16 --loss-scale 16" for stage in (1, 3)),
    *(f"--dp 4 --zero-stage {stage} --bf16" for stage in range(4)),
    *(f"--dp 4 --dp-replicate 2 --zero-stage {stage} --bf16" for stage in range(1, 4)),
    *(f"--dp 2 --zero-stage {stage} --bf16 --optimizer-cpu-offload" for stage in range(1, 4)),
    "--dp 2 --zero-stage 1 --optimizer-cpu-offload",
    "--dp 2 --zero-stage 3 --bf16 --param-cpu-offload",
    *(f"--dp 2 --tp 2 --sequence-parallel --zero-stage {stage} --bf16" for stage in range(4)),
    "--dp 2 --zero-stage 2 --bf16 --grad-reduce-in-bf16",
    "--cp 2 --pp 2 --zero-stage 2 --bf16 --optimizer sgd",
    "--dp 4 --zero-stage 3 --zero-hpz-partition-size 2 --bf16",
]
FURTHER = [
    *(f"--zero-stage {stage} --bf16" for stage in (0, 2)),
    *(f"--dp 2 --zero-stage {stage} --bf16" for stage in range(1, 4)),  # as with four ranks
    *(f"--dp 2 --zero-stage {stage} " for stage in (0, 2, 3)),
    "--dp 2 --zero-stage 1 --fp16 --loss-scale 16",
    *(f"--dp 4 --dp-replicate 2 --zero-stage {stage} --bf16" for stage in (1, 2)),
    *(f"--dp 2 --zero-stage {stage} --bf16 --optimizer-cpu-offload" for stage in (1, 2)),
    *(f"--dp 2 --tp 2 --sequence-parallel --zero-stage {stage} --bf16" for stage in (0, 1, 2)),
    *(f"--dp 4 --zero-stage {stage} --bf16" for stage in (0, 2)),  # stage 2 with a reduction in bf16
]
"""Each differs in one number from another case of its stage."""


@pytest.mark.parametrize("case", some_of(CASES, [case for case in CASES if case not in FURTHER]))
def test_a_rank_holds_what_the_formula_says_and_nothing_beside(case: str) -> None:
    flags = f"{case} {SMALL} {NO_DROPOUT}"
    ranks = run_ranks(world_size_of(flags), hold, flags)
    for held, shape in ranks:
        assert held == formula(flags, shape)


# What passes: whole for a part of a step


class Passing(NamedTuple):
    """At each moment that was looked at: elements that are whole."""

    moments: list[int]
    bucket: int
    layer: int
    rest: int


def watch_buckets(place: Place, flags: str) -> Passing:
    """Whenever a gradient has arrived: what ZeRO-2 holds of whole buckets, filling or under way."""
    job = open_job(place, flags)
    engine = job.build_engine()
    sharing = engine.data_parallel
    assert isinstance(sharing, Zero)
    buckets, moments = sharing.buckets, list[int]()

    def look(_: Tensor) -> None:
        filling = [bucket.plan.size for bucket in buckets.buckets if bucket.flat is not None]
        moments.append(sum([*filling, *(bucket.plan.size for bucket, _ in buckets._reducing)]))

    for parameter in engine.stage.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    take_step(job, engine, 0)
    sizes = [bucket.plan.size for bucket in buckets.buckets]
    return Passing(moments, max(sizes), 0, min(sizes))


def watch_layers(place: Place, flags: str) -> Passing:
    """Whenever an MLP begins or has its gradient: what ZeRO-3 holds of whole parameters."""
    job = open_job(place, flags)
    engine = job.build_engine()
    moments = list[int]()

    def look(*_: object) -> None:
        whole = [
            p for p in engine.stage.model.parameters() if not isinstance(p, DTensor) and p.untyped_storage().nbytes()
        ]
        moments.append(sum(p.numel() for p in whole))

    blocks = [module for name, module in engine.stage.model.named_modules() if name.endswith(".mlp")]
    for block in blocks:
        block.register_forward_pre_hook(look)
        block.register_full_backward_hook(look)
    sizes = {name: parameter.numel() for name, parameter in engine.stage.model.named_parameters()}
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    take_step(job, engine, 0)
    look()
    return Passing(moments, 0, layer, sum(sizes.values()) - len(blocks) * layer)


LARGE = f"--dp 2 --num-layers 6 --global-batch-size 4 {NO_DROPOUT}"


def test_zero_2_holds_three_buckets_at_once() -> None:
    """And that of norms and biases, which fills until the end and goes last; a tied table has one throughout."""
    for untied in (True, False):
        untie = "--untie-embeddings-and-output-weights" if untied else ""
        for seen in run_ranks(2, watch_buckets, f"{LARGE} {untie} --zero-stage 2 --ddp-bucket-size 1500"):
            most, whole = max(seen.moments), MAX_PENDING + (1 if untied else 2)
            assert 2 * seen.bucket < most <= whole * seen.bucket + 1500
    for seen in run_ranks(2, watch_buckets, f"{LARGE} --zero-stage 2 --ddp-bucket-size 1500 --no-overlap-grad-reduce"):
        assert max(seen.moments) > 5 * seen.bucket  # all of them, before one is exchanged


def test_zero_3_holds_two_layers_at_once_and_what_is_around_them() -> None:
    for recompute in ("", "--recompute-granularity full"):
        for seen in run_ranks(2, watch_layers, f"{LARGE} --zero-stage 3 {recompute}"):
            *moments, after = seen.moments
            assert set(moments) <= {seen.rest + seen.layer, seen.rest + 2 * seen.layer}
            assert after == 0


def watch_kept(place: Place, flags: str) -> tuple[list[int], Shape]:
    """Bytes of the model's parameters on this rank as each action begins, and after the step."""
    job = open_job(place, flags)
    engine = job.build_engine()
    sharing, moments = engine.data_parallel, list[int]()
    begin = sharing.begin_action

    def look(action: tuple[str, int, int], is_last: bool) -> None:
        moments.append(sum(storages(engine.stage.model.parameters()).values()))
        begin(action, is_last)

    sharing.begin_action = look  # type: ignore[method-assign]
    take_step(job, engine, 0)
    moments.append(sum(storages(engine.stage.model.parameters()).values()))
    return moments, shape_of(engine)


@pytest.mark.parametrize("layout", ["--dp 4", "--dp 2 --cp 2", "--dp 4 --tp 2 --sequence-parallel"])
def test_neighbours_keep_what_was_gathered_from_the_first_forward_of_a_step_to_its_end(layout: str) -> None:
    """In the precision of the run, each of two neighbours a half: what the parameters of modules are meanwhile."""
    flags = f"{layout} --bf16 --zero-stage 3 --zero-hpz-partition-size 2 --micro-batch-size 1 {NO_DROPOUT}"
    config = read_config(tiny(Path("never-written"), flags))[0]
    actions = 2 * config.global_batch_size // config.layout.dp
    for moments, shape in run_ranks(world_size_of(flags), watch_kept, flags):
        rows, kept = 4 * shape.padded_share, 2 * shape.padded // 2
        assert moments == [rows, *[kept] * (actions - 1), rows]


# The page


def expression(cell: str, ranks: int) -> float:
    """`6 + 12/N` -> 7.5 for 8 ranks."""
    return sum(float(term.removesuffix("/N")) / (ranks if term.endswith("/N") else 1) for term in cell.split(" + "))


def rows_of(title: str) -> list[list[str]]:
    """The rows of the table of docs/SHARDING.md that begins with this cell."""
    _, _, table = PAGE.partition(f"| {title} |")
    rows = table.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]


def sharing_of(flags: str, ranks: int) -> ZeroSettings:
    layout = f"--dp {ranks} --global-batch-size {ranks}"
    config = read_config(tiny(Path("never-written"), f"{flags} {layout}"))[0]
    return ZeroSettings.of(config)


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_the_table_of_bytes_a_parameter_is_current(ranks: int) -> None:
    rows, count = rows_of("bytes a parameter"), 64 * 12_345
    assert len(rows) == 8
    for flags, *cells in rows:
        sharing = sharing_of(flags.strip("`"), ranks)
        expected = [expression(cell, ranks) * count for cell in cells]
        sixteen, full = (model_state(count, 2 * count, sharing, element_bytes=size) for size in (2, 4))
        assert [sixteen.total, sixteen.host, full.total, full.host] == expected


def test_the_table_of_a_model_of_7b_is_current() -> None:
    rows, count = rows_of("7 B parameters, bf16"), 7_000_000_000
    assert len(rows) == 8
    for flags, *cells in rows:
        memory = [
            model_state(count, 2 * count, sharing_of(flags.strip("`"), ranks), element_bytes=2) for ranks in (8, 64)
        ]
        expected = [format_bytes(each) for state in memory for each in (state.total, state.host)]
        assert cells == expected, f"docs/SHARDING.md should say | {flags} | {' | '.join(expected)} |"


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_where_nothing_is_padded_the_formula_is_what_a_run_expects(case: str) -> None:
    config = read_config(tiny(Path("never-written"), case))[0]
    sharing, count = ZeroSettings.of(config), 960
    held = formula(case, Shape(count, count, count // sharing.ranks, count // sharing.ranks))
    num_moments = (1 if "sgd" in case else 2) * count
    state = model_state(count, num_moments, sharing, element_bytes=4 if config.training.precision == "fp32" else 2)
    assert sum(state) == sum(held)
    on_host = held.optimizer if sharing.offloads_optimizer else 0
    assert state.host == (sum(held) if sharing.offloads_parameters else on_host)
