"""Finding of a trained model on disk, a checkpoint or a Hugging Face folder, with its description and adapters."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.config.check import problems
from megatronish.config.config import Config
from megatronish.config.hub import local_model, local_tokenizer
from megatronish.config.rules.model import too_few_positions
from megatronish.config.sections.adapter import AdapterConfig
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.run import CheckpointConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.formats import native
from megatronish.formats.adapters import SavedAdapter
from megatronish.formats.hf import tensors as hf
from megatronish.formats.hf.config_json import CONFIG
from megatronish.formats.load_sharded import open_hf
from megatronish.formats.megatron.names import LATEST
from megatronish.formats.native import description_of
from megatronish.formats.read_adapter import read_adapter
from megatronish.formats.safetensors import INDEX
from megatronish.formats.weights import Description, LazyTensor
from megatronish.tokenizer.names import TokenizerType
from megatronish.tokenizer.tokenizer import build_tokenizer

FOREIGN = (LATEST, INDEX)
NO_ADAPTERS: Mapping[str, Path] = MappingProxyType({})


class SavedModel(NamedTuple):
    """A model on disk and its description; `adapters` are folders with adapters of it, by name.

    `checkpoint` is one step's folder, or with `is_hf` a Hugging Face folder.
    """

    checkpoint: Path
    step: int
    description: Description
    adapters: Mapping[str, Path] = NO_ADAPTERS
    is_hf: bool = False

    def read_adapters(self) -> dict[str, SavedAdapter]:
        """The adapters by name, not read yet."""
        return {name: read_adapter(folder, self.description) for name, folder in self.adapters.items()}

    def tensors(self) -> dict[str, LazyTensor]:
        """Weights of the base, not read yet, under our names."""
        return open_hf(self.checkpoint).tensors if self.is_hf else native.tensors_in(self.checkpoint)

    def config(self, parallel: ParallelConfig, training: TrainingConfig) -> Config:
        """Config of this model in a new layout and sequence length; UserError if one does not fit the model.

        Its adapter is the first one.
        """
        model, rows = self.description.model, self.description.num_positions
        if model.num_experts is None and parallel.expert_model_parallel_size > 1:
            ep = parallel.expert_model_parallel_size
            raise UserError(f"--expert-model-parallel-size {ep} is for a model with experts, which this is not; use 1")
        if model.position_embedding_type == "learned_absolute":
            if complaint := too_few_positions(rows, seq_length=training.seq_length):
                raise UserError(complaint)
            model = replace(model, max_position_embeddings=rows)
        config = Config(
            model=model,
            parallel=parallel,
            training=replace(training, train_iters=1),
            optimizer=OptimizerConfig(lr=1.0),  # no training: the optimizer and the data only have to be valid
            data=DataConfig(mock_data=True),
            checkpoint=CheckpointConfig(load=str(self.checkpoint)),
        )
        adapters = [saved.config for saved in self.read_adapters().values()] or [AdapterConfig()]
        configs = [replace(config, adapter=adapter) for adapter in adapters]
        if wrong := next((found for each in configs if (found := problems(each))), None):
            raise UserError("\n".join(wrong))
        return configs[0]

    def with_tokenizer(self, path: Path) -> "SavedModel":
        """The same checkpoint with another tokenizer, from a file or folder; its end of document becomes `eod`."""
        kind: TokenizerType = "sentencepiece"
        if path.is_dir() or path.name == "tokenizer.json":
            kind = "huggingface"
        elif path.suffix == ".tiktoken" or self.description.data.tokenizer_type == "tiktoken":
            kind = "tiktoken"  # its other form is a .json, too
        elif path.suffix == ".json":
            kind = "huggingface"
        data = replace(
            self.description.data,
            mock_data=False,
            tokenizer_type=kind,
            tokenizer_model=str(path),
            vocab_file=None,
            merge_file=None,
            vocab_size=self.description.vocab_size,
        )
        return self._replace(description=replace(self.description, data=data, eod=build_tokenizer(data).eod))


def find_trained(
    load: Path,
    *,
    step: int | None = None,
    tokenizer: Path | None = None,
    adapters: Mapping[str, Path] = NO_ADAPTERS,
) -> SavedModel:
    """The checkpoint in a run folder, a checkpoints folder or one step's folder, or a Hugging Face folder or org/name.

    UserError if there is none. `step` None takes the newest. `tokenizer` is a file or folder to use instead of the
    model's own. `adapters` are folders of PEFT, or of runs with adapters, by name.
    """
    load = local_model(load, flag="--load")
    checkpoint = find_checkpoint(load, step=step) if load.is_dir() else None
    if checkpoint is not None:
        state = read_state(checkpoint)
        native.refuse_adapters_alone(state, checkpoint)
        found = SavedModel(checkpoint, state["step"], description_of(checkpoint), adapters)
    elif (load / CONFIG).is_file():
        found = SavedModel(load, 0, hf.describe(load), adapters, is_hf=True)
    elif any((load / name).is_file() for name in FOREIGN):
        raise UserError(f"{load} holds a model in another format; convert it with megatronish convert")
    else:
        raise UserError(f"{load} holds no checkpoint; name a run folder, its checkpoints folder or one step's folder")
    return found if tokenizer is None else found.with_tokenizer(local_tokenizer(tokenizer))
