"""Tests of the expected memory of a config, against formulas and the Megatron papers."""

from dataclasses import replace
from itertools import product

import pytest
from models import GPT2, LLAMA3_8B, bytes_per_score

from megatronish.config.config import Config
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import AttentionBackend, RecomputeConfig, TrainingConfig
from megatronish.core.layout import Layout
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.memory_table import Memory, format_bytes, memory_table
from megatronish.estimate.costs.model_state import ZeroSettings
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.parallel.stages import Stages
from megatronish.specs.layers import MixedModelConfig, layer_specs


def expect(model: ModelConfig = GPT2, layout: Layout | None = None, **settings: object) -> list[Memory]:
    """Memory of a config: `settings` are fields of its sections, and `num_microbatches`."""
    layout = layout or Layout()
    num_microbatches = settings.pop("num_microbatches", 8)
    recompute = settings.pop("recompute", RecomputeConfig())
    device = settings.pop("device", "cpu")
    of_section = {
        kind: {name: settings.pop(name) for name in set(kind.__annotations__) & set(settings)}
        for kind in (ParallelConfig, TrainingConfig, OptimizerConfig, DataConfig)
    }
    assert not settings, settings
    parallel = ParallelConfig(
        **{
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "context_parallel_size": layout.cp,
            "data_parallel_size": layout.dp,
        }
        | of_section[ParallelConfig]  # type: ignore[arg-type]
    )
    training = TrainingConfig(**{"seq_length": 1024, "micro_batch_size": 4} | of_section[TrainingConfig])  # type: ignore[arg-type]
    optimizer = OptimizerConfig(**of_section[OptimizerConfig])  # type: ignore[arg-type]
    data = DataConfig(**of_section[DataConfig])  # type: ignore[arg-type]
    config = Config(model, parallel, recompute, training, optimizer, data)  # type: ignore[arg-type]
    stages = Stages.of(parallel, model, vocab_size=50257, seq_length=1024)
    loads = stages.loads(num_microbatches)  # type: ignore[arg-type]
    return expected_memory(config, loads, vocab_size=50257, device=device)  # type: ignore[arg-type]


def test_model_state_takes_16_bytes_a_parameter_in_fp32_and_18_with_bf16() -> None:
    padded = 124_439_808 + (50304 - 50257) * 768
    for bf16, optimizer, size in [(False, "adam", 16), (True, "adam", 18), (False, "sgd", 12), (True, "sgd", 14)]:
        (memory,) = expect(bf16=bf16, optimizer=optimizer)
        assert sum(memory[:3]) == size * padded


@pytest.mark.parametrize("dp", [1, 8, 64])
def test_what_zero_shares_is_divided_by_the_ranks_that_share_it(dp: int) -> None:
    count = 124_439_808 + (50304 - 50257) * 768  # divisible by 64
    for stage, bf16, size in [
        (0, True, 18),
        (1, True, 6 + 12 / dp),
        (2, True, 2 + 16 / dp),
        (3, True, 16 / dp),
        (0, False, 16),
        (1, False, 8 + 8 / dp),
        (2, False, 4 + 12 / dp),
        (3, False, 16 / dp),
    ]:
        (memory,) = expect(layout=Layout(dp=dp), bf16=bf16, zero_stage=stage)
        assert sum(memory[:3]) == size * count
        assert memory.host == 0
        assert (memory.temporary > 0) == (stage >= 2)


def test_copies_and_context_parallelism_say_how_many_share() -> None:
    for layout, copies, ranks in [(Layout(dp=8), 2, 4), (Layout(dp=4, cp=2), 1, 8), (Layout(dp=4, cp=2), 4, 2)]:
        sizes = {"data_parallel_size": layout.dp, "context_parallel_size": layout.cp}
        parallel = ParallelConfig(**sizes, zero_stage=1, num_distributed_optimizer_instances=copies)
        assert ZeroSettings.of(Config(parallel=parallel)).ranks == ranks
        assert ZeroSettings.of(Config(parallel=ParallelConfig(**sizes))).ranks == 1


