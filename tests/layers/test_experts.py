"""Tests of routed experts on ranks: outputs and gradients are those of a loop over tokens, however they are cut."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor

from megatronish.core.layout import ExpertLayout, Layout
from megatronish.launch.place import Place
from megatronish.layers.dispatch import combine, dispatch, make_route
from megatronish.layers.experts import Experts
from megatronish.layers.router import Router, RouterSettings
from megatronish.parallel import comm
from megatronish.parallel.mesh import ExpertParallel, Mesh, leave

E, K, D, F_SIZE, T = 8, 3, 12, 20, 30


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Router [E, D], gate and up [E, 2, F, D], down [E, D, F], tokens [8 T, D]."""
    return drawn((E, D), (E, 2, F_SIZE, D), (E, D, F_SIZE), (8 * T, D), seed=3)  # type: ignore[return-value]


def biases() -> tuple[Tensor, Tensor]:
    """Of gate and up [E, 2, F], and of down [E, D]."""
    return drawn((E, 2, F_SIZE), (E, D), seed=4)  # type: ignore[return-value]


def drawn(*sizes: tuple[int, ...], seed: int) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=made, dtype=torch.float64) for size in sizes)


class Seen(NamedTuple):
    """Output of this rank's tokens, their gradient, and the summed gradient of this rank's part of each parameter."""

    y: Tensor
    dx: Tensor
    dgate_up: Tensor
    ddown: Tensor
    dbiases: list[Tensor]
    place: tuple[int, int]


def swiglu(x: Tensor) -> Tensor:
    """[N, 2 F] -> [N, F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def by_token(x: Tensor, settings: RouterSettings, *, bias: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The same, token by token and expert by expert.

    With autograd's gradients of router, gate_up, down, x, and of the biases.
    """
    router, gate_up, down, _ = (each.clone().requires_grad_() for each in weights())
    of_features, of_output = ((each * bias).requires_grad_() for each in biases())
    x = x.clone().requires_grad_()
    outputs = []
    for token in x:
        logits = router @ token
        if settings.before_choice:
            probabilities = logits.softmax(-1)
            chosen = probabilities.topk(K).indices
            weight = probabilities[chosen]
        else:
            chosen = logits.topk(K).indices
            weight = logits[chosen].softmax(-1)
        y = torch.zeros(D, dtype=x.dtype)
        for w, e in zip(weight, chosen, strict=True):
            gate, up = gate_up[e] @ token + of_features[e]
            y = y + w * (down[e] @ (F.silu(gate) * up) + of_output[e])
        outputs.append(y)
    whole = torch.stack(outputs)
    whole.square().sum().backward()
    return whole.detach(), [each.grad for each in (router, gate_up, down, x, of_features, of_output)]  # type: ignore[misc]


