"""Training job: a config's data, engine and schedules on one rank, made in one place."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatronish.config.config import Config
from megatronish.config.dump import resolved
from megatronish.config.fields import one_of
from megatronish.config.model_source import TOKENIZER_FIELDS
from megatronish.config.portable import absolute
from megatronish.config.sections.data import BlendPhase, DataConfig, parse_blend, parse_blend_schedule
from megatronish.core.aside import Aside
from megatronish.core.errors import RunError, UserError
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.data.chat.audit import Audit
from megatronish.data.chat.dataset import ChatDataset
from megatronish.data.chat.setup import ChatSetup, SideLimits
from megatronish.data.datasets import DatasetSplits, build_datasets
from megatronish.data.fill_in_middle import MiddleRule
from megatronish.data.loader import BatchShare, Collator, micro_batches, places_together, shortened
from megatronish.data.masked import MaskedCollator
from megatronish.data.sample import Dataset, Sample, build_indices, samples_of_epochs
from megatronish.data.spans import SpanCollator, sample_length, sides_of
from megatronish.data.text_pairs import TextPairCollator
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.estimate.costs.layout_costs import LayoutCosts
from megatronish.estimate.planner.devices import peak_tflops
from megatronish.formats.start import read_start
from megatronish.model.batch import MicroBatch
from megatronish.objectives.masked import SentenceObjective
from megatronish.objectives.objective import LogitsObjective
from megatronish.objectives.pairs import AnyObjective, PairObjective
from megatronish.objectives.per_dataset import PerDataset
from megatronish.objectives.table import objective_of
from megatronish.ops.library import fuses_dropout
from megatronish.optim.schedules import (
    BatchSizeSchedule,
    LearningRateSchedule,
    batch_sizes_of,
    build_learning_rate_schedule,
)
from megatronish.parallel.mesh import Mesh
from megatronish.specs.costs import DeviceType
from megatronish.specs.flops import model_flops_per_token
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.tokenizer import Tokenizer
from megatronish.train.hooks.log import Speed
from megatronish.train.own_files import OwnFiles
from megatronish.train.trainer import Progress

# Comparison of a run's tokenizer with that of the model it starts from: chats in other tokens would teach nonsense.
#
# Vocabularies of one size, or one that is smaller, raise no error anywhere else: every token is a row of the embedding,
# but another text's row. Tokens that a tokenizer has in addition (control tokens of chats, say) make no difference
# here.


PROBE = "The quick brown fox, 1234567 times: x = [i**2 for i in range(10)]\n\tÜber naïve 漢字 ½ don't STOP."
"""Text of words, numbers, code and other scripts, which different vocabularies cut differently."""

OF_TEXT = ("sentencepiece", "huggingface", "tiktoken")
"""Kinds that a model was trained with on text; data of the others may have been made by any tokenizer."""


def refuse_other_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """UserError if chats are read with another tokenizer than that of the model to start from.

    A model without a tokenizer, or whose tokenizer's files have gone, has nothing to compare with.
    """
    if config.data.dataset_type != "chat":
        return
    start = read_start(config.checkpoint)
    if start is None or not start.tokenizer:
        return
    fields = {name: getattr(DataConfig(), name) for name in TOKENIZER_FIELDS} | start.tokenizer
    own = replace(config.data, **fields)
    if own == config.data or own.tokenizer_type not in OF_TEXT:
        return
    try:
        theirs_are, ours_are = build_tokenizer(own).encode(PROBE), tokenizer.encode(PROBE)
    except (UserError, OSError, ValueError):  # no file; or no token for some character: nothing to compare
        return
    if ours_are != theirs_are:
        named = config.data.tokenizer_model or config.data.vocab_file or config.data.tokenizer_type
        theirs = own.tokenizer_model or own.vocab_file or own.tokenizer_type
        raise UserError(
            f"the tokenizer {named} writes text in other tokens than {theirs}, that of the model to start from "
            f"({start.source}); leave --tokenizer-model and --tokenizer-type out"
        )


def without_template(path: Path) -> str:
    """Note about a file of completions whose prompts are texts."""
    return (
        f"note: prompts and completions of {path} are texts, so no chat template is around them; for a model that "
        'chats, write them as messages: "prompt": [{"role": "user", "content": ...}], and so on'
    )


@dataclass(frozen=True)
class TrainingJob:
    """Config of a run, the mesh it runs on, its tokenizer and its data sets."""

    config: Config
    mesh: Mesh
    tokenizer: Tokenizer
    vocab_size: int
    datasets: DatasetSplits

    @classmethod
    def open(cls, config: Config, mesh: Mesh) -> "TrainingJob":
        """Open the tokenizer and the data; UserError with a remedy for what cannot be read."""
        tokenizer = build_tokenizer(config.data)
        refuse_other_tokenizer(config, tokenizer)
        vocab_size = config.data.vocab_size or tokenizer.vocab_size
        datasets = open_datasets(config, tokenizer)
        if config.fim.fim_data:
            datasets = datasets.with_middles(MiddleRule.of(config.fim, tokenizer), seed=config.training.seed)
        _refuse_other_data(config, datasets.train)
        return cls(with_length(config, datasets.train), mesh, tokenizer, vocab_size, datasets)

    @property
    def facts(self) -> dict[str, Any]:
        """Description of the run that a checkpoint keeps, with which its continuation is compared."""
        return {
            "config": resolved(absolute(self.config)),
            **self.own_files.facts,
            "vocab_size": self.vocab_size,
            "data": self.datasets.train.identity,
            "eod": self.tokenizer.eod,
        }

    @cached_property
    def own_files(self) -> OwnFiles:
        """Files of which the run's folder has copies."""
        return OwnFiles.of(self.config)

    @property
    def device_name(self) -> str:
        """Name of the device, as its vendor calls it."""
        return torch.cuda.get_device_name(self.mesh.device) if self.mesh.device.type == "cuda" else "cpu"

    @cached_property
    def costs(self) -> LayoutCosts:
        """Costs of the layout, of which the first lines have a table."""
        device_type: DeviceType = "cuda" if self.mesh.device.type == "cuda" else "cpu"
        kernels = fuses_dropout(device_type)
        return LayoutCosts.of(self.config, vocab_size=self.vocab_size, device=device_type, kernels=kernels)

    @property
    def batch_sizes(self) -> BatchSizeSchedule:
        """Schedule of the global batch size."""
        return batch_sizes_of(self.config.training, global_batch_size=self.config.global_batch_size)

    def num_steps(self, progress: Progress) -> int:
        """Number of the last step; of samples and epochs counted from `progress`: batch sizes may have changed."""
        return last_step(self.config, progress)

    @property
    def length(self) -> str | None:
        """The line about the steps that follow from --num-epochs; None if the length is given otherwise."""
        training, data = self.config.training, self.datasets.train
        if training.num_epochs is None:
            return None
        steps, samples = self.num_steps(Progress()), training.train_samples or 0
        filled = self.batch_sizes.consumed_samples(steps) - samples
        return (
            f"num_epochs={training.num_epochs:g} of {data.num_samples or 0:,} samples: {samples:,} samples in "
            f"{steps:,} steps" + (f", the last one filled up with {filled:,} of the next epoch" if filled else "")
        )

    @property
    def schedule(self) -> LearningRateSchedule:
        """Schedule of learning rate and weight decay."""
        return build_learning_rate_schedule(
            self.config.optimizer, self.config.training, global_batch_size=self.config.global_batch_size
        )

    @property
    def speed(self) -> Speed:
        """Numbers that turn the seconds of a step into tokens/s and FLOP/s."""
        config, flops = self.config, None
        with Aside("the count of FLOPs in the log").guard():
            flops = model_flops_per_token(
                config.model,
                vocab_size=self.vocab_size,
                seq_length=config.training.seq_length,
                is_frozen=config.adapter.is_used,
            )
        return Speed(
            seq_length=config.training.seq_length,
            model_flops_per_token=flops,
            num_devices=self.mesh.world.size,
            peak_tflops=config.log.peak_tflops_per_device or peak_tflops(self.device_name, config.training.precision),
        )

    @property
    def objective(self) -> AnyObjective:
        """The objective of the config; of mixed chats it reports the loss of each file, too."""
        objective, data = objective_of(self.config), self.datasets.train
        if isinstance(objective, LogitsObjective | PairObjective | SentenceObjective):
            return objective
        if not isinstance(data, ChatDataset) or len(data.names) < 2:
            return objective
        return PerDataset(objective, data.names)

    def build_engine(self) -> Engine:
        """Engine with this rank's part of the model, initialised."""
        try:
            return build_engine(self.config, self.mesh, vocab_size=self.vocab_size, objective=self.objective)
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            reason = str(error).partition("\n")[0].rpartition("] ")[2]
            raise RunError(
                f"the model's share of a rank does not fit into its memory ({reason}); spread it further with --tp and "
                "--pp, or make it smaller"
            ) from error

    @property
    def collator(self) -> Collator | MaskedCollator | SpanCollator | TextPairCollator:
        """The rules by which samples become a micro-batch."""
        if self.config.model.has_encoder:
            kind = TextPairCollator if self.config.data.has_chats else SpanCollator
            return kind.of(self.config, self.tokenizer.span_tokens(self.config.data.vocab_extra_ids))
        rows = Collator.of(self.config.data, eod=self.tokenizer.eod)
        if self.config.model.is_causal:
            return rows
        return MaskedCollator.of(self.config, rows, self.tokenizer.mask_tokens(), vocab_size=self.vocab_size)

    def batches_of(self, dataset: Dataset) -> Callable[[int, int], list[MicroBatch]]:
        """(consumed samples, global batch size) -> this rank's micro-batches of that step, pinned for a GPU."""
        share = BatchShare.of(self.mesh, self.config.training.micro_batch_size)
        of_rows, multiple = self.collator, places_together(self.config)
        pin_memory = self.mesh.device.type == "cuda" and torch.cuda.is_available()

        train = self.datasets.train
        is_other = isinstance(dataset, ChatDataset) and isinstance(train, ChatDataset) and dataset.names != train.names

        def collate(samples: Sequence[Sample], sample_ids: Sequence[int]) -> MicroBatch:
            rows = shortened(samples, multiple=multiple)
            # Losses of each data set are reported under the names of the training files, which these have not.
            return of_rows([replace(row, dataset_ids=None) for row in rows] if is_other else rows, sample_ids)

        def prepare(consumed_samples: int, global_batch_size: int) -> list[MicroBatch]:
            return micro_batches(
                dataset,
                consumed_samples=consumed_samples,
                global_batch_size=global_batch_size,
                share=share,
                collate=collate,
                pin_memory=pin_memory,
            )

        return prepare

    def evaluation_of(self, dataset: Dataset) -> Callable[[int], list[MicroBatch]]:
        """Number of an evaluation batch -> this rank's micro-batches of it."""
        prepare = self.batches_of(dataset)
        size = self.config.training.eval_global_batch_size or self.config.global_batch_size
        return lambda number: prepare(number * size, size)


