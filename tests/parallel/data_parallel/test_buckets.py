"""Tests of gradient buckets: reduced over the right ranks, in fp32, and during backward."""

import gc
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.parallel.data_parallel.data_parallel import DataParallelSettings, Overlap
from megatronish.parallel.data_parallel.gradients import Bucket, BucketPlan, GradientBuckets, Source, plan_buckets
from megatronish.parallel.mesh import Axis, Domain, Mesh
from megatronish.parallel.sharding import Cut, Sharding

ALONE = Axis("alone")
NUM_LAYERS = 4
WHOLE_BACKWARD: frozenset[Source] = frozenset({(0, "B")})


def chain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Four matrices of six by six in a row: backward finishes them last first."""
    layers = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(NUM_LAYERS)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers.to(dtype)


def plans_of(
    parameters: dict[str, nn.Parameter],
    shardings: dict[str, Sharding] | None = None,
    *,
    tp: Axis = ALONE,
    embedding: Axis = ALONE,
    data: Axis = ALONE,
    bucket_size: int = 36,
    sources: dict[str, frozenset[Source]] | None = None,
) -> list[BucketPlan]:
    plain = {name: Sharding(tuple(parameter.shape), cuts=(Cut(0, "tp"),)) for name, parameter in parameters.items()}
    return plan_buckets(
        parameters,
        plain | (shardings or {}),
        {"dense": Domain(replicate=data, model={"tp": tp}, holders={"ends": embedding})},
        bucket_size=bucket_size,
        alignment=4,
        sources=sources or dict.fromkeys(parameters, WHOLE_BACKWARD),
    )


def buckets_of(
    parameters: dict[str, nn.Parameter],
    shardings: dict[str, Sharding] | None = None,
    *,
    data: Axis = ALONE,
    overlap: bool = True,
    gives_back: bool = False,
    **settings: Any,
) -> GradientBuckets:
    """Whole copies on all of `data`."""
    plans = plans_of(parameters, shardings, data=data, **settings)
    return GradientBuckets(
        parameters, plans, DataParallelSettings(overlap=Overlap(reduce=overlap)), gives_back=gives_back
    )


def views_of(buckets: GradientBuckets) -> dict[str, Tensor]:
    return {name: view for bucket in buckets.buckets for name, view in bucket.views.items()}


def zeros(**sizes: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}


def inputs(rank: int, micro_batch: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * rank + micro_batch))


class Seen(NamedTuple):
    """What a rank saw of a step with two micro-batches."""

    launched_during_first: int
    launched_halfway: int
    launched_after_last: int
    gradients: dict[str, Tensor]
    second_step: dict[str, Tensor]


def a_step(place: Place, overlap: bool) -> Seen:
    mesh = Mesh.start(Layout(dp=place.world_size), rank=place.rank, init_method=place.rendezvous)
    model = chain()
    data = mesh.domains["dense"].replicate
    buckets = buckets_of(dict(model.named_parameters()), data=data, overlap=overlap, gives_back=True)
    assert [bucket.plan.names for bucket in buckets.buckets] == [
        ("3.weight",),
        ("2.weight",),
        ("1.weight",),
        ("0.weight",),
    ]

    def launched() -> int:
        return buckets.num_launched

    halfway: list[int] = []

    def step() -> tuple[int, dict[str, Tensor]]:
        buckets.zero()
        for micro_batch in range(2):
            if micro_batch == 0:
                assert not any(each.untyped_storage().nbytes() for each in views_of(buckets).values())
            if micro_batch == 1:
                during_first = launched()
                buckets.begin_action(("B", 0, 1), True)
            middle = model[:2](inputs(place.rank, micro_batch))
            middle.register_hook(lambda _: halfway.append(launched()))
            model[2:](middle).square().sum().backward()
        after_last = launched()
        buckets.finish_reduction()
        assert during_first == 0
        return after_last, {name: view.clone() for name, view in views_of(buckets).items()}

    after_last, gradients = step()
    seen_halfway = halfway[1]
    return Seen(halfway[0], seen_halfway, after_last, gradients, step()[1])


def expected_gradients(num_ranks: int) -> dict[str, Tensor]:
    model = chain()
    for rank in range(num_ranks):
        for micro_batch in range(2):
            model(inputs(rank, micro_batch)).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_summed_over_micro_batches_and_data_ranks(overlap: bool) -> None:
    expected = expected_gradients(3)
    answers = run_ranks(3, a_step, overlap)
    for seen in answers:
        for name in expected:
            torch.testing.assert_close(seen.gradients[name], expected[name], rtol=1e-5, atol=0)
            assert torch.equal(seen.gradients[name], answers[0].gradients[name])
            assert torch.equal(seen.second_step[name], seen.gradients[name])  # a step starts from zero


def test_reduction_starts_during_the_last_backward() -> None:
    for seen in run_ranks(2, a_step, True):
        assert seen.launched_during_first == 0
        assert seen.launched_halfway == 2  # layers 3 and 2 are on their way while 1 and 0 are still computed
        assert seen.launched_after_last == NUM_LAYERS


def test_without_overlap_reduction_waits_for_the_end() -> None:
    for seen in run_ranks(2, a_step, False):
        assert (seen.launched_halfway, seen.launched_after_last) == (0, 0)


def ready_in_any_order(place: Place) -> tuple[list[int], dict[str, Tensor]]:
    """Rank 0 finishes its gradients first to last, rank 1 last to first; one gradient comes never."""
    mesh = Mesh.start(Layout(dp=2), rank=place.rank, init_method=place.rendezvous)
    parameters = zeros(a=2, b=2, c=2, unused=2, d=2)
    buckets = buckets_of(parameters, data=mesh.domains["dense"].replicate, bucket_size=2)
    buckets.zero()
    buckets.begin_action(("B", 0, 0), True)
    launched = []
    for name in "abcd" if place.rank == 0 else "dcba":
        views_of(buckets)[name].fill_(ord(name) + place.rank)
        buckets.weight_gradient_ready(parameters[name])
        launched.append(buckets.num_launched)
    buckets.finish_reduction()
    return launched, views_of(buckets)


def test_buckets_are_reduced_in_one_order_whatever_order_they_are_ready_in() -> None:
    """Another order would add up gradients of different parameters, in silence."""
    (first, views), (second, same_views) = run_ranks(2, ready_in_any_order)
    assert first == [0, 0, 0, 1]  # in turn: d, unused, c, b, a
    assert second == [1, 1, 1, 1]  # the unused one holds up what is behind it, until `finish`
    for name in "abcd":
        assert views[name].tolist() == same_views[name].tolist() == [2.0 * ord(name) + 1] * 2
    assert views["unused"].tolist() == [0, 0]


def add_up_tied(place: Place) -> tuple[list[tuple[str, ...]], dict[str, list[float]]]:
    """Two tied parameters whose gradients come from one action on the first stage, and from two on the last.

    So it is under zb-h1: an embedding's gradient comes from B, an output layer's from W.
    """
    mesh = Mesh.start(Layout(pp=2), rank=place.rank, init_method=place.rendezvous)
    own = {"first": 8} if place.rank == 0 else {"last": 12}
    parameters = zeros(
        **({"tokens": 3} | own | {"other": 5} if place.rank == 0 else {"other": 5} | own | {"tokens": 3})
    )
    tied = {name: Sharding((size,), tied="ends") for name, size in (("tokens", 3), ("other", 5))}
    kinds = {"tokens": "B", "other": "B" if place.rank == 0 else "W"}
    sources = {name: frozenset({(0, kinds.get(name, "B"))}) for name in parameters}
    embedding = mesh.embedding_axis
    buckets = buckets_of(parameters, tied, embedding=embedding, sources=sources, bucket_size=100)
    buckets.zero()
    for name, view in views_of(buckets).items():
        view.fill_(ord(name[0]) + place.rank)
    buckets.finish_reduction()
    names = [bucket.plan.names for bucket in buckets.buckets if bucket.plan.sharding.tied]
    return names, {name: view.tolist() for name, view in views_of(buckets).items()}


def test_two_tied_parameters_are_summed_over_stages_that_meet_them_in_other_actions() -> None:
    (names, first), (same_names, last) = run_ranks(2, add_up_tied)
    assert names == same_names == [("other",), ("tokens",)]
    for found, own in ((first, "first"), (last, "last")):
        assert found["tokens"] == [2.0 * ord("t") + 1] * 3
        assert found["other"] == [2.0 * ord("o") + 1] * 5
        assert set(found[own]) == {float(ord(own[0]) + (own == "last"))}


def test_a_bucket_closes_once_it_is_large_enough() -> None:
    buckets = buckets_of(zeros(a=5, b=1, c=3, d=9, e=2), bucket_size=4)
    assert [bucket.plan.names for bucket in buckets.buckets] == [("e", "d"), ("c", "b"), ("a",)]
    assert [bucket.plan.size for bucket in buckets.buckets] == [
        16,
        8,
        8,
    ]  # each parameter begins at four elements, 16 bytes
    for name, view in views_of(buckets).items():
        view.fill_(ord(name))
    assert buckets.buckets[1].part.tolist() == [ord("c")] * 3 + [0] + [ord("b")] + [0] * 3


def test_a_bucket_without_exchange_is_small_on_a_cpu() -> None:
    """Where many gradients took their memory at once, the peak of GPT-2 124M was above that of a plain loop."""
    sizes = (1_200_000, 600_000, 900_000, 800_000)

    def found(device: str, data: Axis) -> list[int]:
        parameters = {str(size): nn.Parameter(torch.empty(size, device=device)) for size in sizes}
        return [plan.size for plan in plans_of(parameters, data=data, bucket_size=8_000_000)]

    assert found("cpu", ALONE) == [2_300_000, 1_200_000]
    assert found("cpu", Axis("data", 2, 0)) == found("meta", ALONE) == [3_500_000]


def test_what_replicas_of_shards_exchange_is_in_large_buckets() -> None:
    """The sums of ZeRO-3's rows, which nobody shards further."""
    shared = Domain(
        shard=Axis("shard", 2), replicate=Axis("replicate", 2), model={"tp": ALONE}, holders={"ends": ALONE}
    )
    for domain, number in ((shared, 1), (replace(shared, replicate=ALONE), 2)):
        plans = plan_buckets(
            parameters := zeros(a=2_000_000, b=2_000_000),
            {name: Sharding((2_000_000,)) for name in parameters},
            {"dense": domain.unsharded},
            bucket_size=8_000_000,
            alignment=1,
            sources=dict.fromkeys(parameters, WHOLE_BACKWARD),
        )
        assert len(plans) == number


