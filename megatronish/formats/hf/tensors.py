"""Tensors of Hugging Face models in our names: GPT-2, and Llama with its descendants (Mistral, Qwen2, Qwen3).

The family of a folder, and the family for a model, are found by `config.py`. GPT-2 keeps its linear weights transposed,
and queries, keys and values in one tensor; Llama and its descendants keep these in three tensors. Gate and
up-projection are two tensors there and one here. RoPE turns the two halves of a head in all families, as here.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.config.data import DataConfig
from megatronish.config.model import ModelConfig
from megatronish.errors import UserError
from megatronish.files import new_folder
from megatronish.formats import tokenizer_files
from megatronish.formats.hf.config import hf_config_of, read_hf_config
from megatronish.formats.hf.config_json import CONFIG
from megatronish.formats.safetensors import FILE, INDEX, NAMES, nbytes_of, read_folder, write_folder
from megatronish.formats.weights import Description, LazyTensor, Model, TensorRule

FORMAT = "hf"
MAX_SHARD_BYTES = 5_000_000_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD = "lm_head.weight"
# Masks and wavelengths that older versions kept beside the weights; both follow from the config.
BUFFERS = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")


def describe(load: Path) -> Description:
    """Description of the model in a Hugging Face folder; its weights are not opened."""
    if not load.is_dir():
        raise UserError(f"{load} is no folder; download the model, and name the folder with its config.json")
    found = read_hf_config(load)
    stops = sorted({*found.eos_token_ids, *_stops_of_generation(load)})
    return Description(
        model=ModelConfig(**found.model),
        vocab_size=found.vocab_size,
        seq_length=found.seq_length,
        data=DataConfig(**found.data),
        eod=next(iter(found.eos_token_ids), None),
        tokenizer_files=tokenizer_files.in_folder(load),
        origin={FORMAT: found.origin} | ({"stops": stops} if len(stops) > 1 else {}),
    )


def _stops_of_generation(load: Path) -> set[int]:
    """Ids of the tokens that end a text by the folder's generation_config.json."""
    path = load / "generation_config.json"
    if not path.is_file():
        return set()
    try:
        stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object: {error}; mend it or take it away") from error
    found = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(isinstance(token, int) for token in found):
        raise UserError(f"{path}: eos_token_id={stops!r} must be a token id, or a list of them; mend it")
    return set(found)


def read(load: Path) -> Model:
    """Model of a Hugging Face folder, with tensors that are read when they are used."""
    description = describe(load)
    if not any((load / name).is_file() for name in (FILE, INDEX)):
        old = next((path.name for path in sorted(load.glob("*.bin"))), None)
        why = f"weights as {old} alone, a pickle" if old else "no weights"
        raise UserError(
            f"{load} holds {why}, and what is read is {FILE}; fetch that, or load the model with transformers and "
            "save_pretrained it"
        )
    tensors = {name: tensor for name, tensor in read_folder(load).items() if not BUFFERS.fullmatch(name)}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{load}: {name} is of type {NAMES[tensor.dtype]}, and weights are read in "
                f"{', '.join(NAMES[dtype] for dtype in DTYPES)}; save the model in one of these with transformers"
            )
    return Model(description, _with_one_head(load, description, _with_prefix(load, description, tensors)))