def _chat_setup(config: Config, tokenizer: Tokenizer) -> ChatSetup:
    sides = None
    if config.model.has_encoder and config.data.has_chats:
        sides = SideLimits(tokenizer.span_tokens(config.data.vocab_extra_ids).end, *sides_of(config.model))
    return ChatSetup.of(config.chat, config.data, tokenizer, sides=sides)


WHAT = {"text": "texts or chats", "pairs": "pairs of chosen and rejected", "labelled": "completions with a label"}


def open_datasets(config: Config, tokenizer: Tokenizer | None = None) -> DatasetSplits:
    """The data sets of a run, whose indices are built where they are not kept yet."""
    tokenizer = tokenizer or build_tokenizer(config.data)
    return build_datasets(
        config.data,
        seq_length=sample_length(config.model, config.data, seq_length=config.training.seq_length),
        seed=config.training.seed,
        vocab_size=config.data.vocab_size or tokenizer.vocab_size,
        eod=tokenizer.eod,
        chats=_chat_setup(config, tokenizer),
        masks=None if config.model.is_causal else tokenizer.mask_tokens(),
        phases=blend_phases(config),
    )


def with_length(config: Config, train: Dataset) -> Config:
    """The config with --num-epochs in samples, which are known once the training data are open."""
    if config.training.num_epochs is None:
        return config
    return config.with_fields(train_samples=samples_of_epochs(train, config.training.num_epochs))


