"""Tests of weight gradients that layers add themselves, at once or after the last W action: autograd's sums."""

from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from sweeps import some_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    deferrable_weights,
    split_backward,
)
from megatronish.layers.product import Product
from megatronish.layers.vocabulary import TiedOutputLayer, VocabParallelEmbedding, vocab_parallel_cross_entropy
from megatronish.layers.weight_gradients import WeightGradients, add_in_place
from megatronish.model.batch import MicroBatch
from megatronish.ops import gradient_sum
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel.data_parallel.data_parallel import DataParallelSettings
from megatronish.parallel.data_parallel.gradients import Bucket, GradientBuckets, Source, plan_buckets
from megatronish.parallel.mesh import Axis, Mesh, TensorParallel, dense_domain
from megatronish.parallel.pipeline.executor import Boundary, ChunkOutput, Executor
from megatronish.parallel.schedules.plan import Action
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.schedules.timeline import label
from megatronish.parallel.sharding import collect_shardings, initialize

S, B, D, VOCABULARY = 6, 2, 8, 12
NUM_MICROBATCHES = 3
TIED = "tokens.weight"


class Case(NamedTuple):
    """One way to compute the gradients of the same model."""

    schedule: str
    num_chunks: int = 1
    sequence_parallel: bool = False
    bf16: bool = False
    checkpointed: bool = False
    in_place: bool = False
    unrounded: bool = False
    """As a GEMM on CUDA sums bf16: products are added to the sums in fp32."""


class Net(nn.Module):
    """An embedding, two residual MLPs and the embedding again as the head; in one chunk, or in two halves."""

    def __init__(self, tp: Axis, case: Case) -> None:
        super().__init__()
        self.tp, self.case = TensorParallel(tp, case.sequence_parallel), case
        self.tokens = VocabParallelEmbedding(VOCABULARY, VOCABULARY, D, tp=self.tp, init_std=1.0, tied=True)
        self.first, self.second = (self.mlp() for _ in range(2))
        self.head = TiedOutputLayer(self.tokens)

    def mlp(self) -> nn.Sequential:
        column = ColumnParallelLinear(D, 2 * D, tp=self.tp, bias=True, init_std=0.5)
        row = RowParallelLinear(2 * D, D, tp=self.tp, bias=True, init_std=0.5)
        return nn.Sequential(column, nn.GELU(), row)

    def residual(self, mlp: nn.Sequential, x: Tensor) -> Tensor:
        return x + (checkpoint(mlp, x, use_reentrant=False) if self.case.checkpointed else mlp(x))

    def start(self, x: Tensor | None, batch: MicroBatch, /, *, step: int | None) -> ChunkOutput:
        assert x is None and step == 0
        return ChunkOutput(self.residual(self.first, self.tokens(batch.tokens)), {})

    def end(self, x: Tensor | None, batch: MicroBatch, /, *, step: int | None) -> ChunkOutput:
        assert x is not None and step == 0
        logits = self.head(self.residual(self.second, x))
        losses = vocab_parallel_cross_entropy(logits, batch.labels.t(), vocab_size=VOCABULARY, tp=self.tp.axis)
        loss = losses.sum()
        return ChunkOutput(loss, {"loss": loss.detach()})

    def whole(self, x: Tensor | None, batch: MicroBatch, /, *, step: int | None) -> ChunkOutput:
        return self.end(self.start(x, batch, step=step).x, batch, step=step)

    def sources(self) -> dict[str, frozenset[Source]]:
        """The embedding's gradient comes from the first chunk's backward and from the last one's product."""
        last = self.case.num_chunks - 1
        split = self.head.weight_gradients is not None
        found: dict[str, frozenset[Source]] = {}
        for name, parameter in self.named_parameters():
            kind = "W" if split and parameter in deferrable_weights(self) else "B"
            found[name] = frozenset({(last if name.startswith("second") else 0, kind)})
        return found | {TIED: frozenset({(0, "B"), (last, "W" if split else "B")})}


class Poisoned(GradientBuckets):
    """Buckets whose memory holds NaN where it is taken and not written, as it may."""

    def _whole(self, bucket: Bucket) -> Bucket:
        is_there = bucket.flat is not None and bucket.flat.untyped_storage().nbytes() > 0
        whole = super()._whole(bucket)
        for name in () if is_there else whole.plan.names:
            whole.views[name].fill_(torch.nan)
        return whole


class Noted(WeightGradients):
    """Notes how many positions of each x are kept, and how many buckets are on their way after each delivery."""

    def __init__(self, buckets: GradientBuckets) -> None:
        def delivered(weight: nn.Parameter) -> None:
            buckets.weight_gradient_ready(weight)
            self.launched.append(buckets.num_launched)

        super().__init__(buckets.sum_of, delivered=delivered)
        self.lengths: set[int] = set()
        self.launched: list[int] = []

    def defer(self, weight: nn.Parameter, dy: Tensor, x: Tensor, *, axis: Axis, product: Product) -> None:
        self.lengths.add(x.shape[0])
        super().defer(weight, dy, x, axis=axis, product=product)


