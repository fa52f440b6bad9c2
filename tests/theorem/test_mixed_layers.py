"""A model whose layers differ, described outside the package by specs: costs are those of its own layers, and it trains
the same in every layout.

Windows and full attention alternate; some layers have grouped queries, normalised heads, another size and activation of
the MLP, no biases.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from saved import saved_by
from sweeps import some_of
from torch.utils.flop_counter import FlopCounterMode

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.engine.build import build_engine
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.parameters import num_parameters, parameters_of_stage
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT, Execution
from megatronish.parallel.mesh import Mesh, dense_domain
from megatronish.parallel.sharding import collect_shardings, initialize
from megatronish.parallel.stages import Stages
from megatronish.specs.attention import AttentionSpec
from megatronish.specs.flops import forward_flops, layer_flops
from megatronish.specs.layers import LayerSpec, MixedModelConfig, MLPSpec

S, B, GLOBAL_BATCH_SIZE, VOCAB_SIZE = 24, 2, 8, 61
TRAINING = TrainingConfig(seq_length=S, micro_batch_size=B, global_batch_size=GLOBAL_BATCH_SIZE)

FULL = AttentionSpec(num_heads=4, num_kv_heads=4, head_size=12)
WINDOW = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=12, window=5, qk_norm=True, qkv_bias=False, out_bias=False
)
LAYERS = (
    LayerSpec(WINDOW, MLPSpec(192, "gelu")),
    LayerSpec(FULL, MLPSpec(400, "swiglu", bias=False)),
    LayerSpec(WINDOW, MLPSpec(64, "squared_relu")),
    LayerSpec(FULL, MLPSpec(64, "gelu_tanh")),
    LayerSpec(WINDOW, MLPSpec(64, "gelu")),
    LayerSpec(replace(FULL, num_heads=8, num_kv_heads=2), MLPSpec(64, "swiglu")),
)
MODEL = MixedModelConfig(
    num_layers=6,
    hidden_size=48,
    num_attention_heads=4,
    position_embedding_type="rope",
    attention_dropout=0.1,
    hidden_dropout=0.1,
    make_vocab_size_divisible_by=1,
    layers=LAYERS,
)


class Trained(NamedTuple):
    """What one rank saw."""

    losses: list[float]
    grad_norms: list[float]
    num_parameters: int
    layers: list[int]


def train(place: Place, parallel: ParallelConfig) -> Trained:
    mesh = Mesh.of(parallel, place)
    engine = build_engine(
        Config(model=MODEL, parallel=parallel, training=TRAINING, optimizer=OptimizerConfig()),
        mesh,
        vocab_size=VOCAB_SIZE,
    )
    data = MockSamples(name="training", seq_length=S, seed=1, vocab_size=VOCAB_SIZE, eod=0)
    results = []
    for step in range(4):
        batches = micro_batches(
            data,
            consumed_samples=step * GLOBAL_BATCH_SIZE,
            global_batch_size=GLOBAL_BATCH_SIZE,
            share=BatchShare(mesh.dp.rank, mesh.dp.size, B),
            collate=Collator(eod=0),
        )
        results.append(engine.step(batches, num_steps_done=step, learning_rate=1e-3, weight_decay=0.0))
    return Trained(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        sum(parameter.numel() for parameter in engine.stage.model.parameters()),
        sorted(int(name) for name in engine.stage.model.layers),
    )


def parallel_of(**settings: object) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        data_parallel_size=1,
        pipeline_split="auto",
        **settings,  # type: ignore[arg-type]
    )


def stages_of(parallel: ParallelConfig) -> Stages:
    return Stages.of(parallel, MODEL, vocab_size=VOCAB_SIZE, seq_length=S)


@pytest.mark.parametrize(
    "settings",
    some_of(
        [
            {},
            {"sequence_parallel": True, "zero_stage": 2},
            {"pipeline_schedule": "zb-v"},
            {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2},
        ],
        [{"pipeline_schedule": "zb-v"}],
    ),
    ids=lambda settings: " ".join(map(str, settings.values())) or "1f1b",
)
def test_layers_that_differ_train_in_stages_as_in_one_process(settings: dict[str, object]) -> None:
    parallel = parallel_of(**settings)
    (alone,) = run_ranks(1, train, ParallelConfig(data_parallel_size=1))
    ranks = run_ranks(4, train, parallel)
    assert alone.layers == list(range(6))
    for rank, seen in enumerate(ranks):
        assert seen.losses == pytest.approx(alone.losses, rel=1e-5)
        assert seen.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)
        load = stages_of(parallel).loads(4)[rank // 2]
        assert seen.layers == sorted(load.all_layers)
        held = parameters_of_stage(
            MODEL,
            [LAYERS[layer] for layer in load.all_layers],
            vocab_size=MODEL.padded_vocab_size(VOCAB_SIZE, 2),
            seq_length=S,
            is_first=load.is_first,
            is_last=load.is_last,
        )
        assert seen.num_parameters == held.per_rank(2)


def test_the_automatic_split_gives_the_stage_of_dear_layers_fewer() -> None:
    flops = [layer_flops(MODEL, layer, seq_length=S) for layer in LAYERS]
    head = 2 * MODEL.hidden_size * VOCAB_SIZE

    def slowest(cut: int) -> float:
        return max(sum(flops[:cut]), sum(flops[cut:]) + head)

    first, second = stages_of(parallel_of()).layers
    assert slowest(first.stop) == min(slowest(cut) for cut in range(1, 6)) < slowest(3)
    assert second == range(first.stop, 6)


def built(model: ModelConfig) -> GPT:
    gpt = GPT(model, vocab_size=VOCAB_SIZE, num_positions=S)
    initialize(gpt, collect_shardings(gpt), seed=1, domains=dense_domain(gpt.tp.axis))
    return gpt


def batch() -> MicroBatch:
    tokens = torch.randint(0, VOCAB_SIZE, (B, S + 1), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(B, S, dtype=torch.bool)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous(), mask, torch.arange(S).repeat(B, 1), torch.arange(B))


def test_costs_are_the_sums_of_layers_that_differ() -> None:
    gpt = built(MODEL)
    count = num_parameters(MODEL, vocab_size=VOCAB_SIZE, seq_length=S)
    assert count == sum(parameter.numel() for parameter in gpt.parameters())
    # The counter knows products of torch, so attention is by explicit probabilities, of the whole square.
    explicit = GPT(
        MODEL, vocab_size=VOCAB_SIZE, num_positions=S, execution=Execution(attention_backend="fused_softmax")
    )
    initialize(explicit, collect_shardings(explicit), seed=1, domains=dense_domain(explicit.tp.axis))
    with FlopCounterMode(display=False) as counter:
        explicit(None, batch(), step=0)
    square = tuple(replace(layer, attention=replace(layer.attention, window=None)) for layer in LAYERS)
    flops = forward_flops(replace(MODEL, layers=square), vocab_size=VOCAB_SIZE, seq_length=S, attention="full")
    assert counter.get_total_flops() == flops.total * S * B


def test_memory_counts_what_layers_that_differ_keep() -> None:
    """Without RoPE, where every layer keeps exactly what its row says."""
    few = replace(MODEL, position_embedding_type="none")
    many = replace(few, num_layers=12, layers=LAYERS * 2)

    def expected(model: ModelConfig) -> int:
        config = Config(model=model, parallel=ParallelConfig(data_parallel_size=1), training=TRAINING)
        stages = Stages.of(config.parallel, model, vocab_size=VOCAB_SIZE, seq_length=S)
        (memory,) = expected_memory(config, stages.loads(1), vocab_size=VOCAB_SIZE, device="cpu")
        return memory.activations

    def measured(model: ModelConfig) -> int:
        gpt = built(model)
        with saved_by(gpt) as saved:
            gpt(None, batch(), step=0)
        return saved.num_bytes

    assert measured(many) - measured(few) == pytest.approx(expected(many) - expected(few), rel=0.03)