def last_step(config: Config, progress: Progress) -> int:
    """Number of the last step of a config that has its length; of samples and epochs counted from `progress`."""
    training = config.training
    if training.train_iters:
        return training.train_iters
    sizes = batch_sizes_of(training, global_batch_size=config.global_batch_size)
    count = sizes.num_steps_left if training.num_epochs is None else sizes.num_steps_to
    return progress.step + count(progress.consumed_samples, training.train_samples or 0)


class SamplesOfRun(NamedTuple):
    """Numbers of samples that a run reads: of the training data, and of each other data set, in every evaluation."""

    training: int
    evaluation: int

    @classmethod
    def of(cls, config: Config, train: Dataset) -> "SamplesOfRun":
        """Those of a run from its first step to its last."""
        config, training = with_length(config, train), config.training
        sizes = batch_sizes_of(training, global_batch_size=config.global_batch_size)
        evaluated = training.eval_iters * (training.eval_global_batch_size or config.global_batch_size)
        return cls(sizes.consumed_samples(last_step(config, Progress())), evaluated)


def build_indices_of_run(config: Config) -> SamplesOfRun:
    """Build all sample indices that a run reads, where they are not kept yet; the samples for which they are."""
    datasets = open_datasets(config)
    samples = SamplesOfRun.of(config, datasets.train)
    build_indices(datasets.train, samples.training)
    for dataset in (*datasets.valid.values(), datasets.test):
        if dataset is not None:
            build_indices(dataset, samples.evaluation)
    return samples