def test_what_is_offloaded_lies_on_the_host() -> None:
    count = 124_439_808 + (50304 - 50257) * 768
    for stage, offload, device, host in [
        (1, "optimizer", 6, 16 / 8),
        (2, "optimizer", 2 + 4 / 8, 16 / 8),
        (3, "optimizer", 8 / 8, 16 / 8),
        (3, "param", 0, 16 / 8),
    ]:
        (memory,) = expect(layout=Layout(dp=8), bf16=True, zero_stage=stage, **{f"{offload}_cpu_offload": True})
        assert (sum(memory[:3]), memory.host) == (device * count, host * count)
        assert memory.total == sum(memory) - memory.host


def test_what_is_offloaded_to_a_disk_lies_neither_on_the_device_nor_on_the_host() -> None:
    """Gradients have no copies; where parameters are offloaded, gradients add up on the host."""
    count = 124_439_808 + (50304 - 50257) * 768
    for stage, offload, device, host in [
        (1, "optimizer", 6, 0),
        (2, "optimizer", 2 + 4 / 8, 0),
        (3, "optimizer", 8 / 8, 0),
        (3, "param", 0, 4 / 8),
    ]:
        flags = {f"{offload}_cpu_offload": True, "offload_folder": "/data"}
        (memory,) = expect(layout=Layout(dp=8), bf16=True, zero_stage=stage, **flags)
        assert (sum(memory[:3]), memory.host, memory.disk) == (device * count, host * count, 12 / 8 * count)
        assert memory.total == sum(memory) - memory.host - memory.disk


def test_what_passes_is_a_few_buckets_or_layers() -> None:
    count, layer = 124_439_808 + (50304 - 50257) * 768, 12 * 768**2 + 13 * 768
    table, matrix = 50304 * 768, 4 * 768**2  # a matrix is never cut
    (buckets,) = expect(layout=Layout(dp=2), zero_stage=2)
    tables = 2 * table  # that of a tied table is there throughout a backward, and another one is filled
    assert 4 * (2 * 8_000_000 + tables) < buckets.temporary < 4 * (2 * (8_000_000 + matrix) + tables)
    (all_of_them,) = expect(layout=Layout(dp=2), zero_stage=2, overlap_grad_reduce=False)
    assert 4 * count <= all_of_them.temporary < 4 * (count + 2 * table)  # and two of the backward before
    (layers,) = expect(layout=Layout(dp=2), zero_stage=3, bf16=True)
    assert layers.temporary == 2 * (2 * (count - 12 * layer - 2 * 768) + 3 * layer)  # without the final norm


def test_activations_follow_the_formula_of_korthikanti() -> None:
    gpt = replace(GPT2, attention_dropout=0.0)
    for tp, sequence_parallel, factor in [(1, False, 32), (4, False, 8 + 24 / 4), (4, True, 32 / 4)]:
        (cost,) = {layer.cost(gpt) for layer in layer_specs(gpt)}
        saved = cost.saved_bytes(seq_length=1024, element_bytes=2)
        assert saved.per_rank(tp, sequence_parallel=sequence_parallel) == factor * 768


@pytest.mark.parametrize(
    ("backend", "dropout", "element_bytes", "expected"),
    [
        ("auto", 0.0, 2, 0),
        ("flash", 0.0, 4, 0),
        ("auto", 0.1, 2, 0),
        ("flash", 0.1, 2, 0),
        ("fused_softmax", 0.1, 2, 5),  # the paper's
        ("fused_softmax", 0.0, 2, 2),
        ("fused_softmax", 0.0, 4, 4),
        ("unfused", 0.1, 2, 7),
        ("unfused", 0.1, 4, 9),
        ("unfused", 0.0, 2, 6),
        ("unfused", 0.0, 4, 4),
    ],
)
def test_explicit_probabilities_are_kept_in_the_square_of_the_sequence(
    backend: AttentionBackend, dropout: float, element_bytes: int, expected: int
) -> None:
    model = replace(GPT2, attention_dropout=dropout)
    assert bytes_per_score(model, backend, element_bytes) == expected
    with_scores, without = (
        expect(model, bf16=element_bytes == 2, attention_backend=backend, recompute=RecomputeConfig(granularity))
        for granularity in (None, "selective")  # type: ignore[arg-type]
    )
    assert with_scores[0].activations - without[0].activations == expected * 12 * 1024 * 12 * 1024 * 4


