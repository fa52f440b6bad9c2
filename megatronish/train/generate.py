"""What does a trained model write? One process, from a checkpoint of any layout."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.checkpoint.folder import DamagedError, find_checkpoint
from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import model_tensors
from megatronish.config.data import DataConfig
from megatronish.config.model import ModelConfig
from megatronish.errors import UserError
from megatronish.mesh.groups import Mesh
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.sharding import Shard, collect_shardings
from megatronish.streams import torch_stream
from megatronish.tokenizer import Tokenizer
from megatronish.train.keep import read_run


class Trained(NamedTuple):
    """A whole model in one process, and what it was trained with."""

    model: GPT
    data: DataConfig
    seq_length: int
    step: int


def load_model(load: Path, *, step: int | None = None) -> Trained:
    """From a run folder, its checkpoints folder or one step's folder; UserError if it holds no checkpoint."""
    checkpoint = find_checkpoint(load, step=step) if load.is_dir() else None
    if checkpoint is None:
        raise UserError(f"{load} holds no checkpoint; name a run folder, its checkpoints folder or one step's folder")
    state = read_run(checkpoint)
    config = state["config"]
    try:
        model_config, data_config = ModelConfig(**config["model"]), _data_config(config["data"])
    except TypeError as error:
        raise DamagedError(checkpoint, f"its config is not one of this version ({error})") from error
    seq_length = config["training"]["seq_length"]
    model = GPT(
        model_config,
        vocab_size=state["vocab_size"],
        num_positions=model_config.max_position_embeddings or seq_length,
    )
    mesh = Mesh.start()
    shardings = collect_shardings(model)
    shards = {
        name: Shard(parameter.detach(), tuple(shardings[name].pieces(mesh.tp)))
        for name, parameter in model.named_parameters()
    }
    tensors = model_tensors(shards, shardings, mesh, mesh.copied)
    load_tensors(checkpoint, tensors, mesh=mesh)
    return Trained(model.eval(), data_config, seq_length, state["step"])


def _data_config(saved: dict[str, Any]) -> DataConfig:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return DataConfig(**values)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """At least one token: after the end of a document, another begins. UserError for what is no text."""
    try:
        return tokenizer.encode(prompt) or [tokenizer.eod]
    except ValueError as error:
        raise UserError(f"the prompt {prompt!r} cannot be turned into tokens: {error}; change it") from error


def generate(
    model: GPT,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    seq_length: int,
    eod: int | None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """The tokens that follow `prompt`, one by one, until `eod` or `num_tokens`; temperature 0 takes the likeliest.

    The model sees the last `seq_length` tokens; every token runs all of them (no cache of keys and values).
    """
    generator = torch_stream(seed, "generate")
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = next_logits(model, tokens[-seq_length:])
        token = _choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if token == eod:
            return
        tokens.append(token)
        yield token


@torch.no_grad()
def next_logits(model: GPT, tokens: Sequence[int]) -> Tensor:
    """[V] in fp32, of the token after `tokens`."""
    ids = torch.tensor([list(tokens)])
    positions = torch.arange(ids.shape[1])[None]
    batch = MicroBatch(ids, ids, torch.ones_like(ids, dtype=torch.bool), positions, torch.zeros(1, dtype=torch.int64))
    x = model.hidden(None, batch, step=None)
    return model.logits(x[-1:])[0, 0, : model.vocab_size].float()


def _choose(logits: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    # The largest becomes 0, and fp64 holds any temperature: nothing is infinity minus infinity, or 0 over 0.
    probabilities = ((logits - logits.max()).double() / temperature).softmax(-1)
    values, order = probabilities.sort(descending=True)
    # Keep the likeliest tokens whose sum before each is below top_p: never none.
    kept = values.cumsum(-1) - values < top_p
    if top_k > 0:
        kept[top_k:] = False
    choice = torch.multinomial(values * kept, 1, generator=generator)
    return int(order[choice])
