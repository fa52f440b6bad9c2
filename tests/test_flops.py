"""Parameters, FLOPs, peaks and memory, against the real model, published numbers and formulas."""

from dataclasses import replace
from itertools import product

import pytest

from megatronish.config.model import ModelConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.recompute import RecomputeConfig
from megatronish.config.training import AttentionBackend
from megatronish.flops import (
    forward_flops,
    hardware_flops_per_token,
    model_flops_per_token,
    num_parameters,
    parameters_of_stage,
    peak_tflops,
)
from megatronish.layout import Layout
from megatronish.memory import (
    Memory,
    ZeroSettings,
    activation_bytes_per_token,
    bytes_per_score,
    expected_memory,
    format_bytes,
    memory_table,
)
from megatronish.model.gpt import GPT, ModelChunk
from megatronish.pipeline.stages import Stages

GPT2 = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12)
LLAMA3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    ffn_hidden_size=14336,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
SMALL = ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, make_vocab_size_divisible_by=1)
VARIANTS = {
    "gpt2": SMALL,
    "llama": replace(
        SMALL,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        num_query_groups=2,
    ),
    "qwen2": replace(SMALL, normalization="RMSNorm", disable_bias_linear=True, add_qkv_bias=True, swiglu=True),
    "qwen3": replace(SMALL, normalization="RMSNorm", disable_bias_linear=True, qk_layernorm=True, kv_channels=16),
    "swiglu with biases": replace(SMALL, swiglu=True, qk_layernorm=True, ffn_hidden_size=40),
    "more positions": replace(SMALL, max_position_embeddings=64, apply_layernorm_1p=True),
    "no positions": replace(SMALL, position_embedding_type="none", group_query_attention=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_count_of_parameters_is_the_real_models(name: str) -> None:
    model = VARIANTS[name]
    gpt = GPT(model, vocab_size=50, num_positions=model.max_position_embeddings or 16)
    assert num_parameters(model, vocab_size=50, seq_length=16) == sum(p.numel() for p in gpt.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_count_of_a_stage_is_the_real_stages(name: str) -> None:
    model = VARIANTS[name]
    for layers, is_first, is_last in [(range(0, 2), True, False), (range(2, 3), False, False), ([3], False, True)]:
        gpt = GPT(
            model,
            vocab_size=50,
            num_positions=model.max_position_embeddings or 16,
            chunks=[ModelChunk(layers, is_first, is_last)],
        )
        counted = parameters_of_stage(
            model, vocab_size=50, seq_length=16, num_layers=len(layers), is_first=is_first, is_last=is_last
        )
        assert counted.total == sum(p.numel() for p in gpt.parameters())


def test_published_models_have_their_published_sizes() -> None:
    assert num_parameters(GPT2, vocab_size=50257, seq_length=1024) == 124_439_808
    assert num_parameters(LLAMA3_8B, vocab_size=128256, seq_length=8192) == 8_030_261_248


def test_a_token_costs_six_flops_a_weight_and_attention() -> None:
    linear, scores, logits = forward_flops(LLAMA3_8B, vocab_size=128256, seq_length=8192, attention="full")
    norms = (2 * 32 + 1) * 4096
    assert linear + logits == 2 * (8_030_261_248 - 128256 * 4096 - norms)
    assert 2 * scores == 4 * 32 * 8192 * 4096  # 12 L S D, forward and backward


def test_full_attention_gives_the_formula_of_the_megatron_paper() -> None:
    L, S, D, V = 24, 2048, 2304, 51200
    model = ModelConfig(num_layers=L, hidden_size=D, num_attention_heads=24)
    per_token = model_flops_per_token(model, vocab_size=V, seq_length=S, attention="full")
    assert per_token == pytest.approx(72 * L * D**2 * (1 + S / (6 * D) + V / (12 * L * D)), rel=1e-12)


def test_a_causal_mask_halves_attention_and_a_window_cuts_it() -> None:
    full = forward_flops(LLAMA3_8B, vocab_size=1, seq_length=8192, attention="full").scores
    assert forward_flops(LLAMA3_8B, vocab_size=1, seq_length=8192).scores == full / 2
    windowed = replace(LLAMA3_8B, window_size=2048)
    assert forward_flops(windowed, vocab_size=1, seq_length=8192, attention="full").scores == full / 4
    seen = sum(min(i, 2048) for i in range(8192)) / 8192
    assert forward_flops(windowed, vocab_size=1, seq_length=8192).scores == pytest.approx(full * seen / 8192, rel=1e-3)
    wide = replace(LLAMA3_8B, window_size=10**6)
    assert forward_flops(wide, vocab_size=1, seq_length=8192).scores == full / 2


def test_hardware_flops_add_padding_and_the_scores_of_the_backward() -> None:
    model_flops = model_flops_per_token(GPT2, vocab_size=50257, seq_length=1024)
    hardware = hardware_flops_per_token(GPT2, padded_vocab_size=50304, seq_length=1024)
    assert hardware - model_flops == 6 * 768 * (50304 - 50257) + 2 * 12 * 768 * 512


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989, 989, 67),
        ("NVIDIA H100 PCIe", 756, 756, 51),
        ("NVIDIA H200", 989, 989, 67),
        ("NVIDIA A10", 125, 125, 31.2),
        ("NVIDIA A10G", 70, 70, 35),
        ("NVIDIA L4", 121, 121, 30.3),
        ("NVIDIA L40S", 362, 362, 91.6),
        ("Tesla V100-SXM2-32GB", None, 125, 15.7),
        ("Tesla V100-PCIE-16GB", None, 112, 14),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("NVIDIA GH200 480GB", 989, 989, 67),
        ("NVIDIA B200", 2250, 2250, 75),
        ("AMD Instinct MI300X", 1307, 1307, 163.4),
        ("NVIDIA RTX A1000", None, None, None),
        ("cpu", None, None, None),
    ],
)
def test_peaks_are_found_by_torchs_name_of_a_device(
    name: str, bf16: float | None, fp16: float | None, fp32: float | None
) -> None:
    assert (peak_tflops(name, "bf16"), peak_tflops(name, "fp16"), peak_tflops(name, "fp32")) == (bf16, fp16, fp32)


