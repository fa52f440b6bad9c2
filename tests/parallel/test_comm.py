"""Tests of collectives against their formulas, forward and backward, on two to four ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, Mesh

WORLD_SIZES = (2, 3, 4)
DIFFERENTIABLE = (comm.reduce_from, comm.reduce_scatter_to_sequence)


def values(rank: int, length: int, *, kind: str = "x") -> Tensor:
    """[length, 2, 3], whole numbers so that sums are exact; in memory not in this order, as callers may have it."""
    generator = torch.Generator().manual_seed(rank if kind == "x" else 100 + rank)
    return torch.randint(-9, 10, (3, 2, length), generator=generator).float().permute(2, 1, 0)


def forward_and_backward(place: Place, function: Callable[..., Tensor], length: int) -> tuple[Tensor, Tensor]:
    """The output for this rank's x, and x's gradient where the output's is this rank's w."""
    tp = Mesh.start(Layout(tp=place.world_size), rank=place.rank, init_method=place.rendezvous).tp
    x = values(place.rank, length).contiguous().requires_grad_()
    y = function(x * 1.0, tp)
    w = values(place.rank, y.shape[0], kind="w")
    before = w.clone()
    y.backward(w)
    assert torch.equal(w, before)
    assert x.grad is not None
    return y.detach(), x.grad


def in_all(world_size: int, function: Callable[..., Tensor], length: int) -> tuple[list[Tensor], list[Tensor]]:
    answers = run_ranks(world_size, forward_and_backward, function, length)
    return [y for y, _ in answers], [grad for _, grad in answers]


def of_all(world_size: int, length: int, *, kind: str = "x") -> list[Tensor]:
    return [values(rank, length, kind=kind) for rank in range(world_size)]


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_reduce_from_is_all_reduce_forward_and_identity_backward(n: int) -> None:
    outputs, gradients = in_all(n, comm.reduce_from, 4)
    assert equal(outputs, [total(of_all(n, 4))] * n)
    assert equal(gradients, of_all(n, 4, kind="w"))


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_reduce_scatter_to_sequence_is_reduce_scatter_forward_and_all_gather_backward(n: int) -> None:
    outputs, gradients = in_all(n, comm.reduce_scatter_to_sequence, 2 * n)
    assert equal(outputs, list(total(of_all(n, 2 * n)).chunk(n)))
    assert equal(gradients, [torch.cat(of_all(n, 2, kind="w"))] * n)


def plain_collectives(place: Place) -> dict[str, Any]:
    world = Mesh.start(Layout(dp=place.world_size), rank=place.rank, init_method=place.rendezvous).world
    x = values(place.rank, 2 * place.world_size)  # not contiguous
    first, second = x.contiguous(), (x + 1).contiguous()
    under_way = [comm.start_all_reduce(first, world), comm.start_all_reduce(second, world)]
    found = {
        "sum": under_way[1].wait(),
        "twice_waited": under_way[1].wait(),
        "in_place": under_way[0].wait() is first,
        "max": comm.all_reduce(x.contiguous(), world, "max"),
        "gathered": comm.start_all_gather(x, world).wait(),
        "scattered": comm.start_reduce_scatter(x, world).wait(),
        "piece": comm.piece_of(x, world).clone(),
    }
    comm.barrier(world)
    return found


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_plain_collectives_do_what_they_say(n: int) -> None:
    xs = of_all(n, 2 * n)
    for rank, found in enumerate(run_ranks(n, plain_collectives)):
        assert found["in_place"]
        assert torch.equal(found["sum"], total(xs) + n)
        assert torch.equal(found["twice_waited"], found["sum"])
        assert torch.equal(found["max"], torch.stack(xs).amax(0))
        assert torch.equal(found["gathered"], torch.cat(xs))
        assert torch.equal(found["scattered"], total(xs).chunk(n)[rank])
        assert torch.equal(found["piece"], xs[rank].chunk(n)[rank])


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_all_to_all_deals_the_pieces_out_forward_and_backward(n: int) -> None:
    def dealt(kind: str) -> list[Tensor]:
        pieces = [x.chunk(n) for x in of_all(n, 2 * n, kind=kind)]
        return [torch.cat([pieces[source][rank] for source in range(n)]) for rank in range(n)]

    outputs, gradients = in_all(n, comm.all_to_all, 2 * n)
    assert equal(outputs, dealt("x"))
    assert equal(gradients, dealt("w"))


def shifts(place: Place) -> list[Tensor]:
    """Two rings at once, of other sizes, three steps: the second goes on before the first has arrived."""
    cp = Mesh.start(Layout(cp=place.world_size), rank=place.rank, init_method=place.rendezvous).cp
    small, large = values(place.rank, 3), values(place.rank, 500)  # not contiguous
    for _ in range(3):
        coming = comm.start_shift(small, cp)
        large = comm.start_shift(large, cp, tag=1).wait()
        small = coming.wait()
    return [small, large, coming.wait()]


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_shifts_go_round_the_ring_each_under_its_tag(n: int) -> None:
    for rank, found in enumerate(run_ranks(n, shifts)):
        small = values((rank - 3) % n, 3)
        assert equal(found, [small, values((rank - 3) % n, 500), small])


def among_others(place: Place) -> tuple[Tensor, Tensor]:
    """On cp of ranks (0, 2) and (1, 3)."""
    cp = Mesh.start(Layout(cp=2, tp=2), rank=place.rank, init_method=place.rendezvous).cp
    x = values(place.rank, 2)
    return comm.start_shift(x, cp).wait(), comm.all_to_all(x, cp)


def test_an_axis_among_others_is_a_ring_of_its_own() -> None:
    for rank, (shifted, dealt) in enumerate(run_ranks(4, among_others)):
        other = (rank + 2) % 4
        assert torch.equal(shifted, values(other, 2))
        line = sorted((rank, other))
        assert torch.equal(dealt, torch.cat([values(source, 2)[line.index(rank)][None] for source in line]))


def exchange(place: Place) -> list[Tensor]:
    """Every rank sends two tensors to the next, larger tag first, and takes them from the one before, smaller first."""
    pp = Mesh.start(Layout(pp=place.world_size), rank=place.rank, init_method=place.rendezvous).pp
    before, after = (place.rank - 1) % pp.size, (place.rank + 1) % pp.size
    receiving = [comm.start_receive(torch.empty(3, 2, 3), pp, source=before, tag=tag) for tag in (0, 1)]
    sending = [comm.start_send(values(place.rank, 3) + tag, pp, to=after, tag=tag) for tag in (1, 0)]
    received = [pending.wait() for pending in receiving]
    for pending in sending:
        pending.wait()
    return received


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_a_tensor_arrives_where_it_was_sent_to_under_its_tag(n: int) -> None:
    for rank, received in enumerate(run_ranks(n, exchange)):
        sent = values((rank - 1) % n, 3)
        assert equal(received, [sent, sent + 1])


def test_an_axis_of_size_one_sends_nothing_and_hands_the_tensor_back() -> None:
    mesh = Mesh.start()
    assert not dist.is_initialized()  # so any collective would raise
    axes = [mesh.world, mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.embedding_axis, *mesh.p2p_axes.values()]
    assert [(axis.size, axis.rank, axis.group) for axis in axes] == [(1, 0, None)] * len(axes)
    x = torch.ones(4, 2, 3, requires_grad=True)
    assert all(
        function(x, mesh.tp) is x for function in (*DIFFERENTIABLE, comm.all_to_all, comm.piece_of, comm.all_reduce)
    )
    for start in (comm.start_all_reduce, comm.start_all_gather, comm.start_reduce_scatter, comm.start_shift):
        assert start(x, mesh.tp).wait() is x
    comm.barrier(mesh.tp)


def sizes_and_groups(place: Place) -> list[tuple[str, int, int, tuple[int, ...], bool]]:
    mesh = Mesh.start(Layout(pp=2, tp=2), rank=place.rank, init_method=place.rendezvous)
    axes: list[Axis] = [mesh.world, mesh.pp, mesh.dp, mesh.tp, mesh.embedding_axis]
    return [(axis.name, axis.size, axis.rank, axis.ranks, axis.group is not None) for axis in axes]


def test_among_many_ranks_too_an_axis_of_size_one_has_no_group() -> None:
    assert run_ranks(4, sizes_and_groups)[3] == [
        ("world", 4, 3, (0, 1, 2, 3), True),
        ("pp", 2, 1, (1, 3), True),
        ("dp", 1, 0, (3,), False),
        ("tp", 2, 1, (2, 3), True),
        ("embedding", 2, 1, (1, 3), True),
    ]