def batches(data_rank: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(data_rank)
    found = []
    for _ in range(NUM_MICROBATCHES):
        tokens, labels = torch.randint(VOCABULARY, (2, B, S), generator=generator)
        found.append(MicroBatch(tokens, labels, torch.ones(B, S, dtype=torch.bool), tokens, torch.arange(B)))
    return found


class Seen(NamedTuple):
    """`launched` is the number of buckets on their way when each action starts, and after each delivery of a W."""

    loss: float
    gradients: dict[str, Tensor]
    lengths: set[int]
    launched: list[tuple[str, int]]
    launched_in_w: list[int]


def train(place: Place, layout: Layout, cases: list[Case]) -> list[Seen]:
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous)
    seen = []
    for case in cases:
        unrounded = case.unrounded
        with patch.object(gradient_sum, "sums_unrounded", lambda *_, answer=unrounded: answer):
            seen.append(gradients(mesh, case))
    return seen


def gradients(mesh: Mesh, case: Case) -> Seen:
    """What a step of the case leaves in the buckets; a second step after it leaves the same."""
    schedule, net = SCHEDULES[case.schedule], Net(mesh.tp, case)
    shardings = collect_shardings(net)
    initialize(net, shardings, seed=1, domains=dense_domain(mesh.tp))
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    parameters = dict(net.to(dtype).named_parameters())
    if schedule.has_weight_gradients:
        split_backward(
            net, WeightGradients(lambda weight: GradientSum(weight))
        )  # so that `sources` knows; replaced below
    settings = DataParallelSettings(dtype=dtype)
    plans = plan_buckets(
        parameters, shardings, mesh.domains, bucket_size=1, alignment=settings.alignment, sources=net.sources()
    )
    buckets = Poisoned(parameters, plans, settings, gives_back=True)
    views = {name: buckets.sums[parameter] for name, parameter in parameters.items()}
    queue = Noted(buckets)
    split_backward(net, queue if schedule.has_weight_gradients else None)
    if case.in_place:
        add_in_place(net, buckets.sum_of)
    executor = Executor(
        [net.whole] if case.num_chunks == 1 else [net.start, net.end],
        schedule.place(num_stages=1, num_chunks=case.num_chunks),
        p2p_axes=mesh.p2p_axes,
        boundary=Boundary(D, dtype, mesh.device),
        weight_gradients=queue if schedule.has_weight_gradients else None,
    )
    (actions,) = schedule.plan(num_stages=1, num_chunks=case.num_chunks, num_microbatches=NUM_MICROBATCHES)
    launched: list[tuple[str, int]] = []

    def starting(action: Action, is_last: bool) -> None:
        launched.append((label(action, num_chunks=case.num_chunks), buckets.num_launched))
        buckets.begin_action(action, is_last)

    seen: list[Seen] = []
    for _ in range(2):
        launched.clear()
        queue.launched.clear()
        buckets.zero()
        loss = float(executor.run(actions, batches(mesh.dp.rank), step=0, begin_action=starting)["loss"])
        buckets.finish_reduction()
        found = {name: view.clone() for name, view in views.items()}
        seen.append(Seen(loss, found, queue.lengths, list(launched), list(queue.launched)))
    first, second = seen
    assert all(torch.equal(first.gradients[name], gradient) for name, gradient in second.gradients.items())
    assert second._replace(gradients={}) == first._replace(gradients={})
    assert not queue.pending
    return first


LATER = (("zb-h1", 1), ("zb-v", 2))
CASES = [
    (kind, variant)
    for kind in ("alone", "tp", "sequence_parallel", "dp")
    for variant in ("plain", "checkpointed", "bf16")
]
CHOSEN = [("alone", "bf16"), ("tp", "plain"), ("sequence_parallel", "checkpointed"), ("dp", "plain")]


