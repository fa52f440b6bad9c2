"""Bytes between nodes: the groups are those of the mesh, and the sums are those of the formulas."""

from collections.abc import Sequence

import pytest
from engines import world_size_of
from jobs import tiny
from paths import ROOT
from ranks import run_ranks

from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.estimate.costs.candidate import UNASKED, config_of, without_layout
from megatronish.estimate.costs.node_traffic import NodeTraffic, groups_of_axes, node_traffic, part_outside
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.estimate.planner.named_layout import read_layout
from megatronish.launch.place import Place
from megatronish.parallel.stages import Stages
from megatronish.train.start import start_mesh

EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"


def tiny_config(flags: str) -> Config:
    return read_config(tiny(ROOT / "never-written", flags)).config


def ranks_of_axes(place: Place, flags: str) -> dict[str, Sequence[int]]:
    """Ranks of the groups that the mesh of this rank has, of experts' data ranks with their domain."""
    mesh = start_mesh(tiny_config(flags), place)
    axes = {axis.name: axis for axis in (mesh.tp, mesh.cp, mesh.pp, mesh.dp, mesh.embedding_axis)}
    for name, domain in mesh.domains.items():
        axes |= {f"{name} {axis.name}": axis for axis in (domain.shard, domain.replicate, domain.secondary)}
        axes |= dict(domain.model)
    return {name: axis.ranks for name, axis in axes.items() if axis.size > 1}


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 2 --cp 2 --pp 2 --zero-stage 1",
        "--dp 4 --tp 2 --zero-stage 3 --zero-hpz-partition-size 2",
        f"{EXPERTS} --dp 4 --tp 2 --ep 2 --etp 2 --zero-stage 1 --num-distributed-optimizer-instances 2",
    ],
)
def test_groups_are_those_of_the_mesh(flags: str) -> None:
    config = tiny_config(flags)
    stages = Stages.of(config.parallel, config.model, vocab_size=101, seq_length=config.training.seq_length)
    expected = {
        domain: groups_of_axes(config, stages.loads(1), domain)
        for domain in ("dense", "experts")[: 1 + ("--ep" in flags)]
    }
    for rank, axes in enumerate(run_ranks(world_size_of(flags), ranks_of_axes, flags)):
        for name, ranks in axes.items():
            domain, _, axis = name.rpartition(" ")
            assert list(expected[domain or "dense"][axis][rank]) == list(ranks), name


def llama(layout: str, gpus: int = 16, node: int = 8) -> tuple[NodeTraffic, int, int]:
    """Traffic of Llama 3 8B, its parameters, and micro-batches of a step."""
    argv = ["--config", str(ROOT / "configs/llama-8b-8gpu.toml")]
    config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
    candidate = read_layout(layout, gpus=gpus)
    run = config_of(config, candidate)
    stages = Stages.of(run.parallel, run.model, vocab_size=128256, seq_length=8192)
    m = candidate.num_microbatches(config.global_batch_size)
    sent = node_traffic(run, stages.loads(m), vocab_size=128256, gpus_per_node=node)
    assert sent is not None
    return sent, num_parameters(config.model, vocab_size=128256, seq_length=8192), m


@pytest.mark.parametrize("gpus", [16, 64])
def test_zero_3_over_whole_nodes_sends_parameters_twice_and_gradients_once_a_micro_batch(gpus: int) -> None:
    """(2 + 2 + 4) P bytes, less one part of n: whatever the number of nodes."""
    sent, parameters, micro_batches = llama("tp=1,micro=1,zero=3", gpus)
    expected = micro_batches * (2 + 2 + 4) * parameters * (gpus - 1) / gpus
    assert sent.bytes_by_axis["shard"] == pytest.approx(expected, rel=1e-3)
    assert sent.total == pytest.approx(sent.bytes_by_axis["shard"], rel=1e-6)


def test_rings_of_data_ranks_leave_a_node_once_for_each_rank_of_tp() -> None:
    sent, parameters, _ = llama("tp=8,micro=1,zero=1,sp", 16)
    assert sent.bytes_by_axis["shard"] == pytest.approx((2 + 4) * parameters / 2, rel=2e-3)  # and norms are whole
    assert "tp" not in sent.bytes_by_axis


def test_a_middle_stage_sends_both_ways_and_a_node_of_two_stages_once() -> None:
    hidden = 8192 * 4096 * 2  # bytes of a micro-batch of one sequence
    sent, _, micro_batches = llama("tp=4,pp=4,micro=1,zero=1,sp", 16, node=4)
    assert sent.node in (1, 2)
    assert [sent.bytes_by_axis[kind] for kind in "FB"] == [hidden * micro_batches] * 2
    sent, _, micro_batches = llama("tp=4,pp=4,micro=1,zero=1,sp", 16, node=8)
    assert sum(sent.bytes_by_axis[kind] for kind in "FB" if kind in sent.bytes_by_axis) == hidden * micro_batches


def test_what_goes_to_all_ranks_leaves_for_those_of_other_nodes() -> None:
    assert part_outside("all-to-all", range(0, 8, 2), 2, 4) == 0.5
    assert part_outside("all-reduce", range(0, 8, 2), 0, 4) == 0.0  # the next of the ring is rank 2
    assert part_outside("all-reduce", range(0, 8, 2), 2, 4) == 1.5
    assert part_outside("send", [3, 7], 3, 4) == 1.0 and part_outside("receive", [3, 7], 3, 4) == 0.0
