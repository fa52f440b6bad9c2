"""Tests of the engine: each setting of a config shows in what a rank keeps, sends or launches."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from ranks import run_ranks
from saved import saved_by
from torch import Tensor

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import AttentionBackend, RecomputeConfig, TrainingConfig
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT, ModelChunk, User
from megatronish.parallel import comm
from megatronish.parallel.data_parallel.zero import Zero
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.parallel.schedules.plan import StageChunk
from megatronish.parallel.stages import Stages

S, B, H, VOCABULARY = 32, 2, 24, 64
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=H,
    num_attention_heads=4,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    make_vocab_size_divisible_by=8,
)


def engine_of(
    place: Place,
    parallel: ParallelConfig,
    *,
    recompute: RecomputeConfig | None = None,
    model: ModelConfig = MODEL,
    num_microbatches: int = 2,
    bf16: bool = False,
    optimizer: OptimizerConfig | None = None,
    attention_backend: AttentionBackend = "auto",
) -> tuple[Engine, list[MicroBatch]]:
    layout, mesh = parallel.layout, Mesh.of(parallel, place)
    batch = B * layout.dp * num_microbatches
    engine = build_engine(
        Config(
            model=model,
            parallel=parallel,
            recompute=recompute or RecomputeConfig(),
            training=TrainingConfig(
                seq_length=S,
                micro_batch_size=B,
                global_batch_size=batch,
                bf16=bf16,
                attention_backend=attention_backend,
            ),
            optimizer=optimizer or OptimizerConfig(),
        ),
        mesh,
        vocab_size=VOCABULARY,
    )
    dataset = MockSamples(name="train", seq_length=S, seed=1, vocab_size=VOCABULARY, eod=0)
    share = BatchShare(mesh.dp.rank, layout.dp, B)
    return engine, micro_batches(
        dataset, consumed_samples=0, global_batch_size=batch, share=share, collate=Collator(eod=0)
    )


def kept(place: Place, parallel: ParallelConfig, recompute: RecomputeConfig, model: ModelConfig) -> int:
    """Bytes that the forward of a micro-batch keeps."""
    engine, (batch,) = engine_of(place, parallel, recompute=recompute, model=model, num_microbatches=1)
    with saved_by(engine.stage.model) as saved:
        loss = engine.stage.model(None, batch, step=0).sum()
    loss.backward()  # what is computed again is kept there for a moment: that is not what is counted
    return saved.num_bytes


def test_every_setting_of_recomputation_keeps_less() -> None:
    alone = ParallelConfig()
    dropping = ModelConfig(**{**MODEL.__dict__, "attention_dropout": 0.1})
    nothing = kept(Place(), alone, RecomputeConfig(), dropping)
    selective = kept(Place(), alone, RecomputeConfig("selective"), dropping)
    block = kept(Place(), alone, RecomputeConfig("full", "block", 2), dropping)
    full = kept(Place(), alone, RecomputeConfig("full"), dropping)
    grouped = kept(Place(), alone, RecomputeConfig("full", "uniform", 2), dropping)
    assert nothing > selective > full > grouped
    assert nothing > block > full
    two = ParallelConfig(tensor_model_parallel_size=2)
    whole, shared = (
        run_ranks(2, kept, two, RecomputeConfig("full", distribute_saved_activations=share), MODEL)[0]
        for share in (False, True)
    )
    assert whole - shared == MODEL.num_layers * S * B * H * 4 // 2


def traffic(place: Place, parallel: ParallelConfig) -> dict[str, list[int]]:
    """The elements of every transfer of a step, by the function that makes it."""
    engine, batches = engine_of(place, parallel)
    found: dict[str, list[int]] = {}
    originals = {name: getattr(comm, name) for name in ("start_send", "start_shift", "all_to_all")}

    def noting(name: str) -> Callable[..., Any]:
        def noted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            found[name].append(x.numel())
            return originals[name](x, *args, **kwargs)

        return noted

    try:
        for name in originals:
            found[name] = []
            setattr(comm, name, noting(name))
        engine.gradients(batches, num_steps_done=0)
    finally:
        for name, original in originals.items():
            setattr(comm, name, original)
    return found


def test_context_parallelism_communicates_as_it_was_told() -> None:
    for method, used, unused in (("p2p", "start_shift", "all_to_all"), ("a2a", "all_to_all", "start_shift")):
        parallel = ParallelConfig(context_parallel_size=2, cp_comm_type=method)  # type: ignore[arg-type]
        for seen in run_ranks(2, traffic, parallel):
            assert seen[used] and not seen[unused]


def calls_of_the_fused_softmax(place: Place, parallel: ParallelConfig, backend: AttentionBackend) -> int:
    engine, batches = engine_of(place, parallel, attention_backend=backend, num_microbatches=1)
    with torch.profiler.profile() as profile:
        engine.gradients(batches, num_steps_done=0)
    return sum(each.count for each in profile.key_averages() if each.key == "megatronish::scaled_causal_softmax")


def test_attention_runs_on_the_backend_that_was_asked_for() -> None:
    exchange = ParallelConfig(context_parallel_size=2, cp_comm_type="a2a")
    for backend, calls in (("auto", 0), ("flash", 0), ("unfused", 0), ("fused_softmax", MODEL.num_layers)):
        assert calls_of_the_fused_softmax(Place(), ParallelConfig(), backend) == calls  # type: ignore[arg-type]
    assert run_ranks(2, calls_of_the_fused_softmax, exchange, "fused_softmax") == [MODEL.num_layers] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_boundary_crosses_in_slices_of_tp(sequence_parallel: bool) -> None:
    """Scatter-gather, or a sequence that is cut in any case."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=sequence_parallel
    )
    for seen in run_ranks(4, traffic, parallel):
        assert seen["start_send"] == [S * B * H // 2] * 2


def launched(place: Place, parallel: ParallelConfig) -> tuple[int, int]:
    """Buckets, and those on their way when the last action has ended."""
    engine, batches = engine_of(place, parallel)
    sharing = engine.data_parallel
    assert isinstance(sharing, Zero)
    finish, seen = sharing.finish_reduction, []

    def noted() -> None:
        seen.append(sharing.buckets.num_launched)
        finish()

    sharing.finish_reduction = noted
    engine.gradients(batches, num_steps_done=0)
    return len(sharing.buckets.buckets), seen[0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_gradients_of_every_chunk_leave_before_the_end(schedule: str) -> None:
    settings = {
        "data_parallel_size": 2,
        "pipeline_schedule": schedule,
        "num_virtual_stages_per_pipeline_rank": 2 if schedule == "interleaved" else None,
        "ddp_bucket_size": 100,
    }
    for buckets, on_their_way in run_ranks(2, launched, ParallelConfig(**settings)):  # type: ignore[arg-type]
        assert buckets > 8 and on_their_way == buckets
    if schedule == "1f1b":
        settings["overlap_grad_reduce"] = False
        for _, on_their_way in run_ranks(2, launched, ParallelConfig(**settings)):  # type: ignore[arg-type]
            assert on_their_way == 0


def users(chunks: Sequence[ModelChunk], *, tied: bool) -> dict[str, list[User]]:
    model = ModelConfig(**{**MODEL.__dict__, "num_layers": 2, "untie_embeddings_and_output_weights": not tied})
    return GPT(model, vocab_size=VOCABULARY, num_positions=S, chunks=chunks).users()


def test_a_parameters_users_are_told_by_chunk_and_kind() -> None:
    both = [ModelChunk([0], True, False), ModelChunk([1], False, True)]
    tied, untied = users(both, tied=True), users(both, tied=False)
    assert tied["embedding.tokens.weight"] == [User(0, False), User(1, True)]
    assert untied["embedding.tokens.weight"] == [User(0, False)]
    assert untied["head.weight"] == [User(1, True)]
    for found, (layer, chunk) in product((tied, untied), ((0, 0), (1, 1))):
        assert found[f"layers.{layer}.mlp.fc1.weight"] == [User(chunk, True)]
        assert found[f"layers.{layer}.mlp.fc1.bias"] == [User(chunk, False)]
        assert found["final_norm.weight"] == [User(1, False)]
    assert users([ModelChunk([1], False, True)], tied=True)["embedding.tokens.weight"] == [User(0, True)]
    assert all(len(each) >= 1 for each in (*tied.values(), *untied.values()))


def stages_of(**settings: object) -> Stages:
    model = ModelConfig(**{**MODEL.__dict__, "num_layers": 16})
    parallel = ParallelConfig(pipeline_model_parallel_size=4, **settings)  # type: ignore[arg-type]
    return Stages.of(parallel, model, vocab_size=8 * 24 * H, seq_length=S)


def test_an_automatic_split_weighs_the_head() -> None:
    """Of 8 x 24 H rows: the product is worth about 14 layers of 12 H^2 and their attention."""
    assert [len(part) for part in stages_of().layers] == [4, 4, 4, 4]
    assert [len(part) for part in stages_of(pipeline_split="auto").layers] == [5, 5, 5, 1]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_a_load_is_what_the_actions_leave_waiting(schedule: str) -> None:
    virtual = 2 if schedule == "interleaved" else None
    stages = stages_of(
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=virtual,
        decoder_first_pipeline_num_layers=5,
    )
    for stage, load in enumerate(stages.loads(6)):
        done: list[tuple[str, int, int]] = []
        for action in stages.actions(stage, 6):
            done.append(tuple(action))  # type: ignore[arg-type]
            count = {(kind, chunk): sum(d[:2] == (kind, chunk) for d in done) for kind in "FBW" for chunk in (0, 1)}
            live = tuple(count["F", chunk] - count["B", chunk] for chunk in (0, 1))
            due = tuple(count["B", chunk] - count["W", chunk] for chunk in (0, 1)) if schedule == "zb-v" else (0, 0)
            assert (live, due) in load.instants
        assert load.layers == tuple(stages.layers_at(StageChunk(stage, chunk)) for chunk in (0, 1))
        assert stage > 0 or len(load.all_layers) == 5
        assert (load.is_first, load.is_last) == (stage == 0, stage == (0 if schedule == "zb-v" else 3))


def test_axes_of_one_rank_are_not_hooked_or_sent_over() -> None:
    engine, batches = engine_of(Place(), ParallelConfig())
    assert engine.executor.boundary.same_over.size == 1
    assert engine.mesh.tp == Axis("tp", 1, 0, (0,))
    assert torch.isfinite(torch.tensor(engine.gradients(batches, num_steps_done=0).loss))
