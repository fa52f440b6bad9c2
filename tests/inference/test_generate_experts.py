"""Tests of generation and evaluation with experts: the same text in every layout, with and without a KV cache."""

from pathlib import Path

import pytest
import torch
from engines import NO_DROPOUT
from jobs import tiny, train_on_ranks, write_tokens
from ranks import run_ranks
from sweeps import further
from test_generate import Seen, logits_without_cache, seen_of

from megatronish.commands.generate import prepare
from megatronish.commands.inference_flags import EvaluateArguments, GenerateArguments
from megatronish.commands.perplexity import prepare as prepare_evaluation
from megatronish.core.errors import UserError
from megatronish.data.loader import Collator
from megatronish.inference.load import find_trained, load_engine, load_model
from megatronish.inference.scoring import measure
from megatronish.launch.place import Place
from megatronish.parallel.mesh import leave
from megatronish.train.start import start_mesh

EXPERTS = (
    "--vocab-size 300 --num-layers 4 --num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 2 --swiglu "
    "--moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    f"--moe-router-bias-update-rate 0.05 --moe-expert-capacity-factor 1.0 --train-iters 3 {NO_DROPOUT}"
)
PROMPTS = [[65], [66, 67, 68], list(range(97, 97 + 14))]  # the last one outgrows the model's 16 tokens
LAYOUTS = ["tp2 ep2 etp1", "tp2 ep1 etp2", "pp2", "tp2 pp2 ep2 etp1"]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run over experts, with a router's bias that is not zero."""
    folder = tmp_path_factory.mktemp("experts")
    prefix = write_tokens(folder / "bytes", vocab_size=257)
    data = f"--tokenizer-type bytes --split 1,0,0 --data-path {prefix}"
    train_on_ranks(tiny(folder / "run", f"{EXPERTS} --dp 2 --ep 2", data=data), world_size=2)
    return folder / "run"


def arguments_of(load: Path, layout: str) -> GenerateArguments:
    sizes = {name.rstrip("0123456789"): int(name[-1]) for name in layout.split()}
    return GenerateArguments(
        load=load,
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp"),
        device="cpu",
    )


def generated(place: Place, load: Path, layout: str) -> Seen:
    """What a rank of `megatronish generate` writes."""
    mesh = start_mesh(prepare(arguments_of(load, layout)).model.config, place)
    seen = seen_of(load_model(load, mesh=mesh).model, PROMPTS, num_tokens=6, seq_length=16, mesh=mesh)
    leave()
    return seen


def test_every_layout_of_experts_writes_what_one_process_writes(load: Path) -> None:
    one = seen_of(load_model(load).model, PROMPTS, num_tokens=6, seq_length=16)
    for layout in LAYOUTS:
        ranks = run_ranks(prepare(arguments_of(load, layout)).model.config.layout.world_size, generated, load, layout)
        assert all(rank.texts == one.texts for rank in ranks), layout
        (chooser,) = [rank for rank in ranks if rank.logits]
        torch.testing.assert_close(torch.stack(chooser.logits), torch.stack(one.logits), rtol=1e-5, atol=1e-5)


def test_a_kv_cache_changes_no_token_and_generation_drops_none(load: Path) -> None:
    model = load_model(load).model
    one = seen_of(model, PROMPTS, num_tokens=6, seq_length=16)
    for layer in (1, 2, 3):
        model.layers[str(layer)].mlp.capacity_factor = None  # what a forward without a cache would apply
    for number, (prompt, text) in enumerate(zip(PROMPTS, one.texts, strict=True)):
        for length in range(6):
            expected = logits_without_cache(model, [*prompt, *text[:length]][-16:])
            torch.testing.assert_close(one.logits[length][number], expected, rtol=1e-5, atol=1e-5)


def evaluated(place: Place, load: Path, layout: dict[str, int]) -> float:
    """The loss of one batch by the engine of `megatronish evaluate`."""
    data = str(load.parent / "bytes")
    task = prepare_evaluation(EvaluateArguments(load=load, data_path=data, device="cpu", **layout), place=None)
    mesh = start_mesh(task.config, place)
    engine = load_engine(find_trained(load), task.config, mesh)
    found = measure(
        engine,
        task.windows,
        collate=Collator.of(task.found.description.data, eod=task.text.eod),
        micro_batch_size=4,
        num_bytes=task.text.num_bytes,
        on_progress=lambda _: None,
    )
    leave()
    return found.loss


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"expert_model_parallel_size": 2}, 2),  # dp follows from it
        further(
            ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2)
        ),
        further(({"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}, 4)),
    ],
)
def test_evaluation_over_experts_finds_the_same_loss(load: Path, layout: dict[str, int], ranks: int) -> None:
    (alone,) = run_ranks(1, evaluated, load, {})
    assert run_ranks(ranks, evaluated, load, layout) == pytest.approx([alone] * ranks, rel=1e-5)


def test_experts_are_not_cut_where_there_are_none_or_too_few_ranks(load: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must divide the ranks of a stage"):
        prepare(arguments_of(load, "tp2 ep2"))
    train_on_ranks(tiny(tmp_path / "dense", "--train-iters 1"))
    with pytest.raises(UserError, match="is for a model with experts"):
        prepare(arguments_of(tmp_path / "dense", "tp2 ep2"))
