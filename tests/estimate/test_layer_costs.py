"""Tests of the cost rows of layers, against modules built from the same options: parameters, FLOPs, saved bytes."""

from dataclasses import replace

import pytest
import torch
from models import bytes_per_score
from ranks import run_ranks
from saved import saved_by
from sweeps import some_of
from torch.utils.flop_counter import FlopCounterMode

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import AttentionBackend, TrainingConfig
from megatronish.core.layout import Layout
from megatronish.estimate.costs.layer_kinds import layer_kinds
from megatronish.estimate.costs.layer_memory import LayerMemory
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.launch.place import Place
from megatronish.layers.linear import split_backward
from megatronish.layers.weight_gradients import WeightGradients
from megatronish.model.attention import CoreAttention
from megatronish.model.batch import MicroBatch, TokensAhead
from megatronish.model.block import TransformerBlock
from megatronish.model.gpt import GPT, Execution
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel.mesh import Axis, Mesh, TensorParallel, dense_domain
from megatronish.parallel.sharding import collect_shardings, initialize
from megatronish.specs.costs import Count, LayerCost, LinearShape
from megatronish.specs.flops import forward_flops, model_flops_per_token
from megatronish.specs.layers import LayerSpec, layer_specs

S, B, V = 96, 2, 50
GPT2 = ModelConfig(
    num_layers=1,
    hidden_size=128,
    num_attention_heads=4,
    attention_dropout=0.0,
    make_vocab_size_divisible_by=1,
)
LLAMA = replace(
    GPT2,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    hidden_dropout=0.0,
)
LATENT = replace(
    LLAMA,
    num_query_groups=None,
    multi_latent_attention=True,
    q_lora_rank=48,
    kv_lora_rank=40,
    qk_head_dim=32,
    qk_pos_emb_head_dim=16,
    v_head_dim=24,
    qk_layernorm=True,
)
MODELS = {
    "gpt2": GPT2,
    "gpt2 without dropout": replace(GPT2, hidden_dropout=0.0),
    "gpt2, weights of norms minus 1": replace(GPT2, apply_layernorm_1p=True),
    "tanh gelu": replace(GPT2, openai_gelu=True, ffn_hidden_size=96),
    "squared relu": replace(GPT2, squared_relu=True),
    "apertus": replace(LLAMA, swiglu=False, xielu=True, ffn_hidden_size=320, qk_layernorm=True),
    "llama": LLAMA,
    "llama, weights of norms minus 1": replace(LLAMA, apply_layernorm_1p=True),
    "llama with biases": replace(LLAMA, disable_bias_linear=False),
    "qwen2": replace(LLAMA, add_qkv_bias=True),
    "llama with biases of attention": replace(LLAMA, add_attention_bias=True),
    "llama with biases of the MLP": replace(LLAMA, add_mlp_bias=True),
    "qwen3": replace(LLAMA, qk_layernorm=True, kv_channels=64),
    "olmoe": replace(LLAMA, qk_layernorm=True, qk_layernorm_across_heads=True),
    "hunyuan": replace(LLAMA, qk_layernorm=True, qk_layernorm_after_rope=True),
    "gpt2 with qk-norm": replace(GPT2, qk_layernorm=True),
    "mistral": replace(LLAMA, window_size=32),
    "bloom": replace(GPT2, position_embedding_type="alibi", embed_layernorm=True),
    "sinks": replace(GPT2, softmax_type="learnable"),
    "sinks, grouped, in a window": replace(LLAMA, softmax_type="learnable", window_size=32),
    "off by one": replace(LLAMA, softmax_type="off-by-one"),
    "quick geglu": replace(GPT2, quick_geglu=True),
    "quick geglu, clamped": replace(LLAMA, swiglu=False, quick_geglu=True, activation_func_clamp_value=1.0),
    "swiglu with an offset": replace(LLAMA, glu_linear_offset=1.0),
    "gemma 2": replace(
        LLAMA, norm_placement="sandwich", softmax_scale=0.4, attn_logit_softcapping=1.5, final_logit_softcapping=2.0
    ),
    "gpt2 in a sandwich, times a factor": replace(GPT2, norm_placement="sandwich", residual_multiplier=0.5),
    "olmo2": replace(LLAMA, norm_placement="output", qk_layernorm=True, qk_layernorm_across_heads=True),
    "gpt-j": replace(GPT2, norm_placement="parallel", disable_bias_linear=True, add_mlp_bias=True),
    "gpt-neox": replace(GPT2, norm_placement="parallel_norms"),
    "rms norms side by side": replace(LLAMA, norm_placement="parallel_norms"),
    "cohere": replace(LLAMA, norm_placement="parallel", normalization="LayerNorm", norm_parameters="weight"),
    "olmo": replace(LLAMA, normalization="LayerNorm", norm_parameters="none", clip_qkv=3.0),
    "deepseek": LATENT,
    "latent attention with a bias, and queries at once": replace(
        LATENT, q_lora_rank=None, disable_bias_linear=False, normalization="LayerNorm"
    ),
    "latent attention without norms, values as wide as keys": replace(LATENT, qk_layernorm=False, v_head_dim=48),
    "a norm of heads without a weight": replace(GPT2, position_embedding_type="rope", qk_l2_norm=True),
    "queries that grow": replace(GPT2, position_embedding_type="none", attn_temperature_scale=0.1),
    "stablelm": replace(LLAMA, normalization="LayerNorm", qk_layernorm=True, qk_layernorm_by_head=True),
}
DTYPES = (torch.float32, torch.bfloat16)
TINY = 0.02  # of a layer: statistics of norms, log-sum-exps of attention