def test_stages_hold_the_live_micro_batches_of_their_schedule() -> None:
    one, *_, last = expect(layout=Layout(pp=4))
    assert one.activations == 4 * expect(layout=Layout(pp=4), num_microbatches=1)[0].activations
    assert one.logits == 0
    assert last.logits == 4 * 50304 * 1024 * 4
    assert expect(layout=Layout(pp=4), pipeline_schedule="gpipe")[0].activations == 2 * one.activations


def test_chunks_and_deferred_weight_gradients_count() -> None:
    def most(schedule: str, **settings: object) -> list[int]:
        gpt = replace(GPT2, num_layers=16, attention_dropout=0.0)  # two to each half of a stage
        return [m.activations for m in expect(gpt, layout=Layout(pp=4), pipeline_schedule=schedule, **settings)]

    plain = most("1f1b")
    # The first stage holds 8 + 3 chunks of half a stage where 1F1B holds 4 stages.
    assert plain[0] < most("interleaved", num_virtual_stages_per_pipeline_rank=2)[0] < 2 * plain[0]
    # What waits for its W alone holds as much as what waits for its B; the last stage has the final norm and the head.
    assert plain[3] < min(most("zb-h1")) and max(most("zb-h1")[:3]) <= plain[0]
    assert max(most("zb-h1")) <= 1.04 * plain[0]
    assert max(most("zb-v")) <= 1.01 * plain[0]
    # Which is not made smaller by computing again what waits for its B.
    full = most("zb-h1", recompute=RecomputeConfig(recompute_granularity="full"))
    assert full[3] > 0.9 * plain[0] and full[0] < 0.4 * plain[0]


def test_dropout_keeps_nothing() -> None:
    without = replace(GPT2, attention_dropout=0.0, hidden_dropout=0.0)
    for layout, how in ((Layout(), "p2p"), (Layout(cp=2), "p2p"), (Layout(cp=2), "a2a")):
        found = (expect(model, layout=layout, cp_comm_type=how)[0].activations for model in (GPT2, without))
        assert len(set(found)) == 1


def test_a_ring_keeps_no_probabilities() -> None:
    ring, exchange = (
        expect(layout=Layout(cp=2), cp_comm_type=how, attention_backend="fused_softmax")[0].activations
        for how in ("p2p", "a2a")
    )
    assert ring == expect(layout=Layout(cp=2))[0].activations < exchange


def test_recomputation_keeps_inputs_alone() -> None:
    gpt = replace(GPT2, attention_dropout=0.0)
    head = 2 * 768 * 2 * 1024 * 4
    layer, one_input = 32 * 768 * 1024 * 4, 2 * 768 * 1024 * 4
    for settings, size in [
        ({}, 12 * layer),
        ({"recompute_granularity": "selective"}, 12 * layer),
        ({"recompute_granularity": "full"}, 12 * one_input + layer),
        ({"recompute_granularity": "full", "recompute_num_layers": 4}, 3 * one_input + 4 * layer),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4},
            4 * one_input + 9 * layer,
        ),
        ({"recompute_granularity": "full", "offload_saved_activations": True}, layer),
    ]:
        (memory,) = expect(gpt, bf16=True, recompute=RecomputeConfig(**settings))  # type: ignore[arg-type]
        assert memory.activations == size + head
    dropping = expect(recompute=RecomputeConfig(recompute_granularity="selective"), bf16=True)
    assert dropping[0].activations == 12 * layer + head
    shared = RecomputeConfig(recompute_granularity="full", distribute_saved_activations=True)
    whole = RecomputeConfig(recompute_granularity="full")
    saved = [expect(gpt, layout=Layout(tp=4), bf16=True, recompute=how)[0].activations for how in (whole, shared)]
    assert saved[0] - saved[1] == 12 * one_input * 3 // 4