def kinds(tp: Axis, embedding_axis: Axis) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Of each parameter: the axes that finish its sum, and whether this rank counts it."""
    shardings = {
        "tied": Sharding((4,), cuts=(Cut(0, "tp"),), tied="ends"),
        "cut": Sharding((4,), cuts=(Cut(0, "tp"),)),
        "norm": Sharding((4,)),
        "partial": Sharding((4,), partial_over=frozenset({"tp"})),
    }
    plans = plans_of(
        zeros(tied=4, cut=4, norm=4, partial=4), shardings, tp=tp, embedding=embedding_axis, bucket_size=100
    )
    if embedding_axis.size > 1:
        assert plans[-1].names == ("tied",)  # middle stages have none, so it comes after all others
    return {name: (tuple(axis.name for axis in plan.sums_over), plan.counted) for plan in plans for name in plan.names}


def test_each_element_is_summed_and_counted_where_its_sharding_says() -> None:
    first, second = (Axis("tp", 2, rank) for rank in (0, 1))
    start, end = (Axis("embedding", 2, rank) for rank in (0, 1))
    alone = {"tied": ((), True), "cut": ((), True), "norm": ((), True), "partial": ((), True)}
    assert kinds(ALONE, ALONE) == alone
    assert kinds(first, ALONE) == alone | {"partial": (("tp",), True)}
    assert kinds(second, ALONE) == alone | {"norm": ((), False), "partial": (("tp",), False)}
    assert kinds(ALONE, start) == alone | {"tied": (("embedding",), True)}
    assert kinds(ALONE, end) == alone | {"tied": (("embedding",), False)}
    assert kinds(second, end) == {
        "tied": (("embedding",), False),
        "cut": ((), True),
        "norm": ((), False),
        "partial": (("tp",), False),
    }


def finish_partial_and_tied(place: Place) -> dict[str, list[float]]:
    mesh = Mesh.start(Layout(pp=3, tp=2), rank=place.rank, init_method=place.rendezvous)
    shardings = {
        "norm": Sharding((2,), partial_over=frozenset({"tp"})),
        "tied": Sharding((2,), cuts=(Cut(0, "tp"),), tied="ends"),
    }
    sizes = {"norm": 2} if mesh.pp.rank == 1 else {"norm": 2, "tied": 2}
    buckets = buckets_of(
        zeros(**sizes), shardings, data=mesh.domains["dense"].replicate, tp=mesh.tp, embedding=mesh.embedding_axis
    )
    buckets.zero()
    for view in views_of(buckets).values():
        view.fill_(10.0**place.rank)
    buckets.finish_reduction()
    return {name: view.tolist() for name, view in views_of(buckets).items()}


def test_partial_gradients_are_summed_over_tp_and_tied_ones_over_the_first_and_last_stage() -> None:
    answers = run_ranks(6, finish_partial_and_tied)
    norms = [answer["norm"][0] for answer in answers]
    assert norms == [11, 11, 1100, 1100, 110000, 110000]
    assert [answer.get("tied", [None])[0] for answer in answers] == [10001, 100010, None, None, 10001, 100010]


def accumulate(dtype: torch.dtype) -> Tensor:
    """One gradient of 1 and a thousand of 1/1024, of a single element."""
    parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
    buckets = buckets_of({"w": parameter})
    buckets.zero()
    for gradient in [1.0, *[2.0**-10] * 1000]:
        (parameter * gradient).sum().backward()
    buckets.finish_reduction()
    return views_of(buckets)["w"]


def test_gradients_of_bf16_parameters_add_up_in_fp32() -> None:
    """In bf16 the sum would stay 1: a thousandth is less than its last bit."""
    exact = 1 + 1000 / 1024
    for dtype in (torch.float32, torch.bfloat16):
        gradient = accumulate(dtype)
        assert (gradient.dtype, gradient.item()) == (torch.float32, exact)


def test_a_bf16_gradient_leaves_nothing_behind_on_its_parameter() -> None:
    model = chain(torch.bfloat16)
    buckets = buckets_of(dict(model.named_parameters()))
    buckets.zero()
    model(inputs(0, 0).bfloat16()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(bool(view.any()) for view in views_of(buckets).values())


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_taken_has_zeros_where_no_gradient_comes(
    stage: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In padding, and in the place of a parameter that a step does not read."""
    parameters = {name: nn.Parameter(torch.ones(5, dtype=dtype)) for name in ("used", "unused", "other")}
    settings = DataParallelSettings(zero_stage=stage, dtype=dtype)
    buckets = GradientBuckets(parameters, plans_of(parameters, bucket_size=100), settings, gives_back=True)
    (bucket,) = buckets.buckets
    assert bucket.plan.gaps == ((5, 3), (13, 3), (21, 3))
    taken = buckets._whole

    def with_nan(whole: Bucket) -> Bucket:
        is_there = whole.flat is not None and whole.flat.untyped_storage().nbytes() > 0
        for view in () if is_there else taken(whole).views.values():
            view.fill_(torch.nan)
        return taken(whole)

    monkeypatch.setattr(buckets, "_whole", with_nan)
    for _ in range(2):  # steps
        buckets.zero()
        for micro_batch in range(2):
            buckets.begin_action(("B", 0, micro_batch), micro_batch == 1)
            (parameters["used"] * 3 + parameters["other"] * 4).sum().backward()
        buckets.finish_reduction()
        assert bucket.part.view(3, 8).tolist() == [[sum_of] * 5 + [0.0] * 3 for sum_of in (8.0, 0.0, 6.0)]