def cost_of(model: ModelConfig) -> LayerCost:
    (spec,) = set(layer_specs(model))
    return spec.cost(model)


def batch() -> MicroBatch:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(B, S, dtype=torch.bool)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous(), mask, torch.arange(S).repeat(B, 1), torch.arange(B))


def built(model: ModelConfig, backend: AttentionBackend, dtype: torch.dtype) -> GPT:
    gpt = GPT(model, vocab_size=V, num_positions=S, execution=Execution(attention_backend=backend))
    initialize(gpt, collect_shardings(gpt), seed=1, domains=dense_domain(gpt.tp.axis))
    return gpt.to(dtype)


def saved_by_a_layer(model: ModelConfig, backend: AttentionBackend, dtype: torch.dtype) -> float:
    """Bytes a token: the difference that two layers more make."""

    def saved(num_layers: int) -> int:
        gpt = built(replace(model, num_layers=num_layers), backend, dtype)
        with saved_by(gpt) as seen:
            gpt(None, batch(), step=0)
        return seen.num_bytes

    return (saved(3) - saved(1)) / 2 / (S * B)


def counted_flops(model: ModelConfig, num_layers: int) -> int:
    gpt = built(replace(model, num_layers=num_layers), "unfused", torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        gpt(None, batch(), step=None)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_a_row_counts_the_parameters_of_the_block_as_tp_cuts_them(name: str) -> None:
    model, parameters = MODELS[name], cost_of(MODELS[name]).parameters
    for tp in (1, 2):
        axis = TensorParallel(Axis("tp", tp, 0, tuple(range(tp))))
        block = TransformerBlock(model, layer=0, tp=axis, core=CoreAttention())
        assert sum(p.numel() for p in block.parameters()) == parameters.per_rank(tp)
        assert sum(each.num_elements for each in collect_shardings(block).values()) == parameters.total


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_row_counts_the_flops_of_a_forward(name: str) -> None:
    model, cost = MODELS[name], cost_of(replace(MODELS[name], window_size=None))
    counted = (counted_flops(model, 3) - counted_flops(model, 1)) / 2 / (S * B)
    # Explicit probabilities are computed for the whole square, whatever a mask lets through.
    assert counted == cost.linear_flops + cost.score_flops(S, "full") + cost.value_flops(S, "full")


def test_a_window_lets_fewer_keys_through() -> None:
    (core,), (windowed,) = cost_of(LLAMA).cores, cost_of(replace(LLAMA, window_size=32)).cores
    assert (core.keys(S, "full"), core.keys(S, "causal")) == (S, S / 2)
    assert windowed.keys(S, "full") == 32
    assert windowed.keys(S, "causal") == pytest.approx(sum(min(i, 32) for i in range(S)) / S, rel=0.02)


def not_counted(model: ModelConfig, backend: AttentionBackend) -> float:
    """Elements a token that a layer may keep beyond its row."""
    heads, size = model.num_attention_heads, model.head_size
    if model.multi_latent_attention:
        # The norm keeps what else came down from the latent's view, and values are a view of what came up; or they
        # are filled up, and the output is as wide.
        filled = 2 * size - model.v_head_dim if backend == "auto" and model.v_head_dim < size else model.qk_head_dim
        return heads * filled + model.qk_pos_emb_head_dim + (heads * size if backend == "auto" else 0)
    if backend == "auto":
        # The values are a view of qkv's output and keep it alive, where queries and keys have become others by RoPE.
        views = (heads + model.num_kv_heads) * size if model.position_embedding_type == "rope" else 0
        views += heads * size if model.attn_temperature_scale is not None else 0  # so do keys, where queries alone have
        return views + (S / B if model.window_size else 0)  # SDPA makes a bias of the mask, in every layer
    return model.num_kv_heads * size if model.qk_layernorm else 0  # a copy of the values, beside qkv's output


WAYS = [(name, backend, dtype) for name in MODELS for backend in ("auto", "unfused") for dtype in DTYPES]


# Each model with both backends, and with both types.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    some_of(WAYS, [way for way in WAYS if (way[1] == "auto") == (way[2] == torch.float32)]),
)
def test_a_row_counts_the_bytes_that_wait_for_the_backward(
    name: str, backend: AttentionBackend, dtype: torch.dtype
) -> None:
    """Measured on a CPU, where torch's RMSNorm keeps more than it does on a GPU."""
    model, size = MODELS[name], dtype.itemsize
    scores = bytes_per_score(model, backend, size)
    saved = cost_of(model).saved_bytes(seq_length=S, element_bytes=size, score_bytes=scores, device="cpu")
    measured = saved_by_a_layer(model, backend, dtype)
    assert saved.total <= measured <= (saved.total + not_counted(model, backend) * size) * (1 + TINY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_keeps_one_bias_for_all_layers_and_a_norm_of_the_embedding_its_input(dtype: torch.dtype) -> None:
    plain = replace(GPT2, num_layers=3, hidden_dropout=0.0, position_embedding_type="none")

    def saved(model: ModelConfig) -> int:
        gpt = built(model, "auto", dtype)
        with saved_by(gpt) as seen:
            gpt(None, batch(), step=0)
        return seen.num_bytes

    alibi = replace(plain, position_embedding_type="alibi")
    assert saved(alibi) - saved(plain) == 4 * S * S * dtype.itemsize
    inputs = S * B * 128 * dtype.itemsize
    assert inputs <= saved(replace(plain, embed_layernorm=True)) - saved(plain) <= inputs * (1 + TINY) + 16 * S * B


def test_a_pattern_leaves_windows_out_of_some_layers() -> None:
    model = replace(LLAMA, num_layers=4, window_size=32, window_attn_skip_freq="2", no_rope_freq="[0, 0, 0, 1]")
    specs = layer_specs(model)
    assert [spec.attention.window for spec in specs] == [32, None, 32, None]
    assert [spec.attention.rotary for spec in specs] == [True, True, True, False]
    windowed, whole = (spec.cost(model).score_flops(S, "causal") for spec in specs[:2])
    assert (windowed, whole) == (cost_of(replace(LLAMA, window_size=32)).score_flops(S, "causal"), 2 * 4 * 32 * S / 2)


def test_only_a_cpu_keeps_fp32_copies_of_what_is_normalised() -> None:
    model, gpt2 = cost_of(LLAMA), cost_of(GPT2)
    for size in (2, 4):
        on_cpu, on_cuda = (
            model.saved_bytes(seq_length=S, element_bytes=size, device=device)  # type: ignore[arg-type]
            for device in ("cpu", "cuda")
        )
        assert on_cpu.total - on_cuda.total == 2 * 128 * (8 - size)
        assert gpt2.saved_bytes(seq_length=S, element_bytes=size, device="cpu") == gpt2.saved_bytes(
            seq_length=S, element_bytes=size
        )


def test_rows_add_up_to_the_row_of_a_layer() -> None:
    spec = LayerSpec.of(MODELS["qwen3"])
    attention, mlp, layer = (part.cost(MODELS["qwen3"]) for part in (spec.attention, spec.mlp, spec))
    between = 2 * 128
    assert layer.parameters == attention.parameters + mlp.parameters + Count(whole=between)
    assert layer.active_parameters == layer.parameters.total
    assert layer.linear_flops == attention.linear_flops + mlp.linear_flops == 2 * layer.matrices.total
    # Inputs and outputs of qkv, out, fc1, fc2.
    assert layer.deferred_inputs == Count(split=4 * 64 + 320, whole=2 * 128)
    assert layer.deferred_gradients == Count(split=(4 + 2 + 2) * 64 + 2 * 320, whole=2 * 128)


def test_a_token_passes_the_experts_that_are_chosen_and_a_rank_holds_all() -> None:
    up, down = LinearShape(64, 32, "column", copies=8, used=2), LinearShape(32, 64, "row", copies=8, used=2)
    router = LinearShape(64, 8, "none")
    row = LayerCost(linears=(router, up, down))
    assert row.parameters == Count(whole=64 * 8, experts=2 * 8 * 64 * 32)
    assert row.parameters.per_rank(2, experts=4) == 64 * 8 + 2 * 2 * 64 * 32
    assert row.active_parameters == 2 * 2 * 64 * 32 + 64 * 8
    assert row.linear_flops == 2 * row.active_parameters
    assert row.deferred_inputs == Count(split=2 * 32, whole=64, experts=2 * 64)
    assert row.deferred_gradients == Count(split=2 * 32, whole=8, experts=2 * 64)


def elements_deferred(place: Place, sequence: bool) -> float:
    """Elements a token that one layer leaves in the queue of weight gradients."""
    mesh = Mesh.start(Layout(tp=place.world_size), rank=place.rank, init_method=place.rendezvous)

    def deferred(num_layers: int) -> int:
        model, tp = replace(MODELS["qwen3"], num_layers=num_layers), TensorParallel(mesh.tp, sequence)
        gpt = GPT(model, vocab_size=V, num_positions=S, tp=tp)
        initialize(gpt, collect_shardings(gpt), seed=1, domains=dense_domain(mesh.tp))
        queue = WeightGradients(lambda weight: GradientSum(torch.zeros_like(weight)))
        split_backward(gpt, queue)
        queue.fill(chunk=0, micro_batch=0)
        gpt(None, batch(), step=0).sum().backward()
        return sum(each.dy.numel() + each.x.numel() for each in queue._pending[0, 0])

    return (deferred(3) - deferred(1)) / 2 / (S * B)


@pytest.mark.parametrize(("tp", "sequence"), some_of([(1, False), (2, False), (2, True)], [(2, True)]))
def test_a_row_counts_what_deferred_weight_gradients_keep(tp: int, sequence: bool) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence)
    config = Config(MODELS["qwen3"], parallel, training=TrainingConfig(seq_length=S, micro_batch_size=1))
    memory = LayerMemory(config, V, "cpu")
    for elements in run_ranks(tp, elements_deferred, sequence):
        assert 4 * elements * S == memory.deferred(layer_kinds(config.model, config.adapter)[0])


