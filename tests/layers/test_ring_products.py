"""Tests of products by pieces: what they send, what they hide, and where they are refused or idle."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import problems, small
from exchange_order import order_of
from ranks import run_ranks
from torch.distributed import _symmetric_memory
from torch.testing import assert_close

from megatronish.config.read import read_config
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers.ring_products import ScatteredProduct, gathered_product, scattered_product
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel import comm, symmetric
from megatronish.parallel.mesh import Axis, Mesh, TensorParallel, leave

RING = "--sequence-parallel --tp-comm-overlap"


def compare(place: Place, shares_memory: bool) -> None:
    """Both products, and the gradients of the second one, with those of the collectives, in doubles."""
    mesh = Mesh.start(Layout(tp=place.world_size), rank=place.rank, init_method=place.rendezvous)
    tp, parallel = mesh.tp, TensorParallel(mesh.tp, sequence=True, by_pieces=True, shares_memory=shares_memory)
    generator = torch.Generator().manual_seed(1)
    whole = torch.rand(4 * tp.size, 2, 6, generator=generator, dtype=torch.double)
    weight, bias = (torch.rand(*size, generator=generator, dtype=torch.double) for size in ((5, 6), (5,)))
    mine = comm.piece_of(whole, tp)
    for each in (None, bias):
        assert_close(gathered_product(mine, weight, each, parallel), torch.nn.functional.linear(whole, weight, each))

    terms = whole + tp.rank  # another one on each rank
    reduced = comm.start_reduce_scatter(torch.nn.functional.linear(terms, weight), tp).wait()
    assert_close(scattered_product(terms, weight, parallel), reduced)

    dy = comm.piece_of(torch.nn.functional.linear(whole, weight), tp).contiguous()
    dy_whole, product = comm.start_all_gather(dy, tp).wait(), ScatteredProduct(parallel)
    assert_close(product.input_gradient(dy, weight), dy_whole @ weight)
    gradient, total = product.weight_gradient(dy, terms), torch.zeros_like(weight)
    assert gradient is not None
    assert_close(gradient, dy_whole.flatten(0, 1).t() @ terms.flatten(0, 1))
    product.add_weight_gradient(GradientSum(total), dy, terms)
    assert_close(total, gradient)
    leave()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_products_by_pieces_are_those_of_the_whole(ranks: int) -> None:
    run_ranks(ranks, compare, False)


def compare_fallbacks(place: Place) -> None:
    """The same by torch's operators over symmetric memory, as it computes them itself where there is none."""
    fallbacks = SimpleNamespace(
        fused_all_gather_matmul=_symmetric_memory._fused_all_gather_matmul_fallback,
        fused_matmul_reduce_scatter=_symmetric_memory._fused_matmul_reduce_scatter_fallback,
    )
    with patch.object(symmetric, "_operators", lambda: fallbacks):
        compare(place, True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_over_symmetric_memory_are_those_of_the_whole(ranks: int) -> None:
    run_ranks(ranks, compare_fallbacks)


def test_the_operators_of_symmetric_memory_have_the_form_that_they_are_called_by() -> None:
    operators = symmetric._operators()
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    assert [str(getattr(operators, name).default._schema) for name in names] == [
        "symm_mem::fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
        "bool return_A=True) -> (Tensor?, Tensor[])",
        "symm_mem::fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name)"
        " -> Tensor",
    ]


ONE_MACHINE = [("a", 0), ("a", 1)]


@pytest.mark.parametrize(
    ("device", "group", "places", "can_read", "shares"),
    [
        ("cuda", "nccl", ONE_MACHINE, [True, True], True),
        ("cuda", "nccl", ONE_MACHINE, [True, False], False),
        ("cuda", "nccl", [("a", 0), ("a", 8)], [False, True], False),
        ("cuda", "nccl", [("a", 0), ("b", 1)], [True, True], False),
        ("cuda", "nccl", [("a", 0), ("a", 0)], [True, True], False),
        ("cuda", "fake", ONE_MACHINE, [True, True], False),
        ("cpu", "gloo", ONE_MACHINE, [True, True], False),
        ("cuda", None, [("a", 0)], [True], False),
    ],
    ids=[
        "one machine",
        "one cannot read",
        "one not seen",
        "two machines",
        "each sees one",
        "dry run",
        "CPU",
        "one rank",
    ],
)
def test_memory_is_shared_by_gpus_of_one_machine(
    device: str, group: str | None, places: list[tuple[str, int]], can_read: list[bool], shares: bool
) -> None:
    """This rank is the first; what the others answer is given, and what it answers itself is asked for."""

    def gathered(value: Any, _axis: Axis) -> list[Any]:
        if isinstance(value, tuple):
            return places
        assert value == can_read[0]
        return can_read

    made: Any = None if group is None else SimpleNamespace(name=lambda: group)
    axis = Axis("tp", len(places), 0, tuple(range(len(places))), made)
    with (
        patch.object(comm, "all_gather_object", gathered),
        patch.object(torch.cuda, "device_count", lambda: 8),
        patch.object(torch.cuda, "can_device_access_peer", lambda *_: can_read[0]),
    ):
        assert symmetric.can_share(axis, torch.device(device)) == shares


@pytest.mark.parametrize("tp", [2, 4])
def test_every_hop_is_hidden_by_a_product(tp: int) -> None:
    """Two hops a rank and exchange at tp 3: each has a product of a piece between its start and its wait."""
    recorder = order_of(f"--tp {tp} {RING}")
    for part, exchanges in (("forward", 4), ("backward", 2)):
        hops = [each for each in recorder.of_layer(1, part) if each.start.name in ("tp send", "tp receive")]
        assert len(hops) == 2 * exchanges * (tp - 1)
        assert all(hop.products for hop in hops)
    others = [each for each in recorder.of_layer(1, "forward") if each.start.name not in ("tp send", "tp receive")]
    assert not others, "a forward has no collective that it waits for at once"
    backward = [each for each in recorder.of_layer(1, "backward") if each.start.name not in ("tp send", "tp receive")]
    assert len(backward) == 4  # of column-parallel products: inputs gathered, gradients of inputs reduced
    assert all(each.products for each in backward)


def test_it_needs_a_sequence_that_is_cut() -> None:
    complaint = "tp_comm_overlap cuts products where the sequence is cut; add --sequence-parallel"
    assert complaint in problems(small("--mock-data", "--tp", "2", "--tp-comm-overlap"))
    assert problems(small("--mock-data", "--tp", "2", *RING.split())) == []


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (RING, "tp_comm_overlap is off: it hides exchanges over tensor_model_parallel_size, which is 1"),
        (
            f"{RING} --tp 2 --load never-read --adapter-type lora --quantize-base int8",
            "tp_comm_overlap is idle: quantize_base would be dequantised once a piece",
        ),
    ],
)
def test_a_note_says_where_it_does_nothing(flags: str, note: str) -> None:
    result = read_config(small("--mock-data", *flags.split()))
    assert note in result.notes
    assert not result.config.multiplies_by_pieces
