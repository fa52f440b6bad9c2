"""Runs that learn from preferences, for tests: pairs and labelled completions, and one step of every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chat_formats import chatml
from chat_tokenizers import save_tokenizer, write_lines
from theorem import Held, Parts

from megatronish.config.config import Config
from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.config.sections.finetuning import AdapterConfig, PreferenceConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import RecomputeConfig, TrainingConfig
from megatronish.data.chat.dataset import ChatDataset
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.model.adapters import is_adapter
from megatronish.model.batch import MicroBatch
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.streams import normal_rectangle
from megatronish.train.setup import TrainingJob

IM = ("<|im_start|>", "<|im_end|>")
NUM_PAIRS = 12
S = 192
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=24,
    num_attention_heads=4,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    ffn_hidden_size=32,
    position_embedding_type="rope",
)
LORA = AdapterConfig(adapter_type="lora", lora_rank=3, lora_alpha=6.0)


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answered(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def write_preferences(folder: Path) -> Path:
    """A tokenizer, pairs.jsonl and labelled.jsonl, of messages, with completions of different lengths."""
    save_tokenizer(folder / "tokenizer", IM, template=chatml())
    stream = np.random.default_rng(5)
    pairs, labelled = [], []
    for number, (a, b, c) in enumerate(stream.integers(1, 24, (NUM_PAIRS, 3)).tolist()):
        prompt = asked("".join(chr(97 + (number + i) % 26) for i in range(a)))
        chosen, rejected = answered("yes " * (b // 4 + 1)), answered("no" * (c // 2 + 1))
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        is_wanted = number % 3 > 0
        labelled.append({"prompt": prompt, "completion": chosen if is_wanted else rejected, "label": is_wanted})
    write_lines(folder / "pairs.jsonl", pairs)
    write_lines(folder / "labelled.jsonl", labelled)
    return folder


class Case(NamedTuple):
    """What is trained: an objective with its numbers, and whether adapters learn."""

    objective: str
    numbers: dict[str, Any]
    adapter: AdapterConfig = AdapterConfig()
    dropout: float = 0.0
    pack: bool = True


class Spread(NamedTuple):
    """How it is trained."""

    parallel: ParallelConfig = ParallelConfig()
    micro_batch_size: int = 1
    recompute: RecomputeConfig = RecomputeConfig()


class Seen(NamedTuple):
    """Metrics of a step, its gradient norm, this rank's gradients, and those of an evaluation."""

    metrics: dict[str, float]
    grad_norm: float
    weight: int
    gradients: Parts
    evaluation: float


def config_of(case: Case, spread: Spread, folder: str) -> Config:
    name = "labelled" if case.objective == "kto" else "pairs"
    reference = {"load": "somewhere"} if case.numbers.get("reference") else {}
    found = Config(
        model=replace(MODEL, hidden_dropout=case.dropout, attention_dropout=case.dropout),
        parallel=spread.parallel,
        recompute=spread.recompute,
        training=TrainingConfig(
            seq_length=S, micro_batch_size=spread.micro_batch_size, objective=case.objective, seed=11
        ),
        optimizer=OptimizerConfig(optimizer="sgd", clip_grad=0.0),
        data=DataConfig(
            train_data_path=(f"{folder}/{name}.jsonl",),
            dataset_type="chat",
            tokenizer_type="huggingface",
            tokenizer_model=f"{folder}/tokenizer",
        ),
        chat=ChatConfig(pack_samples=case.pack),
        adapter=case.adapter,
        preference=PreferenceConfig(**case.numbers),
    )
    return replace(found, checkpoint=replace(found.checkpoint, **reference))


def fill(engine: Engine, *, scale: float, adapters: bool) -> None:
    """Add named values to all parameters, or to those of adapters that begin at zero: so no two models are alike."""
    for name, shard in engine.data_parallel.shards.items():
        if is_adapter(name) == adapters and not name.endswith(".A"):
            for piece in shard.pieces:
                shape = engine.stage.shardings[name].shape
                values = normal_rectangle(shape, piece.global_offset, piece.sizes, names=("test", name))
                piece.view(shard.master).data.add_(scale * values)
    engine.data_parallel.gather_parameters(frozen=True)


def draw(engine: Engine) -> None:
    """Named values for all parameters of a model that was not initialised."""
    for name, shard in engine.data_parallel.shards.items():
        for piece in shard.pieces:
            shape = engine.stage.shardings[name].shape
            values = normal_rectangle(shape, piece.global_offset, piece.sizes, names=("reference", name))
            piece.view(shard.master).data.copy_(0.05 * values + ("norm.weight" in name))
    engine.data_parallel.gather_parameters(frozen=True)


def gradients_of(engine: Engine) -> Parts:
    """Copies of the rectangles of what learns."""
    gradients, shards = engine.data_parallel.gradients, engine.data_parallel.shards
    return {
        name: [Held(piece.global_offset, piece.view(gradient).clone()) for piece in shards[name].pieces]
        for name, gradient in gradients.items()
    }


def batches_of(job: TrainingJob, count: int) -> list[MicroBatch]:
    return job.batches_of(job.datasets.train)(0, count)


def one_step(place: Place, case: Case, spread: Spread, folder: str) -> Seen:
    """Two steps of SGD with the numbers of the second one, over the whole epoch."""
    config = config_of(case, spread, folder)
    mesh = Mesh.of(config.parallel, place)
    job = TrainingJob.open(config, mesh)
    engine = job.build_engine()
    fill(engine, scale=0.05, adapters=config.adapter.is_used)
    if engine.reference is not None:
        draw(engine.reference)
    data = job.datasets.train
    assert isinstance(data, ChatDataset)
    batches = batches_of(job, data.num_samples)
    engine.step(batches, num_steps_done=0, learning_rate=0.5 if case.adapter.is_used else 0.01, weight_decay=0.0)
    evaluation = engine.evaluate(batches)
    result = engine.gradients(batches, num_steps_done=1)
    gradients = gradients_of(engine)
    loss = evaluation.objective["loss"] / evaluation.weight
    return Seen(dict(result.metrics), result.grad_norm, result.num_loss_tokens, gradients, loss)
