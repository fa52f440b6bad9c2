"""Tests of the activations that a layer saves, measured against Korthikanti et al. 2022 (arXiv:2205.05198).

The paper counts bytes of a bf16 layer, s tokens, micro-batch b, width h, a heads, t tensor-parallel ranks, with
dropout: sbh(34 + 5 a s / h), of which the 34 are

    attention   norm's input 2, qkv's input 2, q k v 6, core's output 2, dropout mask 1
    MLP         norm's input 2, fc1's input 2, its output 8, fc2's input 8, dropout mask 1

Here no dropout mask is kept, of hidden states or of probabilities: 32 sbh.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from models import bytes_per_score
from ranks import run_ranks
from saved import saved_by

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import AttentionBackend, RecomputeConfig
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers import recompute as layer
from megatronish.layers.dropout import SITES
from megatronish.layers.recompute import Recompute, restoring
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT, Execution
from megatronish.parallel.mesh import Axis, Mesh, TensorParallel, dense_domain
from megatronish.parallel.sharding import collect_shardings, initialize

S, B, H, HEADS = 128, 2, 64, 4
SBH = S * B * H
SCORES = HEADS * S * S * B
KEYS = 2 * 4 * len(SITES)  # of the hashes of masks, in one tensor for all layers
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=H,
    num_attention_heads=HEADS,
    hidden_dropout=0.1,
    attention_dropout=0.0,
    make_vocab_size_divisible_by=8,
)
SMALL = 0.03  # of the formula: means and deviations of norms, log-sum-exps of attention


def batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (B, S + 1), generator=generator)
    mask = torch.ones(B, S, dtype=torch.bool)
    positions = torch.arange(S).repeat(B, 1)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous(), mask, positions, torch.arange(B))


def model_of(
    config: ModelConfig,
    *,
    recompute: Recompute,
    tp: TensorParallel | None = None,
    attention_backend: AttentionBackend = "auto",
) -> GPT:
    model = GPT(
        config,
        vocab_size=50,
        num_positions=S,
        tp=tp,
        execution=Execution(attention_backend=attention_backend, recompute=recompute),
    )
    initialize(model, collect_shardings(model), seed=1, domains=dense_domain(model.tp.axis))
    return model.bfloat16()


def bytes_of(model: GPT) -> int:
    """What a whole forward keeps."""
    with saved_by(model) as saved:
        loss = model(None, batch(), step=0).sum()
    loss.backward()
    return saved.num_bytes


def settings_of(*given: Any, **named: Any) -> Recompute:
    """Recomputation with these fields of its section."""
    return Recompute(RecomputeConfig(*given, **named))


def bytes_per_layer(config: ModelConfig, **settings: Any) -> float:
    """From the difference that layers make: two groups of those that are computed again together."""
    size = max(1, settings["recompute"].config.recompute_num_layers)
    few, many = (
        bytes_of(model_of(replace(config, num_layers=num_layers), **settings)) for num_layers in (size, 3 * size)
    )
    return (many - few) / (2 * size)


def on_rank(place: Place, sequence_parallel: bool, granularity: str | None, shared: bool) -> float:
    mesh = Mesh.start(Layout(tp=place.world_size), rank=place.rank, init_method=place.rendezvous)
    recompute = settings_of(granularity)._replace(shard_axis=mesh.tp if shared else Axis("tp"))
    return bytes_per_layer(MODEL, recompute=recompute, tp=TensorParallel(mesh.tp, sequence_parallel))


def test_a_layer_keeps_32_sbh_bytes_with_flash_attention() -> None:
    assert bytes_per_layer(MODEL, recompute=Recompute()) == pytest.approx(32 * SBH, rel=SMALL)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["auto", "fused_softmax", "unfused"])
def test_the_fused_softmax_keeps_5_bytes_a_score_as_the_paper_torchs_7_and_attention_by_blocks_none(
    backend: AttentionBackend, dropout: float
) -> None:
    """Softmax's output (2, or 4 in fp32), dropout's mask (1), and what dropout left (2)."""
    config = replace(MODEL, attention_dropout=dropout)
    kept = {"auto": (0, 0), "fused_softmax": (2, 5), "unfused": (6, 7)}[backend][dropout > 0]
    assert bytes_per_score(config, backend, 2) == kept
    measured = bytes_per_layer(config, recompute=Recompute(), attention_backend=backend)
    assert measured == pytest.approx(32 * SBH + kept * SCORES, rel=SMALL)


def test_selective_recomputation_keeps_32_sbh_bytes_whatever_the_softmax() -> None:
    """With flash attention it saves nothing: the scores are not kept in any case."""
    backends: tuple[AttentionBackend, ...] = ("auto", "fused_softmax")
    for rate, backend in product((0.0, 0.1), backends):
        config = replace(MODEL, attention_dropout=rate)
        measured = bytes_per_layer(config, recompute=settings_of("selective"), attention_backend=backend)
        assert measured == pytest.approx(32 * SBH, rel=SMALL)


@pytest.mark.parametrize("tp", [2, 4])
def test_selective_recomputation_and_sequence_parallelism_divide_all_by_tp(tp: int) -> None:
    for granularity in (None, "selective"):
        for measured in run_ranks(tp, on_rank, True, granularity, False):
            assert measured == pytest.approx(32 * SBH / tp, rel=SMALL)


def test_tensor_parallelism_alone_divides_24_of_the_32() -> None:
    for measured in run_ranks(2, on_rank, False, None, False):
        assert measured == pytest.approx((8 + 24 / 2) * SBH, rel=SMALL)


def test_full_recomputation_keeps_2_sbh_bytes() -> None:
    """An input a layer, or one for several layers that are computed again together."""
    assert bytes_per_layer(MODEL, recompute=settings_of("full")) == 2 * SBH + KEYS
    assert bytes_per_layer(MODEL, recompute=settings_of("full", recompute_num_layers=3)) == pytest.approx(
        2 * SBH / 3 + KEYS
    )


def test_the_kept_input_can_be_shared_over_tp() -> None:
    assert run_ranks(2, on_rank, False, "full", True) == [SBH + KEYS] * 2
    assert run_ranks(2, on_rank, False, "full", False) == [2 * SBH + KEYS] * 2
    assert run_ranks(2, on_rank, True, "full", False) == [SBH + KEYS] * 2


def test_block_recomputes_the_first_layers_and_keeps_the_others() -> None:
    config = replace(MODEL, num_layers=4)
    whole, block, full = (
        bytes_of(model_of(config, recompute=how))
        for how in (Recompute(), settings_of("full", "block", 1), settings_of("full", "block", 9))
    )
    one = bytes_per_layer(MODEL, recompute=Recompute())
    assert whole - block == pytest.approx(one - 2 * SBH, rel=1e-3)
    assert whole - full == pytest.approx(4 * (one - 2 * SBH), rel=1e-3)


GROUPS: list[tuple[Recompute, list[tuple[str, bool]]]] = [
    (Recompute(), [("abcde", False)]),
    (settings_of("selective"), [("abcde", False)]),
    (settings_of("full"), [(layer, True) for layer in "abcde"]),
    (settings_of("full", "uniform", 2), [("ab", True), ("cd", True), ("e", True)]),
    (settings_of("full", "block", 2), [("a", True), ("b", True), ("cde", False)]),
]


@pytest.mark.parametrize(("how", "groups"), GROUPS)
def test_layers_are_grouped_as_the_method_says(how: Recompute, groups: Sequence[tuple[str, bool]]) -> None:
    assert [("".join(layers), again) for layers, again in how.config.groups(list("abcde")) if layers] == list(groups)


HOWS = [
    settings_of("selective"),
    settings_of("full"),
    settings_of("full", "uniform", 3),
    settings_of("full", "block", 1),
]


@pytest.mark.parametrize("how", HOWS)
def test_what_is_computed_again_is_the_same_in_every_bit_dropout_and_all(how: Recompute) -> None:
    config = replace(MODEL, attention_dropout=0.1)
    found = []
    for recompute in (Recompute(), how):
        model = model_of(config, recompute=recompute).float()
        loss = model(None, batch(), step=0).sum()
        loss.backward()
        found.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("tp", [False, True])
def test_parts_that_are_computed_again_are_the_same_in_every_bit(tp: bool) -> None:
    """The norm's output is read by three products of the heads, the MLP's input by one that is computed again."""
    config = replace(MODEL, attention_dropout=0.1, norm_placement="parallel" if tp else "pre")
    found = []
    for recompute in (Recompute(), settings_of("selective", recompute_modules=("core_attn", "layernorm", "mlp"))):
        model = model_of(config, recompute=recompute).float()
        loss = model(None, batch(), step=0).sum()
        loss.backward()
        found.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_restored_is_not_kept_and_computed_once_for_all_that_read_it() -> None:
    x, weights = torch.randn(4, 3, requires_grad=True), [torch.randn(3, 3, requires_grad=True) for _ in range(3)]
    computed = 0

    def compute() -> tuple[torch.Tensor]:
        nonlocal computed
        computed += 1
        return (torch.sin(x),)

    (y,) = compute()
    memory = weakref.ref(y)
    with restoring((y,), compute):
        outputs = [y @ weights[0], y.t().contiguous().t() @ weights[1], y[1:].t() @ y[1:, :2] @ weights[2][:2]]
    del y
    loss = sum((output.square().sum() for output in outputs), start=torch.zeros(()))
    assert memory() is None and computed == 1, "what is restored is kept"
    loss.backward()
    assert computed == 2
    gradients = [tensor.grad for tensor in (x, *weights)]
    for tensor in (x, *weights):
        tensor.grad = None
    y = torch.sin(x)
    outputs = [y @ weights[0], y.t().contiguous().t() @ weights[1], y[1:].t() @ y[1:, :2] @ weights[2][:2]]
    sum((output.square().sum() for output in outputs), start=torch.zeros(())).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, (x, *weights), strict=True))


def test_an_evaluation_recomputes_nothing() -> None:
    model = model_of(MODEL, recompute=settings_of("full")).float()
    plain = model_of(MODEL, recompute=Recompute()).float()
    with torch.no_grad():
        assert torch.equal(model(None, batch(), step=None), plain(None, batch(), step=None))


@pytest.mark.gpu
def test_inputs_that_wait_in_the_cpus_memory_come_back() -> None:
    found = []
    for recompute in (Recompute(), settings_of("full", offload_saved_activations=True)):
        model = model_of(MODEL, recompute=recompute).cuda()
        with saved_by(model) as saved:
            loss = model(None, batch().to(torch.device("cuda")), step=0).sum()
        loss.backward()
        found.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
        assert saved.num_bytes > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_of_what_is_computed_again_keep_their_strides() -> None:
    """A copy in other strides is summed in another order by the backward before: the last bits would differ."""
    x = torch.randn(4, 6, requires_grad=True)
    strides = []
    for is_again in (False, True):
        y = x * 2
        y.register_hook(lambda gradient: strides.append(gradient.stride()))
        run = torch.t
        (layer.recompute(run, y) if is_again else run(y)).mul(torch.ones(6, 4)).sum().backward()
    assert strides == [(1, 4)] * 2