def _with_prefix(load: Path, description: Description, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Tensors with full names: a model saved without its head has names without a prefix. Unknown names stay."""
    known = {name for rule in rules(description) for name in rule.theirs}
    found = {}
    for name, tensor in tensors.items():
        whole = f"{_base(description)}.{name}"
        if whole in known and whole in tensors:
            raise UserError(
                f"{load} holds both {name} and {whole}, which are one tensor of its model; take away the wrong one"
            )
        found[whole if whole in known else name] = tensor
    return found


def _with_one_head(load: Path, description: Description, tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Tensors of a tied model without a second copy of the embedding as its head; UserError if the two differ."""
    if not description.model.tied or HEAD not in tensors:
        return tensors
    name = next(iter(rules(description))).theirs[0]
    head = tensors.pop(HEAD)
    if name in tensors:
        table = tensors[name]
        if head.dtype != table.dtype:
            raise UserError(
                f"{load}: {HEAD} is of type {NAMES[head.dtype]} and {name} of {NAMES[table.dtype]}, although "
                "tie_word_embeddings in config.json makes them one; set that to false, or take the head away"
            )

        def read_both() -> Tensor:
            tensor = table.read()
            if not torch.equal(tensor, head.read()):
                raise UserError(
                    f"{load}: {HEAD} is not {name}, although tie_word_embeddings says so in config.json; set that to "
                    "false, or take the head away"
                )
            return tensor

        return {**tensors, name: LazyTensor(table.shape, table.dtype, read_both)}
    # Only the head is there: it is the embedding.
    return {**tensors, name: head}


def config_json(description: Description) -> dict[str, Any]:
    """The config.json of a model; UserError, with the field, if transformers has no such model."""
    return hf_config_of(
        description.model,
        vocab_size=description.vocab_size,
        seq_length=description.seq_length,
        eos_token_id=description.eod,
        origin=description.origin.get(FORMAT),
    )


def _base(description: Description) -> str:
    return _tensors_of(description).base


def rules(description: Description) -> list[TensorRule]:
    """Rules for all tensors of a model, embedding first. UserError if transformers has no such model."""
    return list(_tensors_of(description).rules(description.model))


def _tensors_of(description: Description) -> "FamilyTensors":
    return FAMILY_TENSORS[config_json(description)["model_type"]]


def write(save: Path, model: Model, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a folder that `from_pretrained` reads; it must not exist, or be empty."""
    if max_shard_bytes < 1:
        raise UserError(f"--max-shard-bytes {max_shard_bytes} must be at least 1; for example {MAX_SHARD_BYTES}")
    config = config_json(model.description)
    sizes = Counter[torch.dtype]()
    for tensor in model.tensors.values():
        sizes[tensor.dtype] += nbytes_of(tensor)
    key = "dtype" if "dtype" in config else "torch_dtype"  # transformers' name of it, from 4.56 on and before
    config[key] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    with new_folder(save, decisive=CONFIG) as partial:
        write_folder(partial, model.tensors, max_shard_bytes=max_shard_bytes)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer_files.copy(model.description.tokenizer_files, partial)


# GPT-2


def gpt2_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of GPT-2's tensors, embedding first."""
    yield TensorRule("embedding.tokens.weight", ("transformer.wte.weight",))
    yield TensorRule("embedding.positions.weight", ("transformer.wpe.weight",))
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"transformer.h.{n}"
        yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.ln_1", bias=True)
        yield from _transposed(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn")
        yield from _transposed(f"{ours}.attention.out", f"{theirs}.attn.c_proj")
        yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.ln_2", bias=True)
        yield from _transposed(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc")
        yield from _transposed(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj")
    yield from same_tensors("final_norm", "transformer.ln_f", bias=True)
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))


def _transposed(ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of a linear layer whose weight is [in, out] there and [out, in] here."""
    yield TensorRule(f"{ours}.weight", (f"{theirs}.weight",), lambda parts: parts[0].t(), lambda whole: (whole.t(),))
    yield TensorRule(f"{ours}.bias", (f"{theirs}.bias",))


# Llama, Mistral, Qwen2, Qwen3


def llama_tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules of the tensors of Llama and its descendants, embedding first."""
    queries, keys = (heads * model.head_size for heads in (model.num_attention_heads, model.num_kv_heads))
    yield TensorRule("embedding.tokens.weight", ("model.embed_tokens.weight",))
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"model.layers.{n}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield from same_tensors(f"{ours}.attention_norm", f"{theirs}.input_layernorm", bias=False)
        yield from stacked_tensors(
            f"{ours}.attention.qkv",
            [f"{attention}.{name}_proj" for name in "qkv"],
            (queries, keys, keys),
            bias=model.qkv_bias,
        )
        if model.qk_layernorm:
            yield from same_tensors(f"{ours}.attention.q_norm", f"{attention}.q_norm", bias=False)
            yield from same_tensors(f"{ours}.attention.k_norm", f"{attention}.k_norm", bias=False)
        yield from same_tensors(f"{ours}.attention.out", f"{attention}.o_proj", bias=model.linear_bias)
        yield from same_tensors(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", bias=False)
        yield from stacked_tensors(
            f"{ours}.mlp.fc1",
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            (model.ffn_size, model.ffn_size),
            bias=model.linear_bias,
        )
        yield from same_tensors(f"{ours}.mlp.fc2", f"{mlp}.down_proj", bias=model.linear_bias)
    yield from same_tensors("final_norm", "model.norm", bias=False)
    if not model.tied:
        yield TensorRule("head.weight", (HEAD,))


def same_tensors(ours: str, theirs: str, *, bias: bool) -> Iterator[TensorRule]:
    """Rules of a weight, and of its bias, that are the same tensors here and there."""
    for kind in ("weight", "bias")[: 1 + bias]:
        yield TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",))


def stacked_tensors(ours: str, theirs: Sequence[str], sizes: Sequence[int], *, bias: bool) -> Iterator[TensorRule]:
    """Rules of one tensor here whose rows are several tensors there, one below the other."""
    for kind in ("weight", "bias")[: 1 + bias]:
        yield TensorRule(
            f"{ours}.{kind}",
            tuple(f"{name}.{kind}" for name in theirs),
            lambda parts: torch.cat(tuple(parts)),
            partial(torch.split, split_size_or_sections=list(sizes)),
        )


class FamilyTensors(NamedTuple):
    """Tensors of a family: the module of transformers that holds all but the head, and the rules, embedding first."""

    base: str
    rules: Callable[[ModelConfig], Iterable[TensorRule]]


_LLAMA_TENSORS = FamilyTensors("model", llama_tensors)

FAMILY_TENSORS: dict[str, FamilyTensors] = {
    "gpt2": FamilyTensors("transformer", gpt2_tensors),
    "llama": _LLAMA_TENSORS,
    "mistral": _LLAMA_TENSORS,
    "qwen2": _LLAMA_TENSORS,
    "qwen3": _LLAMA_TENSORS,
}
"""Tensors of the families, by `model_type`, as in `FAMILIES` of families.py."""
