"""Names of tensors in Megatron-LM's format `torch_dist`, and which of them make a tensor as names.py calls it.

They are those of megatron-core's layers on Transformer Engine, also where others saved, with three differences that
depend on the version and on the layers:

    decoder.layers.3.mlp.linear_fc2.weight                              a layer by itself
    decoder.layers.mlp.linear_fc2.weight [L, ...]                       all layers, if they are alike: before 0.14
    decoder.layers.3.mlp.experts.experts.7.linear_fc2.weight            an expert by itself
    decoder.layers.3.mlp.experts.experts.linear_fc2.weight [E, ...]     all experts of a layer: before 0.14
    ....linear_fc1.weight_w, ....linear_fc1.weight_v             gate and up-projection of a gated MLP, since 0.14

Before 0.14 linear_fc1.weight has the gate's rows, then those of the up-projection, of all ranks.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megatronish.checkpoint.foreign import ListedTensor
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.megatron.experts import name_in_file
from megatronish.formats.megatron.latent import name_of_norms
from megatronish.formats.megatron.names import PREDICTION, canonical_name, has_experts, name_of_layer, numbered
from megatronish.formats.megatron.torch_dist.moments import OPTIMIZER

IN_A_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,9})\.)?(\D.*)")
HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
HALVES = ("w", "v")
EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d{1,9})\.)?(linear_fc[12]\.(?:weight|bias))")

NO_WEIGHTS = {
    r"(chained_\d+\.)?optimizer\.": OPTIMIZER,
    r".*(_extra_state|inv_freq)(/.*)?$": "a state or a buffer of Megatron-LM that is no weight",
    r".*\.(local_)?tokens_per_expert$": "a state or a buffer of Megatron-LM that is no weight",
}
"""Beginnings of names of what is no weight, with the reason why it is left out."""


class TensorPart(NamedTuple):
    """Tensor of the files, at an index in its first dims."""

    key: str
    at: tuple[int, ...] = ()


def reason_to_leave_out(key: str, model: ModelConfig) -> str | None:
    """Why a tensor is no weight of the model; None for weights."""
    if key.startswith("mtp.") and model.num_depths == 0:
        return PREDICTION
    return next((reason for pattern, reason in NO_WEIGHTS.items() if re.match(pattern, key)), None)


def parts_by_name(listed: Mapping[str, ListedTensor], model: ModelConfig) -> dict[str, list[TensorPart]]:
    """Parts of every tensor, whose rows lie one below the other, by its name in names.py.

    UserError for two tensors with one name, and for a stack of another length than the model has layers or experts.
    """
    pieces: dict[str, dict[str, TensorPart]] = {}
    for key in listed:
        whole, half = (match[1], match[2]) if (match := HALF.fullmatch(key)) else (key, "")
        for name, index in _rows(whole, key, listed[key].shape, model):
            halves = pieces.setdefault(name, {})
            if half in halves or (halves and "" in (half, *halves)):
                raise UserError(f"it holds {name} twice, as {next(iter(halves.values())).key} and as {key}")
            halves[half] = TensorPart(key, index)
    for name, halves in pieces.items():
        if "" not in halves and len(halves) < len(HALVES):
            lacking = next(half for half in HALVES if half not in halves)
            raise UserError(f"it holds {next(iter(halves.values())).key} and lacks {name}_{lacking}; fetch it again")
    return {name: [halves[half] for half in ("", *HALVES) if half in halves] for name, halves in pieces.items()}


def _rows(whole: str, key: str, shape: tuple[int, ...], model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of the tensors in one of the files, each with its index in the first dims: layer, then expert."""
    whole = numbered(whole, model)
    match = IN_A_LAYER.fullmatch(whole)
    if match is None:
        yield canonical_name(whole), ()
        return
    rest, axis = match[2], 0
    layers = {int(match[1]): ()} if match[1] else _stack(key, shape, axis, model.num_layers, "layers")
    axis += match[1] is None
    expert = EXPERT.fullmatch(rest)
    if expert is None:
        for layer, index in layers.items():
            yield canonical_name(f"decoder.layers.{layer}.{rest}"), index
        return
    experts = {int(expert[1]): ()} if expert[1] else _stack(key, shape, axis, model.num_experts or 0, "experts")
    for layer, index in layers.items():
        for number, further in experts.items():
            yield f"decoder.layers.{layer}.mlp.experts.{expert[2]}{number}", (*index, *further)


def _stack(key: str, shape: tuple[int, ...], axis: int, number: int, what: str) -> dict[int, tuple[int, ...]]:
    """Indices in a dim that counts layers or experts, by their number; UserError for another length of it."""
    length = shape[axis] if axis < len(shape) else 0
    if length != number:
        raise UserError(f"its {key} is of {length} {what}, and its arguments say {number}; it is of two models")
    return {row: (row,) for row in range(number)}


# To their names.


def keys_of(name: str, model: ModelConfig, *, is_local: bool) -> tuple[str, ...]:
    """Names in the files, since 0.14, of the tensors whose rows make one of names.py, in their order.

    `is_local`: for megatron-core's own layers, which name the norms before experts otherwise.
    """
    match = IN_A_LAYER.fullmatch(name)
    if match is None:
        return (name,)
    layer, rest = int(match[1]), match[2]
    if has_experts(layer, model):
        rest = re.sub(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)", r"mlp.experts.experts.\2.\1", rest)
        if not is_local:
            rest = name_in_file(rest, is_grouped=True)
    if model.multi_latent_attention:
        rest = name_of_norms(rest, is_local=is_local)
    key = name_of_layer(layer, rest, model)
    is_halved = model.is_gated and re.fullmatch(r".*\.linear_fc1\.(weight|bias)", key)
    return tuple(f"{key}_{half}" for half in HALVES) if is_halved else (key,)


def states_of(keys: Iterable[str], *, is_local: bool) -> list[str]:
    """Names of the empty states of modules, one for each linear layer, without which nothing is loaded there.

    Transformer Engine has more of them, norms and the core of attention among them, depending on its version: those
    that a version does not have are passed over.
    """
    kind = r".*\.(?:linear_[a-z0-9_]+|eh_proj)" if is_local else r"(?:.*\.)?[a-z0-9_]+"
    pattern = rf"((?:decoder|mtp)\.{kind})\.weight(_[wv])?"
    modules = dict.fromkeys(match[1] for key in keys if (match := re.fullmatch(pattern, key)))
    if not is_local:
        layers = [match[1] for name in modules if (match := re.fullmatch(r"(.*\.self_attention)\.linear_proj", name))]
        modules |= dict.fromkeys(f"{layer}.core_attention" for layer in layers)
    return [f"{module}._extra_state/shard_0_1" for module in modules]