def test_a_parameter_used_twice_is_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied embedding on a single stage."""
    weight = nn.Parameter(torch.ones(3))
    buckets = buckets_of({"w": weight}, data=Axis("data", 2, 0))  # hooked as among two ranks
    ready: list[tuple[str, Source]] = []
    monkeypatch.setattr(buckets, "mark_ready", lambda name, source: ready.append((name, source)))
    buckets.zero()
    buckets.begin_action(("B", 0, 0), True)
    (weight * 2 + weight * 3).sum().backward()
    assert ready == [("w", (0, "B"))]
    assert views_of(buckets)["w"].tolist() == [5, 5, 5]


def test_a_gradient_from_two_places_is_final_when_both_have_delivered_for_the_last_time() -> None:
    """As a tied embedding's is, in the backward of one chunk and the weight gradients of another."""
    parameters = zeros(tied=2, plain=2)
    sources = {"tied": frozenset({(0, "B"), (1, "W")}), "plain": frozenset({(1, "W")})}
    buckets = buckets_of(parameters, bucket_size=2, sources=sources)

    def delivered(kind: str, chunk: int, *, is_last: bool) -> int:
        buckets.begin_action((kind, chunk, 0), is_last)
        for parameter in parameters.values():
            buckets.weight_gradient_ready(parameter)
        return buckets.num_launched

    for _ in range(2):  # steps
        buckets.zero()
        assert delivered("W", 1, is_last=False) == 0
        assert delivered("B", 1, is_last=True) == 0  # autograd reports a weight whose gradient was deferred as well
        assert delivered("W", 1, is_last=True) == 1
        assert delivered("B", 0, is_last=True) == 2
        buckets.finish_reduction()


def test_scaling_scales_every_gradient() -> None:
    buckets = buckets_of(zeros(a=2, b=3), bucket_size=1)
    for part in buckets.parts:
        part.fill_(2.0)
    buckets.scale(0.25)
    values: list[Any] = [view.tolist() for view in views_of(buckets).values()]
    assert values == [[0.5] * 3, [0.5] * 2]


@pytest.mark.long
def test_buckets_go_when_nobody_holds_them() -> None:
    """A hook that held them would be a cycle through autograd, which Python cannot see."""
    parameters = zeros(a=2)
    buckets = buckets_of(parameters, data=Axis("data", 2, 0))
    seen = weakref.ref(buckets)
    del buckets
    gc.collect()
    assert seen() is None