def on_a_rank(place: Place, ep: int, etp: int, before_choice: bool, num_tokens: list[int], bias: bool) -> Seen:
    size = place.world_size
    mesh = Mesh.start(Layout(dp=size), rank=place.rank, init_method=place.rendezvous, experts=ExpertLayout(ep, etp))
    parallel = mesh.experts
    settings = RouterSettings(E, K, before_choice=before_choice)
    router_weight, gate_up, down, tokens = weights()
    router = Router(D, settings, init_std=1.0).double()
    experts = Experts(
        *(E, D, F_SIZE),
        sections=("gate", "up"),
        activate=swiglu,
        parallel=parallel,
        init_std=1.0,
        output_std=1.0,
        bias=bias,
    ).double()
    router.weight.data.copy_(router_weight)
    first, part = parallel.ep.rank * E // ep, parallel.etp.rank * F_SIZE // etp
    local, features = slice(first, first + E // ep), slice(part, part + F_SIZE // etp)
    experts.gate_up.weight.data.copy_(gate_up[local, :, features])
    experts.down.weight.data.copy_(down[local, :, features])
    if bias:
        columns = slice(parallel.etp.rank * D // etp, (parallel.etp.rank + 1) * D // etp)
        experts.gate_up.bias.data.copy_(biases()[0][local, :, features])
        experts.down.bias.data.copy_(biases()[1][local, columns])
    begin = sum(num_tokens[: place.rank])
    x = tokens[begin : begin + num_tokens[place.rank]].clone().requires_grad_()
    routing = router(x)
    choices = comm.start_all_gather(routing.choices, parallel.etp).wait()
    route = make_route(choices, num_experts=E, ep=parallel.ep)
    y = experts(x, routing.weights.double(), route)
    y.square().sum().backward()
    assert x.grad is not None and experts.gate_up.weight.grad is not None and experts.down.weight.grad is not None
    seen = Seen(
        y.detach(),
        x.grad,
        experts.gate_up.weight.grad,
        experts.down.weight.grad,
        [experts.gate_up.bias.grad, experts.down.bias.grad] if bias else [],
        (parallel.ep.rank, parallel.etp.rank),
    )
    leave()
    return seen


@pytest.mark.parametrize(
    ("ep", "etp", "num_tokens"),
    [
        (1, 1, [30]),
        (2, 1, [30, 17]),
        (2, 1, [0, 25]),
        (1, 2, [14, 14]),
        (2, 2, [9, 9, 12, 12]),
        (4, 1, [5, 0, 21, 3]),
    ],
)
@pytest.mark.parametrize("before_choice", [False, True])
def test_experts_on_ranks_are_a_loop_over_tokens(ep: int, etp: int, num_tokens: list[int], before_choice: bool) -> None:
    ranks = run_ranks(len(num_tokens), on_a_rank, ep, etp, before_choice, num_tokens, False)
    x = weights()[-1][: sum(num_tokens)]
    y, (_, dgate_up, ddown, dx, *_) = by_token(x, RouterSettings(E, K, before_choice=before_choice))
    # The router computes in fp32, so do the weights of choices: the rest is fp64.
    assert torch.allclose(torch.cat([seen.y for seen in ranks]), y, rtol=1e-5, atol=1e-5)
    assert torch.allclose(torch.cat([seen.dx for seen in ranks]), dx, rtol=1e-4, atol=1e-3)
    for seen in ranks:
        e, t = seen.place
        local, features = slice(e * E // ep, (e + 1) * E // ep), slice(t * F_SIZE // etp, (t + 1) * F_SIZE // etp)
        assert torch.allclose(seen.dgate_up, dgate_up[local, :, features], rtol=1e-4, atol=1e-3)
        assert torch.allclose(seen.ddown, ddown[local, :, features], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("ep", "etp", "num_tokens"), [(1, 1, [30]), (2, 1, [0, 25]), (1, 2, [14, 14])])
def test_biases_are_added_once_before_the_weights(ep: int, etp: int, num_tokens: list[int]) -> None:
    ranks = run_ranks(len(num_tokens), on_a_rank, ep, etp, False, num_tokens, True)
    x = weights()[-1][: sum(num_tokens)]
    y, (_, dgate_up, ddown, dx, *dbiases) = by_token(x, RouterSettings(E, K), bias=True)
    assert torch.allclose(torch.cat([seen.y for seen in ranks]), y, rtol=1e-5, atol=1e-5)
    assert torch.allclose(torch.cat([seen.dx for seen in ranks]), dx, rtol=1e-4, atol=1e-3)
    for seen in ranks:
        e, t = seen.place
        local, features = slice(e * E // ep, (e + 1) * E // ep), slice(t * F_SIZE // etp, (t + 1) * F_SIZE // etp)
        columns = slice(t * D // etp, (t + 1) * D // etp)
        expected = [dgate_up[local, :, features], ddown[local, :, features]]
        expected += [dbiases[0][local, :, features], dbiases[1][local, columns]]
        for mine, whole in zip((seen.dgate_up, seen.ddown, *seen.dbiases), expected, strict=True):
            assert torch.allclose(mine, whole, rtol=1e-4, atol=1e-3)


def test_a_token_travels_as_a_row_for_each_choice_and_comes_back() -> None:
    alone = ExpertParallel()
    choices = torch.tensor([[3, 1], [0, 3], [1, 2]])
    x = torch.arange(6, dtype=torch.float32).view(3, 2)
    route = make_route(choices, num_experts=4, ep=alone.ep)
    rows = dispatch(x, route, ep=alone.ep)
    assert route.groups.sizes == (1, 2, 1, 2)
    assert rows[:, 0].tolist() == [2, 0, 4, 4, 0, 2]
    same = combine(rows, torch.full((3, 2), 0.5), route, ep=alone.ep)
    assert torch.equal(same, x)


@pytest.mark.parametrize(
    ("before_choice", "best", "chosen"),
    [(False, None, [2, 3]), (True, None, [0, 1]), (False, 2, [2, 3]), (False, 1, [0, 1])],
)
def test_groups_are_compared_by_what_experts_are_chosen_by(
    before_choice: bool, best: int | None, chosen: list[int]
) -> None:
    """Logits 10 and -10 add up to less than 4 and 3, and their probabilities to more; the best alone is 10."""
    settings = RouterSettings(4, 2, before_choice=before_choice, num_groups=2, group_topk=1, scores_per_group=best)
    router = Router(4, settings, init_std=1.0)
    router.weight.data.copy_(torch.diag(torch.tensor([10.0, -10.0, 4.0, 3.0])))
    assert router(torch.ones(1, 4)).choices.sort().values.tolist() == [chosen]
