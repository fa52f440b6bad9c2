"""Generation of a T5: the encoder reads the prompt once, and the decoder writes with a KV cache."""

import pytest
import torch
from ranks import run_ranks

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.layout import Layout
from megatronish.inference.generate import Sampling, generate
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.stage import build_stage
from megatronish.parallel.sharding import initialize
from megatronish.parallel.stages import Stages

VOCABULARY, START, NUM_TOKENS = 61, 2, 7
MODEL = ModelConfig(
    model_type="t5",
    num_layers=5,
    encoder_num_layers=2,
    decoder_num_layers=3,
    hidden_size=24,
    num_attention_heads=4,
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=6,
    normalization="RMSNorm",
    disable_bias_linear=True,
    geglu=True,
    untie_embeddings_and_output_weights=True,
    init_method_std=0.3,
    make_vocab_size_divisible_by=4,
)
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [5, 6, 7], [20, 21, 22, 23]]


def model_on(mesh: Mesh) -> GPT:
    parallel = ParallelConfig(
        tensor_model_parallel_size=mesh.tp.size, pipeline_model_parallel_size=mesh.pp.size, data_parallel_size=1
    )
    stages = Stages.of(parallel, MODEL, vocab_size=VOCABULARY, seq_length=8)
    stage = build_stage(MODEL, stages, mesh, vocab_size=VOCABULARY, num_positions=8)
    initialize(stage.model, stage.shardings, seed=4, domains=mesh.domains)
    return stage.model.eval()


def written(mesh: Mesh, **how: int) -> list[list[int]]:
    """Tokens of every prompt, greedily; a text ends where it writes token 3."""
    texts: list[list[int]] = [[] for _ in PROMPTS]
    sampling = {"sampling": Sampling(temperature=0.0), "stops": {3}, "decoder_start": START}
    for number, token in generate(
        model_on(mesh), PROMPTS, num_tokens=NUM_TOKENS, seq_length=4, mesh=mesh, **sampling, **how
    ):
        texts[number] += [] if token is None else [token]
    return texts


@torch.no_grad()
def uncached(prompt: list[int]) -> list[int]:
    """The same by a whole forward for every token, without a KV cache, a batch and filler."""
    model, tokens = model_on(Mesh.start()), [START]
    while len(tokens) <= NUM_TOKENS:
        row = torch.tensor([[*prompt, *tokens]])
        mask = torch.ones_like(row, dtype=torch.bool)
        places = torch.arange(row.shape[1])[None]
        batch = MicroBatch(row, row, mask, places, torch.arange(1)).with_encoder(len(prompt))
        logits = model.logits(model.predicting(model.hidden(None, batch, step=None), batch))
        token = int(logits[-1, 0, :VOCABULARY].argmax())
        if token == 3:
            break
        tokens.append(token)
    return tokens[1:]


def in_layout(place: Place, layout: Layout) -> list[list[int]]:
    return written(Mesh.start(layout, rank=place.rank, init_method=place.rendezvous), batch_size=2)


def test_a_kv_cache_writes_what_whole_forwards_write() -> None:
    expected = [uncached(prompt) for prompt in PROMPTS]
    assert len({tuple(text) for text in expected}) == len(PROMPTS), "texts that are alike prove little"
    assert written(Mesh.start(), batch_size=3) == written(Mesh.start(), batch_size=8) == expected


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)])
def test_a_layout_writes_the_same(layout: Layout) -> None:
    assert run_ranks(2, in_layout, layout) == [written(Mesh.start())] * 2
