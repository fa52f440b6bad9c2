"""Tests of the process groups of a large run: how many a rank joins, and which of them connect CPUs.

torch has a backend that connects nothing and is meant for this: one process stands for any rank of a thousand.
"""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.launch.place import Place
from megatronish.parallel import mesh as mesh_module
from megatronish.parallel.mesh import LINE_BLOCKS, LINE_ENDS, WAITED_FOR, Axis, Mesh, backend_of, options_of

GPU = torch.device("cuda", 5)
BACKEND = "cpu:fake,cuda:fake"  # as cpu:gloo,cuda:nccl


@pytest.fixture(autouse=True)
def _leaving() -> Iterator[None]:
    """Leave the groups of a test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def started(*, has_experts: bool = False, **sizes: object) -> Mesh:
    """A rank of a run on GPUs, on the first stage."""
    parallel = ParallelConfig(**sizes)  # type: ignore[arg-type]
    place = Place(rank=5, world_size=parallel.layout.world_size, rendezvous="env://")
    return Mesh.of(parallel, place, device=GPU, backend=BACKEND, has_experts=has_experts, store=FakeStore())


def moves(axis: Axis) -> str:
    return str(dist.get_backend_config(axis.group))


def counted() -> tuple[int, int]:
    """Groups that this rank is in, and of these the ones that connect CPUs."""
    backends = [str(dist.get_backend_config(group)) for group in _world.pg_map]
    return len(backends), sum("cpu:" in backend for backend in backends)


def test_a_rank_of_a_thousand_is_in_ten_groups_and_connects_cpus_in_three() -> None:
    """The world, the checkpoint's, and dp's, which counts tokens: 2 (N - 1) + dp - 1 sockets a rank, not 12 meshes."""
    mesh = started(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        context_parallel_size=2,
        data_parallel_size=8,
        zero_stage=1,
    )
    assert counted() == (10, 3)
    assert [moves(axis) for axis in (mesh.world, mesh.checkpoint_axis, mesh.dp)] == [BACKEND, "cpu:fake", "cpu:fake"]
    domain = mesh.domains["dense"]
    on_gpus = (mesh.tp, mesh.cp, mesh.pp, mesh.embedding_axis, domain.shard, *mesh.p2p_axes.values())
    assert {moves(axis) for axis in on_gpus} == {"cuda:fake"}
    # Every rank makes every group: 2 of all ranks, tp 128, cp 512, dp 128, shard 64, and 5 kinds over the 128 lines.
    assert _world.group_count == 2 + 128 + 512 + 128 + 64 + 4 * 128


def test_a_plain_pipeline_has_two_lines_and_a_looped_one_four() -> None:
    sizes = {"pipeline_model_parallel_size": 8, "tensor_model_parallel_size": 8, "data_parallel_size": 16}
    assert set(started(**sizes).p2p_axes) == {("F", True), ("B", False)}
    dist.destroy_process_group()
    looped = started(**sizes, num_layers_per_virtual_pipeline_stage=1)
    assert set(looped.p2p_axes) == {("F", True), ("F", False), ("B", True), ("B", False)}


def test_copies_of_shards_and_experts_add_a_group_each() -> None:
    sizes = {"tensor_model_parallel_size": 8, "data_parallel_size": 128, "zero_stage": 1}
    started(**sizes)
    plain, _ = counted()
    dist.destroy_process_group()
    started(**sizes, num_distributed_optimizer_instances=8)
    assert counted() == (plain + 1, 3)
    dist.destroy_process_group()
    started(**sizes, expert_model_parallel_size=8, expert_tensor_parallel_size=1, has_experts=True)
    assert counted() == (plain + 2, 3)


def test_neighbours_that_keep_what_is_gathered_add_a_group() -> None:
    """Of tp 8 with 128 data ranks: 64 of two copies, in eights; and of experts those that hold the same ones."""
    sizes = {"tensor_model_parallel_size": 8, "data_parallel_size": 128, "zero_stage": 3}
    sizes |= {"num_distributed_optimizer_instances": 2}
    started(**sizes)
    (plain, _), made = counted(), _world.group_count
    dist.destroy_process_group()
    dense = started(**sizes, zero_hpz_partition_size=8).domains["dense"]
    assert counted() == (plain + 1, 3)
    assert _world.group_count == made + 128  # on every rank, each of the 1,024 is in one
    assert dense.secondary.ranks == tuple(range(5, 64, 8))  # data ranks 0 to 7 of tp rank 5
    assert moves(dense.secondary) == "cuda:fake"
    mesh = dense.secondary_mesh
    assert mesh is not None and tuple(mesh.mesh.flatten().tolist()) == dense.shard.ranks
    assert mesh.mesh[0].tolist() == list(dense.secondary.ranks)
    assert mesh.get_group("secondary") is dense.secondary.group
    dist.destroy_process_group()
    experts = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 2, "has_experts": True}
    alike = started(**sizes, zero_hpz_partition_size=8, **experts).domains["experts"]
    assert alike.secondary.ranks == (5, 21, 37, 53)  # of the 64 ranks above those that hold what rank 5 does


def test_the_part_of_a_backend_for_a_device() -> None:
    assert backend_of("cuda", "cpu:gloo,cuda:nccl") == "cuda:nccl"
    assert backend_of("cpu", "gloo") == "gloo"
    assert backend_of("cpu", "ucc", otherwise="gloo") == "gloo"


class Options:
    """Stands for ProcessGroupNCCL.Options, which a torch without CUDA lacks."""

    def __init__(self, *, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=None)


def test_what_a_layer_waits_for_goes_first_and_lines_between_stages_take_few_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    minutes = timedelta(minutes=3)
    for name in ("tp", "cp", "ep", "etp", "F up", "B down"):
        options = options_of(name, "cuda:nccl", minutes)
        assert (options.is_high_priority_stream, options._timeout) == (True, minutes)
        assert options.config.max_ctas == (LINE_BLOCKS if " " in name else None)
        assert options is not options_of(name, "cuda:nccl", minutes)  # torch writes the ranks of its group into it
    for name, backend in (("shard", "cuda:nccl"), ("tp", "cpu:gloo"), ("tp", "cpu:gloo,cuda:nccl"), ("tp", None)):
        assert options_of(name, backend, minutes) is None
    assert options_of("tp", "nccl", None)._timeout == timedelta(minutes=10)


def test_every_group_of_a_mesh_gets_the_options_of_its_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lines the names are those of the mesh, not only of the test above."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(mesh_module, "options_of", lambda name, backend, _: asked.setdefault(name, backend) and None)
    mesh = started(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2)
    assert {line.name for line in mesh.p2p_axes.values()} <= {name for name in asked if name.endswith(LINE_ENDS)}
    assert set(WAITED_FOR) & asked.keys() == {"tp", "cp"}
