"""Sample of generated text at the end of a training run: --sample-prompt of `megatronish pretrain`."""

import tempfile
from pathlib import Path
from typing import Any

from megatronish.checkpoint.folder import find_checkpoint
from megatronish.config.config import Config
from megatronish.core.remote import RemotePath, location
from megatronish.inference.generate import Sampling, generate
from megatronish.inference.load import load_model
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.tokenizer import encode_prompt
from megatronish.train.checkpoint_state import read_run


def print_sample(config: Config) -> int:
    """Print text generated from --sample-prompt with the newest checkpoint, if the run is finished; the exit status.

    The process that started the ranks calls this after they have ended, and loads the whole model.
    """
    prompt = config.log.sample_prompt
    if prompt is None or config.data.mock_data or not config.model.is_causal:
        return 0
    checkpoint = find_checkpoint(location(config.save_place))
    if checkpoint is None or not _is_finished(config, read_run(checkpoint)):
        return 0
    tokenizer = build_tokenizer(config.data)
    with tempfile.TemporaryDirectory(prefix="megatronish-") as folder:
        if isinstance(checkpoint, RemotePath):
            checkpoint = checkpoint.download(Path(folder) / checkpoint.name)
        trained = load_model(checkpoint)
    tokens, special = encode_prompt(tokenizer, prompt), None
    if config.model.has_encoder:
        special = tokenizer.span_tokens(config.data.vocab_extra_ids)
        tokens = [*tokens, special.end]
    following = generate(
        trained.model,
        [tokens],
        num_tokens=config.log.sample_tokens,
        seq_length=trained.description.seq_length,
        stops={tokenizer.eod, *trained.description.stops, *(() if special is None else (special.end,))},
        sampling=Sampling(temperature=0.8, top_p=0.95, seed=config.training.seed),
        decoder_start=None if special is None else special.start,
    )
    print(f"\na sample after step {trained.step}, from {prompt!r}:\n")
    written = [token for _, token in following if token is not None]
    print(tokenizer.decode(written if special else [*tokens, *written]))
    return 0


def _is_finished(config: Config, state: dict[str, Any]) -> bool:
    """Whether the checkpoint of this state is the last one that the config asks for."""
    training = config.training
    if training.train_iters:
        return state["step"] >= training.train_iters
    consumed = state["consumed_samples"]
    if training.num_epochs is not None:  # the run has counted the samples
        return consumed >= state["config"]["training"]["train_samples"]
    return consumed + config.global_batch_size > (training.train_samples or 0)