@pytest.mark.parametrize(("kind", "variant"), some_of(CASES, CHOSEN))
def test_deferred_weight_gradients_are_those_of_an_undivided_backward(kind: str, variant: str) -> None:
    """The tied embedding too, whose gradient comes from one chunk's B and from another's W."""
    layout = {"alone": Layout(), "dp": Layout(dp=2)}.get(kind, Layout(tp=2))
    bf16, cut = variant == "bf16", kind == "sequence_parallel"
    cases = [
        Case(schedule, num_chunks, sequence_parallel=cut, bf16=bf16, checkpointed=variant == "checkpointed")
        for schedule, num_chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))
    ]
    cases += [] if bf16 else [cases[0]._replace(in_place=True), cases[-1]._replace(in_place=True)]
    for whole, *others in run_ranks(layout.world_size, train, layout, cases):
        for case, seen in zip(cases[1:], others, strict=True):
            assert seen.loss == whole.loss
            assert not (case.in_place and case.schedule == "1f1b") or seen.launched == whole.launched
            if SCHEDULES[case.schedule].has_weight_gradients:
                # A row-parallel layer's input is cut along its features, not along the sequence.
                assert seen.lengths == ({S // layout.tp, S} if cut else {S})
            for name, gradient in seen.gradients.items():
                assert gradient.dtype == torch.float32
                # The two parts of the tied gradient meet in bf16 in an undivided backward, here in fp32. A sum is
                # rounded as its terms are large, also where they cancel: two roundings of the largest element.
                share = 2**-7 if bf16 and name == TIED else 2**-22
                atol = max(1e-6, share * float(gradient.abs().max()))
                torch.testing.assert_close(gradient, whole.gradients[name], rtol=1e-5, atol=atol, msg=name)
                assert not bf16 or name == TIED or torch.equal(gradient, whole.gradients[name])


@pytest.mark.parametrize("kind", some_of(["alone", "tp", "sequence_parallel", "dp"], ["alone", "sequence_parallel"]))
def test_weight_gradients_in_bf16_are_summed_in_fp32_where_the_product_adds_them(kind: str) -> None:
    """At once and by W actions alike, checkpointed or not, tied or not: not rounded to bf16, and close to what is."""
    layout = {"alone": Layout(), "dp": Layout(dp=2)}.get(kind, Layout(tp=2))
    rounded = Case("1f1b", sequence_parallel=kind == "sequence_parallel", bf16=True)
    at_once = rounded._replace(in_place=True, unrounded=True)
    cases = [
        at_once,
        at_once._replace(checkpointed=True),
        *(at_once._replace(schedule=schedule, num_chunks=chunks) for schedule, chunks in LATER),
    ]
    for plain, first, *others in run_ranks(layout.world_size, train, layout, [rounded, *cases]):
        assert first.loss == plain.loss and first.launched == plain.launched
        for name, gradient in first.gradients.items():
            apart = float((gradient - plain.gradients[name]).abs().max())
            assert apart <= NUM_MICROBATCHES * layout.dp * 2**-8 * float(gradient.abs().max()), name
            is_product = name.endswith("weight") and gradient.dim() == 2
            assert not is_product or not torch.equal(gradient.bfloat16().float(), gradient), name
            for other in others:
                torch.testing.assert_close(other.gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_adds_products_to_sums_in_fp32(dtype: torch.dtype) -> None:
    assert gradient_sum.sums_unrounded("cuda", dtype)
    a, b = (torch.randn(shape, device="cuda").to(dtype) for shape in ((257, 96), (257, 33)))
    product = a.double().t() @ b.double()
    total = torch.full((96 * 33 + 1,), torch.nan, device="cuda")[1:].view(96, 33)  # misaligned, as a bucket's may be
    for number in (1, 2):
        GradientSum(total, is_new=number == 1).add_product(a.t(), b)
        torch.testing.assert_close(total.double(), number * product, rtol=1e-5, atol=1e-4)


def test_buckets_leave_while_the_last_weight_gradients_are_computed() -> None:
    """And not before: what an earlier W adds is not yet the whole."""
    for seen, v_shaped in run_ranks(2, train, Layout(dp=2), [Case("zb-h1"), Case("zb-v", 2)]):
        assert seen.launched[:-1] == [(name, 0) for name in ("F0", "B0", "W0", "F1", "B1", "W1", "F2", "B2")]
        # Delivered: head, second.2, second.0, first.2, first.0. Buckets go in the reverse of the model's order: biases,
        # final since B2, leave around the weights of their layers, the last layer's before W2; last is where it embeds.
        assert seen.launched[-1] == ("W2", 1) and seen.launched_in_w == [0] * 10 + [1, 3, 5, 7, 9]
        # The second chunk's leave before the first chunk's last backward.
        assert dict(v_shaped.launched) == dict.fromkeys(dict(v_shaped.launched), 0) | {"W2b": 1, "B2a": 4, "W2a": 5}
        assert v_shaped.launched_in_w == [0] * 10 + [1, 3, 4, 7, 9]


def test_the_weights_whose_gradients_are_deferred_are_those_of_linear_layers_and_of_a_tied_head() -> None:
    net = Net(Axis("tp"), Case("1f1b"))
    names = {parameter: name for name, parameter in net.named_parameters()}
    assert {names[weight] for weight in deferrable_weights(net)} == {
        "first.0.weight",
        "first.2.weight",
        "second.0.weight",
        "second.2.weight",
        TIED,
    }
    assert deferrable_weights(net.head) == {net.tokens.weight}
    assert deferrable_weights(net.tokens) == set()