def blend_phases(config: Config) -> list[BlendPhase]:
    """Phases of --blend-schedule by sample: those before a step are the samples of all steps before it."""
    data = config.data
    if data.blend_schedule is None:
        return []
    sizes = batch_sizes_of(config.training, global_batch_size=config.global_batch_size)
    num_prefixes = len(parse_blend(data.data_path or data.train_data_path))
    return [
        BlendPhase(sizes.consumed_samples(step), weights)
        for step, weights in parse_blend_schedule(data.blend_schedule, num_prefixes=num_prefixes)
    ]


def _refuse_other_data(config: Config, data: Dataset) -> None:
    """UserError for chats of which the objective cannot learn."""
    name = config.training.objective
    wanted = OBJECTIVE_NAMES[name].learns_from
    if not isinstance(data, ChatDataset) or data.learned_by == wanted:
        return
    if (wanted, data.learned_by) == ("labelled", "pairs"):
        raise UserError(
            f"{data.files[0].path} has {WHAT['pairs']}, and objective={name} learns from {WHAT[wanted]}; add "
            "--chat-format labelled, which reads a pair as a wanted and an unwanted completion"
        )
    fitting = [
        other
        for other, choice in OBJECTIVE_NAMES.items()
        if choice.learns_from == data.learned_by and config.model.model_type in choice.model_types
    ]
    remedy = f"use --objective {one_of(fitting)}, or other data" if fitting else "use other data"
    raise UserError(
        f"{data.files[0].path} has {WHAT[data.learned_by]}, and objective={name} learns from {WHAT[wanted]}; {remedy}"
    )


# Audit of a run's chat data: printed before the first step, and kept in the run folder as text and as a page.


def report_chats(job: TrainingJob, say: Callable[[str], object]) -> None:
    """Print and keep the audit, on the main rank of a run that trains on chats; else nothing."""
    config, data = job.config, job.datasets.train
    if not job.mesh.is_main or not isinstance(data, ChatDataset):
        return
    audit = Audit.of(data, _chat_setup(config, job.tokenizer))
    for file in data.files:
        if data.learned_by != "text" and not file.counts.template:
            say(without_template(file.path))
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "audit.txt").write_text(audit.text() + "\n", encoding="utf-8")
    (config.run_dir / "audit.html").write_text(audit.html(), encoding="utf-8")
    say(audit.text(colour=sys.stdout.isatty(), whole=False))