def test_more_ranks_never_mean_more_memory_on_one() -> None:
    for tp, pp, sequence_parallel in product((1, 2, 4), (1, 2, 4), (False, True)):
        here = max(m.total for m in expect(layout=Layout(tp=tp, pp=pp), sequence_parallel=sequence_parallel))
        more = max(m.total for m in expect(layout=Layout(tp=2 * tp, pp=pp), sequence_parallel=sequence_parallel))
        assert more < here
    flash = replace(GPT2, attention_dropout=0.0)
    assert expect(flash, layout=Layout(cp=2))[0].activations * 2 == expect(flash)[0].activations


def test_memory_draws_itself_as_a_table() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 GiB",
        "1024.0 TiB",
    ]
    assert memory_table([Memory(2**20, 2**20, 2**21, 0, 0)]).splitlines() == [
        "              parameters   gradients   optimizer activations      logits       total",
        "     stage 0     1.0 MiB     1.0 MiB     2.0 MiB         0 B         0 B     4.0 MiB",
    ]
    (_, row) = memory_table([Memory(2**20, 2**20, 2**21, disk=2**33)]).splitlines()
    assert row.split()[-4:] == ["4.0", "MiB", "8.0", "GiB"]
    shared = Memory(2**20, 2**20, 2**21, temporary=2**10, host=2**22)
    assert memory_table([shared]).splitlines() == [
        "              parameters   gradients   optimizer activations      logits   temporary       total        host",
        "     stage 0     1.0 MiB     1.0 MiB     2.0 MiB         0 B         0 B     1.0 KiB     4.0 MiB     4.0 MiB",
    ]


# ALiBi, and a norm after the embedding

ALIBI = replace(GPT2, attention_dropout=0.0, position_embedding_type="alibi")
BIAS = 12 * 1024 * 1024 * 2  # of all heads


@pytest.mark.parametrize(
    ("layout", "documents", "expected"),
    [
        (Layout(), False, [BIAS]),
        (Layout(), True, [4 * BIAS]),  # one of each sample
        (Layout(tp=4), False, [BIAS / 4]),
        (Layout(pp=2), False, [BIAS, BIAS]),  # all micro-batches share it
        (Layout(pp=2), True, [2 * 4 * BIAS, 4 * BIAS]),
        (Layout(cp=2), False, [0]),  # of a ring, made for a tile at a time
    ],
    ids=str,
)
def test_the_biases_of_alibi_are_held_once_or_with_documents_for_every_sample(
    layout: Layout, documents: bool, expected: list[float]
) -> None:
    settings = {"bf16": True, "reset_attention_mask": documents}
    without = expect(replace(ALIBI, position_embedding_type="none"), layout, **settings)
    found = expect(ALIBI, layout, **settings)
    assert [a.activations - b.activations for a, b in zip(found, without, strict=True)] == expected


def test_traded_heads_have_their_biases() -> None:
    found, without = (
        expect(model, Layout(cp=4), cp_comm_type="a2a", bf16=True)[0].activations
        for model in (ALIBI, replace(ALIBI, position_embedding_type="none"))
    )
    assert found - without == BIAS / 4


def test_a_norm_after_the_embedding_keeps_its_input_on_the_first_stage() -> None:
    for layout, kept in ((Layout(), 1), (Layout(tp=4), 1)):
        found, without = (
            expect(model, layout, bf16=True)[0] for model in (replace(ALIBI, embed_layernorm=True), ALIBI)
        )
        assert found.activations - without.activations == kept * 1024 * 4 * 768 * 2
        assert found.parameters - without.parameters == 2 * 2 * 768
    (first, second), (without, _) = (
        expect(model, Layout(pp=2), num_microbatches=1) for model in (replace(ALIBI, embed_layernorm=True), ALIBI)
    )
    assert first.activations - without.activations == 1024 * 4 * 768 * 4
    assert second == expect(ALIBI, Layout(pp=2), num_microbatches=1)[1]


