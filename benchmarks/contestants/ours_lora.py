"""megatronish: the engine of `finetune_gpt.py` with LoRA and its default settings. It also writes what all begin with.

    python -m benchmarks.contestants.ours_lora SIZE FOLDER STEPS

writes chats, a base with random weights as a Hugging Face folder, the adapter that megatronish draws for it as PEFT
does (B is zero), and the plan of which chats are in which row of a step.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.contestants.case import MAX_NORM, WEIGHT_DECAY
from benchmarks.contestants.chats import ALPHA, CASES, LEARNING_RATE, RANK, ChatCase, ChatJob, Chats, micro_batches_of
from megatronish.config.config import Config
from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.data.chat.dataset import ChatDataset
from megatronish.data.loader import Collator
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.formats.adapters import INFIX, SavedAdapter
from megatronish.formats.hf import tensors as hf
from megatronish.formats.peft import folder as peft
from megatronish.formats.weights import Description, LazyTensor, Model, from_ours
from megatronish.launch.libraries import keep_freed_memory
from megatronish.model.batch import MicroBatch
from megatronish.parallel.mesh import Mesh
from megatronish.train.base_model import load_base
from megatronish.train.setup import TrainingJob

MOST_CHATS_A_ROW = 8
"""Of the chats that are written for a row: they are longer on average than an eighth of it."""


class OursLora:
    """An engine, its data, and one step of training."""

    def __init__(self, job: ChatJob, chats: Chats) -> None:
        self.job, self.chats = job, chats
        training, self.engine = open_job(job)
        self.data = training.datasets.train
        self.collate = Collator.of(training.config.data, eod=training.tokenizer.eod)
        self.num_parameters = sum(each.numel() for each in self.engine.stage.model.parameters() if each.requires_grad)
        self._num_steps = 0

    def num_places(self, step: int) -> int:
        """Places of all micro-batches of a step."""
        return len(self.chats.rows_of(step, packs=self.job.packs)) * self.job.case.seq_length

    def step(self, step: int) -> float | None:
        """One update."""
        result = self.engine.step(
            self._micro_batches(step),
            num_steps_done=self._num_steps,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
        )
        self._num_steps += 1
        return result.loss

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        assert isinstance(self.data, ChatDataset)
        rows = self.chats.rows_of(step, packs=self.job.packs)
        samples = [self.data.row([self.chats.places[chat] for chat in row]) for row in rows]
        numbers = range(len(rows))
        size = self.job.case.rows
        return [
            self.collate(samples[start : start + size], numbers[start : start + size])
            for start in range(0, len(rows), size)
        ]


def config_of(case: ChatCase, folder: Path, *, packs: bool) -> Config:
    """The config of a case; everything that it does not say is the default."""
    found = Config(
        model=ModelConfig(
            num_layers=case.num_layers,
            hidden_size=case.hidden_size,
            ffn_hidden_size=case.ffn_size,
            num_attention_heads=case.num_heads,
            group_query_attention=True,
            num_query_groups=case.num_groups,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            disable_bias_linear=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            make_vocab_size_divisible_by=64,
        ),
        training=TrainingConfig(seq_length=case.seq_length, micro_batch_size=case.rows),
        optimizer=OptimizerConfig(clip_grad=MAX_NORM),
        data=DataConfig(
            train_data_path=(str(folder / "chats.jsonl"),),
            dataset_type="chat",
            tokenizer_type="bytes",
            vocab_size=case.vocab_size,
        ),
        chat=ChatConfig(chat_template="plain", pack_samples=packs),
        adapter=AdapterConfig(adapter_type="lora", lora_rank=RANK, lora_alpha=ALPHA),
    )
    return replace(found, checkpoint=replace(found.checkpoint, load_hf=str(folder / "base")))


def open_job(job: ChatJob) -> tuple[TrainingJob, Engine]:
    """Data and engine on this process, with the base of the folder. Adapters are drawn by their names."""
    config = config_of(job.case, Path(job.folder), packs=job.packs)
    training = TrainingJob.open(config, Mesh.of(config.parallel))
    engine = training.build_engine()
    load_base(training, engine)
    return training, engine


def build(job: ChatJob, chats: Chats) -> OursLora:
    """The engine on one process."""
    keep_freed_memory()  # as every run on the CPU does
    return OursLora(job, chats)


def write_chats(case: ChatCase, path: Path, *, count: int) -> None:
    """Questions and answers of random letters, whose lengths are log-normal: most are short, a few are long."""
    stream = np.random.default_rng(0)
    sizes = np.minimum(
        stream.lognormal(np.log([0.4 * case.answer, case.answer]), 0.7, (count, 2)).astype(int) + 1,
        [case.seq_length // 4, case.seq_length // 2],
    )
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    texts = [["".join(stream.choice(letters, size)) for size in pair] for pair in sizes.tolist()]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]})
        for asked, answered in texts
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def description_of(case: ChatCase, config: Config) -> Description:
    """Description of the base."""
    return Description(config.model, case.vocab_size, case.seq_length, eod=256)


def write_base(case: ChatCase, config: Config, folder: Path) -> None:
    """A model with initial weights, as a Hugging Face folder."""
    bare = replace(config, adapter=AdapterConfig())
    engine = build_engine(bare, Mesh.of(bare.parallel), vocab_size=case.vocab_size)
    description = description_of(case, config)
    shapes = description.shardings()
    tensors = {
        name: _lazy(each.detach()[tuple(map(slice, shapes[name].shape))])
        for name, each in engine.stage.model.named_parameters()
    }
    hf.write(folder, Model(description, from_ours(tensors, hf.rules(description)).tensors))


def write_adapter(case: ChatCase, config: Config, engine: Engine, folder: Path) -> None:
    """The adapter of an engine in PEFT's format."""
    tensors = {
        name.replace(INFIX, "."): _lazy(each.detach())
        for name, each in engine.stage.model.named_parameters()
        if each.requires_grad
    }
    peft.write(folder, SavedAdapter(folder, config.adapter, tensors), description_of(case, config), base="base")


def write_plan(case: ChatCase, data: ChatDataset, folder: Path) -> None:
    """Tokens and masks of all chats of the first epoch, and the rows of its steps."""
    epoch = data.epoch(0)
    places = list(zip(epoch.files.tolist(), epoch.places.tolist(), strict=True))
    texts = [data.files[file].texts(place)[0] for file, place in places]
    rows = [epoch.packs.row(number).tolist() for number in range(len(epoch.packs))]
    chats = Chats(
        [torch.from_numpy(text.tokens.astype(np.int64)) for text in texts],
        [torch.from_numpy(text.mask.astype(np.bool_)) for text in texts],
        places,
        [each for each in micro_batches_of(rows, case.rows) if len(each) == case.rows],
    )
    torch.save(chats._asdict(), folder / "chats.pt")


def _lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.clone)


def prepare(size: str, folder: Path, *, num_steps: int) -> None:
    """Write what all contestants begin with."""
    case = CASES[size]
    write_chats(case, folder / "chats.jsonl", count=MOST_CHATS_A_ROW * case.rows * num_steps)
    config = config_of(case, folder, packs=True)
    write_base(case, config, folder / "base")
    training, engine = open_job(ChatJob("ours_lora", size, str(folder), packs=True))
    write_adapter(case, config, engine, folder / "adapter")
    assert isinstance(training.datasets.train, ChatDataset)
    write_plan(case, training.datasets.train, folder)


if __name__ == "__main__":
    prepare(sys.argv[1], Path(sys.argv[2]), num_steps=int(sys.argv[3]))
