"""Tests of --cuda-graph without a GPU: buffers that stay, what is replayed, and what is refused.

A graph takes down work without doing it, and does it whenever it is replayed, from the same buffers. A function that
is called again does the same; so here a recording is the function itself.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import NO_DROPOUT, open_job, take_step
from jobs import tiny
from ranks import run_ranks
from torch import Tensor

from megatronish.config.read import read_config
from megatronish.core.errors import UserError
from megatronish.engine.build import with_graphs
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.parallel.data_parallel.zero import Zero
from megatronish.parallel.pipeline.cuda_graph import MicroBatchGraph, ReplayingExecutor, record_on_cuda
from megatronish.parallel.pipeline.executor import ChunkOutput, Executor
from megatronish.train.start import start_mesh

FOUR = f"{NO_DROPOUT} --micro-batch-size 1 --global-batch-size"


class Calls:
    """A recording on the CPU, and how often it was replayed."""

    def __init__(self) -> None:
        self.recorded, self.replayed = 0, 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def trained(place: Place, flags: str, *, replays: bool) -> tuple[list[Tensor], int, int]:
    """Parameters after three steps, recordings and replays."""
    job, calls = open_job(place, flags), Calls()
    engine = job.build_engine()
    if replays:
        assert isinstance(engine.executor, Executor)
        domain = job.mesh.domains["dense"]
        gathers, sends = domain.shard.size > 1, domain.shard.size * domain.replicate.size > 1
        engine.executor = ReplayingExecutor(engine.executor, calls.record, first=gathers, last=sends)
    for step in range(3):
        take_step(job, engine, step)
    assert isinstance(engine.data_parallel, Zero)
    engine.data_parallel.parameters.wait_for([name for name, _ in engine.stage.model.named_parameters()])
    return [parameter.detach().clone() for parameter in engine.stage.model.parameters()], calls.recorded, calls.replayed


def both(place: Place, flags: str) -> tuple[list[bool], int, int]:
    """Which parameters are the same, bit for bit, with and without replays."""
    expected, _, _ = trained(place, flags, replays=False)
    found, recorded, replayed = trained(place, flags, replays=True)
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)], recorded, replayed


FURTHER = "--position-embedding-type rope --reset-position-ids --mtp-num-layers 2"


@pytest.mark.parametrize("more", ["", "--bf16", "--reset-attention-mask --recompute-granularity full", FURTHER])
def test_replayed_steps_are_the_eager_ones_bit_for_bit(more: str) -> None:
    same, recorded, replayed = both(Place(), f"{FOUR} 4 {more}")
    assert all(same)
    assert (recorded, replayed) == (1, 2 * 4), "the first step is the warm-up"


@pytest.mark.parametrize(("zero", "each"), [(0, 3), (1, 2)])
def test_micro_batches_that_send_run_without_the_graph(zero: int, each: int) -> None:
    """Of four on each of two ranks: the last one reduces, and with ZeRO-1 the first one gathers."""
    for same, recorded, replayed in run_ranks(2, replayed_on_two, zero):
        assert all(same)
        assert (recorded, replayed) == (1, 2 * each)


def replayed_on_two(place: Place, zero: int) -> tuple[list[bool], int, int]:
    mine, recorded, replayed = trained(place, f"{FOUR} 8 --dp 2 --zero-stage {zero}", replays=True)
    alone, _, _ = trained(Place(), f"{FOUR} 8", replays=False)
    near = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(mine, alone, strict=True)]
    return near, recorded, replayed


def micro_batch(seed: int, *, seq_length: int = 8) -> MicroBatch:
    tokens = torch.randint(9, (2, seq_length), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(seq_length).expand(2, -1).contiguous()
    return MicroBatch(tokens, tokens, tokens > 0, places, torch.arange(2) + seed)


def test_a_graph_reads_its_buffers_and_its_sums_are_read_after_it() -> None:
    """Inputs of every micro-batch are copied to the same places; recording adds nothing to a gradient."""
    weight, seen = torch.ones((), requires_grad=True), []

    def forward(_x: Tensor | None, batch: MicroBatch, /, *, step: int | None) -> ChunkOutput:
        seen.append((batch.tokens.data_ptr(), batch.loss_mask.data_ptr(), batch.sample_ids.data_ptr()))
        loss = weight * batch.tokens.sum()
        return ChunkOutput(loss, {"loss": loss.detach()})

    calls = Calls()
    first = micro_batch(0)
    graph = MicroBatchGraph(forward, first, calls.record)
    assert weight.grad is None
    expected = 0.0
    for number in range(3):
        batch = micro_batch(number)
        assert float(graph.run(batch, loss_gradient=0.5)["loss"]) == float(batch.tokens.sum())
        expected += 0.5 * float(batch.tokens.sum())
        assert float(weight.grad) == expected  # type: ignore[arg-type]
    assert len(set(seen)) == 1 and seen[0][0] != first.tokens.data_ptr()
    assert graph.fits(micro_batch(5)) and not graph.fits(micro_batch(5, seq_length=4))


def test_integers_are_summed_as_integers_and_the_rest_in_fp32() -> None:
    """As without a graph: fp32 holds no 2^24 + 1, and a count of tokens may be larger."""
    job = open_job(Place(), f"{FOUR} 4 --bf16")
    engine, most, calls = job.build_engine(), 2**24 + 1, Calls()
    assert isinstance(engine.executor, Executor)
    (forward,) = engine.executor.chunks

    def counted(x: Tensor | None, batch: MicroBatch, /, *, step: int | None) -> ChunkOutput:
        output = forward(x, batch, step=step)
        half = torch.ones((), dtype=torch.bfloat16)
        return output._replace(sums={**output.sums, "integers": torch.tensor(most), "halves": half / 128})

    replaying = ReplayingExecutor(engine.executor.with_chunks([counted]), calls.record, first=False, last=False)
    for _ in range(2):
        batches = job.batches_of(job.datasets.train)(0, 4)
        actions = engine.stage.stages.actions(0, len(batches))
        with engine.balancing.of_step(4, seq_length=batches[0].tokens.shape[1], loss_scale=1.0):
            sums = replaying.run(actions, batches, step=0)
        assert (sums["integers"].dtype, int(sums["integers"])) == (torch.int64, 4 * most)
        assert (sums["halves"].dtype, float(sums["halves"])) == (torch.float32, 4 / 128)
    assert calls.replayed == 4


def test_without_the_flag_there_is_no_graph() -> None:
    job = open_job(Place(), NO_DROPOUT)
    engine = job.build_engine()
    assert isinstance(engine.executor, Executor)
    assert with_graphs(job.config, engine.executor, job.mesh) is engine.executor


def complaints(flags: str) -> str:
    with pytest.raises(UserError) as error:
        read_config(tiny(Path("never-written"), f"--cuda-graph {flags}"))
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (NO_DROPOUT, "cuda_graph needs a GPU, but device=cpu; leave --cuda-graph out, or leave --device out"),
        (f"{NO_DROPOUT} --tp 2", "tensor_model_parallel_size=2 sends in every one; use --tensor-model-parallel-size 1"),
        (f"{NO_DROPOUT} --pp 2", "but pipeline_model_parallel_size=2 sends in every one"),
        (f"{NO_DROPOUT} --cp 2", "but context_parallel_size=2 sends in every one"),
        (f"{NO_DROPOUT} --pipeline-schedule zb-h1", "use --pipeline-schedule 1f1b, not zb-h1"),
        (f"{NO_DROPOUT} --dp 2 --zero-stage 2", "but zero_stage=2 sends in every one; use --zero-stage 0 or 1"),
        ("--attention-dropout 0 --hidden-dropout 0.1", "but hidden_dropout=0.1; use --hidden-dropout 0"),
        (
            f"{NO_DROPOUT} --adapter-type lora --load base --finetune --lora-dropout 0.5",
            "but lora_dropout=0.5; use --lora-dropout 0",
        ),
        (f"{FOUR} 2 --dp 2", "of 1 a step with data_parallel_size=2 and zero_stage=0 none is left; use --global-"),
        (f"{FOUR} 4 --dp 2 --zero-stage 1", "none is left; use --global-batch-size 6 or more, or leave --cuda-graph"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(flags: str, sentence: str) -> None:
    assert sentence in complaints(flags)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a GPU")
def test_on_a_cpu_the_run_is_refused_in_one_sentence() -> None:
    config, _ = read_config(tiny(Path("never-written"), f"--cuda-graph --device auto {NO_DROPOUT}"))
    with pytest.raises(
        UserError, match=r"^cuda_graph needs a GPU, and this run is on the CPU; leave --cuda-graph out$"
    ):
        start_mesh(config, Place())


@pytest.mark.gpu
@pytest.mark.parametrize("more", ["", "--bf16"])
def test_a_captured_micro_batch_is_the_eager_one(more: str) -> None:
    """On a GPU, with graphs; the stream of the run is one that can be captured."""
    with torch.cuda.stream(torch.cuda.Stream()):
        flags = f"{FOUR} 4 --device cuda {more}"
        expected, _, _ = trained(Place(), flags, replays=False)
        job = open_job(Place(), flags)
        engine = job.build_engine()
        assert isinstance(engine.executor, Executor)
        engine.executor = ReplayingExecutor(engine.executor, record_on_cuda, first=False, last=False)
        for step in range(3):
            take_step(job, engine, step)
        found = [parameter.detach() for parameter in engine.stage.model.parameters()]
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True))