# Layers that differ

WINDOWED = replace(LLAMA3_8B, num_layers=8, window_size=256)


def mixed(model: ModelConfig) -> MixedModelConfig:
    """Every fourth layer sees the whole sequence, and the first two have a small MLP."""
    specs = []
    for layer, spec in enumerate(layer_specs(model)):
        attention = replace(spec.attention, window=None if layer % 4 == 3 else model.window_size)
        mlp = replace(spec.mlp, ffn_size=1024, activation="squared_relu") if layer < 2 else spec.mlp
        specs.append(replace(spec, attention=attention, mlp=mlp))
    return MixedModelConfig(**vars(model), layers=tuple(specs))


MIXED = mixed(WINDOWED)
SMALL_MLP, LARGE_MLP = MIXED.layers[0].cost(MIXED), MIXED.layers[-1].cost(MIXED)


def test_a_stage_holds_the_parameters_and_activations_of_its_own_layers() -> None:
    assert SMALL_MLP.parameters.split < LARGE_MLP.parameters.split
    first, second = expect(MIXED, Layout(pp=2), num_microbatches=1)
    uniform = expect(WINDOWED, Layout(pp=2), num_microbatches=1)
    assert second == uniform[1]
    for kind, saving in (
        ("parameters", 4 * (LARGE_MLP.parameters.total - SMALL_MLP.parameters.total)),
        ("activations", 1024 * 4 * 4 * (LARGE_MLP.kept.total - SMALL_MLP.kept.total + 14336 - 1024)),
    ):
        assert getattr(uniform[0], kind) - getattr(first, kind) == 2 * saving


def test_zero_3_gathers_the_two_neighbours_that_are_largest() -> None:
    sizes = [spec.cost(MIXED).parameters.total for spec in MIXED.layers]
    (memory,) = expect(MIXED, Layout(dp=2), zero_stage=3)
    rest = num_parameters(MIXED, vocab_size=50304, seq_length=1024) - sum(sizes)
    assert memory.temporary == 4 * (2 * (rest - MIXED.hidden_size) + 3 * max(sizes))  # without the final norm


def test_recomputation_holds_the_largest_group_once() -> None:
    small, large = (
        cost.saved_bytes(seq_length=1024, element_bytes=4, device="cpu").total for cost in (SMALL_MLP, LARGE_MLP)
    )
    one_input, head = 4096 * 4, 2 * 4096 * 4
    for method, size, expected in (
        ("uniform", 2, 4 * one_input + 2 * large),
        ("block", 2, 2 * one_input + small + 6 * large),
        ("block", 3, 3 * one_input + large + 5 * large),
    ):
        (memory,) = expect(MIXED, recompute=RecomputeConfig("full", method, size))  # type: ignore[arg-type]
        assert memory.activations == (expected + head) * 1024 * 4


def test_an_automatic_split_weighs_the_layers() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_split="auto")
    model = replace(WINDOWED, num_layers=16)
    even = Stages.of(parallel, model, vocab_size=1000, seq_length=1024)
    assert [len(part) for part in even.layers] == [8, 8]
    specs = layer_specs(model)
    small = [replace(spec, mlp=replace(spec.mlp, ffn_size=1024)) for spec in specs[:8]]
    unequal = MixedModelConfig(**vars(model), layers=(*small, *specs[8:]))
    parts = Stages.of(parallel, unequal, vocab_size=1000, seq_length=1024).layers
    assert [len(part) for part in parts] == [11, 5]


def test_memory_on_a_cpu_counts_the_fp32_copies_of_rms_norm() -> None:
    """But for the final norm's, of which there is one."""
    with_rms, without = (
        expect(replace(WINDOWED, normalization=name), bf16=True)[0].activations for name in ("RMSNorm", "LayerNorm")
    )
    assert with_rms - without == 8 * 2 * 4096 * (8 - 2) * 1024 * 4