def expect(model: ModelConfig = GPT2, layout: Layout | None = None, **settings: object) -> list[Memory]:
    """`num_microbatches` and the fields of ParallelConfig make the stages' loads."""
    layout = layout or Layout()
    num_microbatches = settings.pop("num_microbatches", 8)
    of_parallel = {name: settings.pop(name) for name in set(ParallelConfig.__annotations__) & set(settings)}
    parallel = replace(ParallelConfig(pipeline_model_parallel_size=layout.pp), **of_parallel)  # type: ignore[arg-type]
    stages = Stages.of(parallel, model, vocab_size=50257, seq_length=1024)
    sizes = {"vocab_size": 50257, "seq_length": 1024, "micro_batch_size": 4, "layout": layout}
    loads = stages.loads(num_microbatches)  # type: ignore[arg-type]
    return expected_memory(
        model,
        stages=loads,
        sequence_parallel=parallel.sequence_parallel,
        cp_comm_type=parallel.cp_comm_type,
        sharing=ZeroSettings.of(parallel, layout),
        **(sizes | settings),  # type: ignore[arg-type]
    )


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
        assert (memory.passing > 0) == (stage >= 2)


def test_copies_and_context_parallelism_say_how_many_share() -> None:
    for layout, copies, ranks in [(Layout(dp=8), 2, 4), (Layout(dp=4, cp=2), 1, 8), (Layout(dp=4, cp=2), 4, 2)]:
        parallel = ParallelConfig(zero_stage=1, num_distributed_optimizer_instances=copies)
        assert ZeroSettings.of(parallel, layout).ranks == ranks
        assert ZeroSettings.of(ParallelConfig(), layout).ranks == 1


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


def test_what_passes_is_a_few_buckets_or_layers() -> None:
    count, layer = 124_439_808 + (50304 - 50257) * 768, 12 * 768**2 + 13 * 768
    (buckets,) = expect(layout=Layout(dp=2), zero_stage=2)
    assert buckets.passing == 4 * (2 * 8_000_000 + 50304 * 768)
    assert expect(layout=Layout(dp=2), zero_stage=2, overlap_grad_reduce=False)[0].passing == 4 * count
    (layers,) = expect(layout=Layout(dp=2), zero_stage=3, bf16=True)
    assert layers.passing == 2 * (2 * (count - 12 * layer) + 3 * layer)


def test_activations_follow_the_formula_of_korthikanti() -> None:
    gpt = replace(GPT2, attention_dropout=0.0)
    for tp, sequence_parallel, factor in [(1, False, 34), (4, False, 10 + 24 / 4), (4, True, 34 / 4)]:
        per_token = activation_bytes_per_token(
            gpt, seq_length=1024, element_bytes=2, tp=tp, sequence_parallel=sequence_parallel
        )
        assert per_token == factor * 768


@pytest.mark.parametrize(
    ("backend", "dropout", "element_bytes", "expected"),
    [
        ("auto", 0.0, 2, 0),
        ("flash", 0.0, 4, 0),
        ("auto", 0.1, 2, 5),  # the paper's
        ("fused_softmax", 0.1, 2, 5),
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


def test_chunks_and_put_off_weight_gradients_count() -> None:
    def most(schedule: str, **settings: object) -> list[int]:
        gpt = replace(GPT2, num_layers=16, attention_dropout=0.0)  # two to each half of a stage
        return [m.activations for m in expect(gpt, layout=Layout(pp=4), pipeline_schedule=schedule, **settings)]

    plain = most("1f1b")
    # The first stage holds 8 + 3 chunks of half a stage where 1F1B holds 4 stages.
    assert plain[0] < most("interleaved", num_virtual_stages_per_pipeline_rank=2)[0] < 2 * plain[0]
    # What waits for its W alone holds a little less than what waits for its B.
    assert plain[3] < min(most("zb-h1")) and max(most("zb-h1")) <= 1.02 * plain[0]
    assert max(most("zb-v")) <= 1.01 * plain[0]
    # Which is not made smaller by computing again what waits for its B.
    full = most("zb-h1", recompute=RecomputeConfig(recompute_granularity="full"))
    assert full[3] > 0.9 * plain[0] and full[0] < 0.4 * plain[0]


def test_a_ring_keeps_no_probabilities() -> None:
    ring, exchange = (expect(layout=Layout(cp=2), cp_comm_type=how)[0].activations for how in ("p2p", "a2a"))
    without = replace(GPT2, attention_dropout=0.0)
    assert ring == expect(without, layout=Layout(cp=2))[0].activations < exchange


def test_recomputation_keeps_inputs_alone() -> None:
    gpt = replace(GPT2, attention_dropout=0.0)
    head = 2 * 768 * 2 * 1024 * 4
    layer, one_input = 34 * 768 * 1024 * 4, 2 * 768 * 1024 * 4
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
    shared = Memory(2**20, 2**20, 2**21, passing=2**10, host=2**22)
    assert memory_table([shared]).splitlines() == [
        "              parameters   gradients   optimizer activations      logits     passing       total        host",
        "     stage 0     1.0 MiB     1.0 MiB     2.0 MiB         0 B         0 B     1.0 KiB     4.0 MiB     4.0 MiB",
    ]
