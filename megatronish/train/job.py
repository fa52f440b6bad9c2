"""What does a config stand for on one rank? Data, the share of the model and schedules, made from it in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatronish.config.config import Config
from megatronish.config.dump import resolved
from megatronish.costs.devices import peak_tflops
from megatronish.costs.flops import model_flops_per_token
from megatronish.data.blend import Dataset
from megatronish.data.datasets import Datasets, build_datasets
from megatronish.data.loader import micro_batches
from megatronish.errors import RunError
from megatronish.mesh import Mesh
from megatronish.model.batch import MicroBatch
from megatronish.optim.batch_size import BatchSizeSchedule
from megatronish.optim.learning_rate import LearningRateSchedule, build_learning_rate_schedule
from megatronish.tokenizer import Tokenizer, build_tokenizer
from megatronish.train.engine import Engine
from megatronish.train.hooks.log import Speed
from megatronish.train.trainer import Progress


@dataclass(frozen=True)
class TrainingJob:
    """A config, the mesh it runs on, and what it reads."""

    config: Config
    mesh: Mesh
    tokenizer: Tokenizer
    vocab_size: int
    datasets: Datasets

    @classmethod
    def open(cls, config: Config, mesh: Mesh) -> "TrainingJob":
        """Open the tokenizer and the data; UserError with a remedy for what cannot be read."""
        tokenizer = build_tokenizer(config.data)
        vocab_size = config.data.vocab_size or tokenizer.vocab_size
        datasets = build_datasets(
            config.data,
            seq_length=config.training.seq_length,
            seed=config.training.seed,
            vocab_size=vocab_size,
            eod=tokenizer.eod,
        )
        return cls(config, mesh, tokenizer, vocab_size, datasets)

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint remembers of the run, so that a continuation can be held against it."""
        return {
            "config": resolved(self.config),
            "vocab_size": self.vocab_size,
            "data": self.datasets.train.identity,
            "eod": self.tokenizer.eod,
        }

    @property
    def device_name(self) -> str:
        """The device as its maker calls it."""
        return torch.cuda.get_device_name(self.mesh.device) if self.mesh.device.type == "cuda" else "cpu"

    @property
    def batch_sizes(self) -> BatchSizeSchedule:
        """The global batch size over the run."""
        return BatchSizeSchedule.of(
            self.config.training.rampup_batch_size, global_batch_size=self.config.global_batch_size
        )

    def num_steps(self, progress: Progress) -> int:
        """The run's last step; of --train-samples counted from where it stands, as batches may have changed."""
        training = self.config.training
        if training.train_iters:
            return training.train_iters
        left = self.batch_sizes.num_steps_left(progress.consumed_samples, training.train_samples or 0)
        return progress.step + left

    @property
    def schedule(self) -> LearningRateSchedule:
        """Learning rate and weight decay over the run."""
        return build_learning_rate_schedule(
            self.config.optimizer, self.config.training, global_batch_size=self.config.global_batch_size
        )

    @property
    def speed(self) -> Speed:
        """What turns the seconds of a step into rates."""
        config = self.config
        return Speed(
            seq_length=config.training.seq_length,
            model_flops_per_token=model_flops_per_token(
                config.model, vocab_size=self.vocab_size, seq_length=config.training.seq_length
            ),
            num_devices=self.mesh.world.size,
            peak_tflops=config.log.peak_tflops_per_device or peak_tflops(self.device_name, config.training.precision),
        )

    def build_engine(self) -> Engine:
        """This rank's share of the model, initialised."""
        config = self.config
        try:
            return Engine.build(
                self.mesh,
                model=config.model,
                parallel=config.parallel,
                training=config.training,
                optimizer=config.optimizer,
                vocab_size=self.vocab_size,
                recompute=config.recompute,
            )
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            raise RunError(
                f"the model's share of a rank does not fit into its memory ({str(error).splitlines()[0]}); spread it "
                "further with --tp and --pp, or make it smaller"
            ) from error

    def batches_of(self, dataset: Dataset) -> Callable[[int, int], list[MicroBatch]]:
        """(consumed samples, global batch size) -> this rank's micro-batches of that step."""
        training, data, dp = self.config.training, self.config.data, self.mesh.dp

        def prepare(consumed_samples: int, global_batch_size: int) -> list[MicroBatch]:
            return micro_batches(
                dataset,
                consumed_samples=consumed_samples,
                global_batch_size=global_batch_size,
                micro_batch_size=training.micro_batch_size,
                dp_rank=dp.rank,
                dp_size=dp.size,
                eod=self.tokenizer.eod,
                reset_position_ids=data.reset_position_ids,
                reset_attention_mask=data.reset_attention_mask,
                eod_mask_loss=data.eod_mask_loss,
            )

        return prepare

    def evaluation_of(self, dataset: Dataset) -> Callable[[int], list[MicroBatch]]:
        """Number of an evaluation batch -> this rank's micro-batches of it."""
        prepare, size = self.batches_of(dataset), self.config.global_batch_size
        return lambda number: prepare(number * size, size)