@pytest.mark.parametrize("bias", [False, True])
def test_the_row_of_experts_is_what_their_module_has(bias: bool) -> None:
    model = ModelConfig(
        num_layers=2,
        hidden_size=48,
        num_attention_heads=4,
        swiglu=True,
        num_experts=8,
        moe_router_topk=3,
        moe_ffn_hidden_size=20,
        moe_shared_expert_intermediate_size=36,
        moe_shared_expert_gate=True,
        moe_layer_freq="[0,1]",
        moe_add_bias_linear=bias,
    )
    gpt = GPT(model, vocab_size=64, num_positions=16)
    for number, spec in enumerate(layer_specs(model)):
        held = sum(parameter.numel() for parameter in gpt.layers[str(number)].parameters())
        assert spec.cost(model).parameters.total == held
    dense, experts = (spec.cost(model) for spec in layer_specs(model))
    assert dense.parameters.experts == 0
    one = 3 * 20 * 48 + bias * (2 * 20 + 48)
    assert experts.parameters.experts == 8 * one
    # A token passes three of eight.
    assert experts.parameters.total - experts.active_parameters == 5 * one


DEEPSEEK = ModelConfig(
    num_layers=61,
    hidden_size=7168,
    num_attention_heads=128,
    ffn_hidden_size=18432,
    multi_latent_attention=True,
    q_lora_rank=1536,
    qk_layernorm=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    num_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_layer_freq="([0]*3+[1]*58)",
    make_vocab_size_divisible_by=1,
)
KIMI = replace(DEEPSEEK, num_attention_heads=64, num_experts=384, moe_layer_freq="([0]*1+[1]*60)")


