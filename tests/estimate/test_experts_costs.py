"""Tests of the costs of experts: published parameter counts, and the rows that ranks receive against what they keep."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from saved import saved_by

from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.layout import ExpertLayout, Layout
from megatronish.estimate.costs.layer_kinds import layer_kinds
from megatronish.estimate.costs.layer_memory import LayerMemory
from megatronish.estimate.costs.memory import bytes_of_uneven_load, expected_memory
from megatronish.estimate.costs.parameters import num_active_parameters, num_parameters
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.parallel.mesh import Mesh, TensorParallel, leave
from megatronish.parallel.sharding import collect_shardings, initialize
from megatronish.parallel.stages import Stages
from megatronish.specs.flops import forward_flops

LLAMA_LIKE = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
MIXTRAL_8X7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    num_experts=8,
    moe_router_topk=2,
    **LLAMA_LIKE,
)
OLMOE_1B_7B = ModelConfig(
    num_layers=16,
    hidden_size=2048,
    num_attention_heads=16,
    ffn_hidden_size=1024,
    num_experts=64,
    moe_router_topk=8,
    **LLAMA_LIKE,
)
GPT_OSS_20B = ModelConfig(
    num_layers=24,
    hidden_size=2880,
    num_attention_heads=64,
    num_query_groups=8,
    kv_channels=64,
    ffn_hidden_size=2880,
    num_experts=32,
    moe_router_topk=4,
    moe_add_bias_linear=True,
    add_attention_bias=True,
    softmax_type="learnable",
    **LLAMA_LIKE | {"swiglu": False, "quick_geglu": True},
)
GPT_OSS_120B = replace(GPT_OSS_20B, num_layers=36, num_experts=128)
QWEN = ["--config", "qwen3-30b-a3b", "--mock-data", "--vocab-size", "151936"]


@pytest.mark.parametrize(
    ("model", "vocab_size", "total", "active"),
    [
        (read_config(QWEN).config.model, 151_936, 30.5, 3.35),
        (MIXTRAL_8X7B, 32_000, 46.7, 12.9),
        (OLMOE_1B_7B, 50_304, 6.92, 1.28),
    ],
    ids=["Qwen3-30B-A3B", "Mixtral 8x7B", "OLMoE"],
)
def test_published_models_have_their_published_parameters(
    model: ModelConfig, vocab_size: int, total: float, active: float
) -> None:
    sizes = {"vocab_size": vocab_size, "seq_length": 4096}
    assert num_parameters(model, **sizes) / 1e9 == pytest.approx(total, abs=0.05)
    assert num_active_parameters(model, **sizes) / 1e9 == pytest.approx(active, abs=0.05)


@pytest.mark.parametrize(("model", "total", "active"), [(GPT_OSS_20B, 20.91, 3.61), (GPT_OSS_120B, 116.83, 5.13)])
def test_gpt_oss_has_its_published_parameters(model: ModelConfig, total: float, active: float) -> None:
    """Those that a token passes are counted there without the table of words, in which it is looked up."""
    sizes = {"vocab_size": 201_088, "seq_length": 4096}
    assert num_parameters(model, **sizes) / 1e9 == pytest.approx(total, abs=0.005)
    passed = num_active_parameters(model, **sizes) - 201_088 * model.hidden_size
    assert passed / 1e9 == pytest.approx(active, abs=0.005)


def test_flops_are_those_of_active_parameters() -> None:
    model = read_config(QWEN).config.model
    flops = forward_flops(model, vocab_size=151_936, seq_length=4096)
    sizes = {"vocab_size": 151_936, "seq_length": 4096}
    # The embedding only looks up, and norms multiply no matrix.
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert flops.linear + flops.logits == 2 * (num_active_parameters(model, **sizes) - 151_936 * 2048 - norms)


SMALL = ModelConfig(
    num_layers=1,
    hidden_size=128,
    num_attention_heads=4,
    ffn_hidden_size=64,
    num_experts=8,
    moe_router_topk=3,
    make_vocab_size_divisible_by=1,
    **LLAMA_LIKE | {"position_embedding_type": "learned_absolute"},  # with RoPE values keep queries and keys alive
)
S, B = 96, 2


def bytes_kept(place: Place, etp: int, sequence: bool, layer: ModelConfig) -> float:
    """Bytes a token that one layer keeps for the backward on this rank."""
    tp = place.world_size
    experts = ExpertLayout(tp // etp, etp)
    mesh = Mesh.start(Layout(tp=tp), rank=place.rank, init_method=place.rendezvous, experts=experts)
    tokens = torch.randint(0, 50, (B, S + 1), generator=torch.Generator().manual_seed(3))
    mask, places = torch.ones(B, S, dtype=torch.bool), torch.arange(S).repeat(B, 1)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous(), mask, places, torch.arange(B))

    def kept(num_layers: int) -> int:
        model = replace(layer, num_layers=num_layers)
        gpt = GPT(model, vocab_size=50, num_positions=S, tp=TensorParallel(mesh.tp, sequence, mesh.experts))
        initialize(gpt, collect_shardings(gpt), seed=1, domains=mesh.domains)
        with saved_by(gpt) as seen:
            gpt(None, batch, step=0)
        return seen.num_bytes

    found = (kept(3) - kept(1)) / 2 / (S * B)
    leave()
    return found


@pytest.mark.parametrize(
    ("tp", "etp", "sequence", "bias"),
    [
        *((1, 1, False, False), (2, 2, False, False), (2, 1, False, False), (2, 2, True, False), (2, 1, True, False)),
        *((1, 1, False, True), (2, 2, True, True)),
    ],
)
def test_ranks_keep_as_many_bytes_of_experts_as_is_computed(tp: int, etp: int, sequence: bool, bias: bool) -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence,
        expert_model_parallel_size=tp // etp,
        expert_tensor_parallel_size=etp,
    )
    model = replace(SMALL, moe_add_bias_linear=bias)
    config = Config(model, parallel, training=TrainingConfig(seq_length=S, micro_batch_size=B))
    (kind,) = set(layer_kinds(config.model, config.adapter))
    expected = LayerMemory(config, 50, "cpu").kept(kind) / (S * B)
    ranks = run_ranks(tp, bytes_kept, etp, sequence, model)
    # Ranks that hold different experts receive more or fewer rows, but together they have all.
    assert sum(ranks) / tp == pytest.approx(expected, rel=0.05)


def test_the_bound_of_an_uneven_load_is_all_rows_of_an_ep_group() -> None:
    config = read_config(QWEN).config
    stages = Stages.of(config.parallel, config.model, vocab_size=151_936, seq_length=4096)
    loads = stages.loads(8)
    more = bytes_of_uneven_load(config, loads, vocab_size=151_936)
    # Recomputed layer by layer: the rows of one layer, 4,096 tokens x 8 chosen, in bf16.
    rows = 4096 * 8
    assert more == rows * 2 * (2048 + 2048 + 3 * 768 + 768)
    dense = expected_memory(config, loads, vocab_size=151_936)
    assert dense[0].activations > more