@pytest.mark.parametrize(
    ("model", "vocab_size", "total", "active"),
    [(DEEPSEEK, 129_280, 671.026e9, 37.55e9), (KIMI, 163_840, 1026.4e9, 32.86e9)],
    ids=["deepseek v3", "kimi k2"],
)
def test_parameters_are_those_of_published_models(
    model: ModelConfig, vocab_size: int, total: float, active: float
) -> None:
    """671 B of which a token passes 37 B, and 1.04 T and 32 B, in all; the published numbers are rounded."""
    costs, ends = [spec.cost(model) for spec in layer_specs(model)], 2 * vocab_size * model.hidden_size
    assert sum(cost.parameters.total for cost in costs) + ends == pytest.approx(total, rel=1e-3)
    assert sum(cost.active_parameters for cost in costs) + ends == pytest.approx(active, rel=5e-3)


def test_a_layer_of_multi_token_prediction_has_what_its_row_counts() -> None:
    model = replace(LATENT, num_layers=2, mtp_num_layers=2)
    gpt = built(model, "unfused", torch.float32)
    for number, spec in enumerate(layer_specs(model)):
        held = sum(parameter.numel() for parameter in gpt.layers[str(number)].parameters())
        assert spec.cost(model).parameters.total == held
    ahead = TokensAhead.of(batch(), 2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        gpt(None, batch().with_ahead(ahead), step=0)
    counted = counter.get_total_flops() / (S * B)
    assert counted == forward_flops(model, vocab_size=V, seq_length=S, attention="full").total


def test_the_parameters_of_deepseek_v3_with_further_predictions_are_those_published() -> None:
    """685 B in the files: 671 B, and 14 B of which 11.5 B are not copies of embedding and output layer."""
    sizes = {"vocab_size": 129_280, "seq_length": 4096}
    plain, model = num_parameters(DEEPSEEK, **sizes), replace(DEEPSEEK, mtp_num_layers=1)
    more = num_parameters(model, **sizes) - plain
    assert more == pytest.approx(11.5e9, rel=1e-2)
    copies = 2 * 129_280 * 7168
    assert plain + more + copies == pytest.approx(684.5e9, rel=1e-3)
    per_token = model_flops_per_token(model, **sizes) / model_flops_per_token(DEEPSEEK, **sizes)
    assert 1.03 < per_token < 1.06
