"""A family of Hugging Face models: Arcee, a Llama whose MLP has no gate and squares its ReLU.

    python pretrain_gpt.py --plugin examples/plugins/arcee.py --load-hf DIR ...
    python tools/convert_checkpoint.py --plugin examples/plugins/arcee.py --from megatronish --to hf --load RUN \
        --save DIR

A family whose layers are none of the package registers their block, too (parallel_block.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import ConfigJson, FamilyTensors, ModelFamily
from megatronish.formats.hf.llama import LLAMA, llama_tensors
from megatronish.formats.tensor_rule import TensorRule, same_tensors
from megatronish.plugins import register_model_family

# What a config.json that leaves a key out means.
DEFAULTS = LLAMA.defaults | {
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 128001,
}


def read(config: ConfigJson) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of a config.json; what we do not have is refused by its key."""
    config.must_be("hidden_act", "relu2", why="is not Arcee's relu2")
    as_llama = ConfigJson(config.path, {**config.values, "hidden_act": "silu"}, {})
    return LLAMA.read(as_llama) | {"swiglu": False, "squared_relu": True}


def write(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of config.json from a model."""
    return LLAMA.write(model, seq_length) | {"hidden_act": "relu2"}


def cannot_describe(model: ModelConfig) -> str | None:
    """The field of a model that no Arcee has, or None: then it can be written as one."""
    if not model.squared_relu:
        return "an MLP without squared_relu"
    return LLAMA.cannot_describe(replace(model, swiglu=True, squared_relu=False))


def tensors(model: ModelConfig) -> Iterator[TensorRule]:
    """Rules from the tensors of Hugging Face to ours: Llama's, except for the first product of the MLP."""
    for rule in llama_tensors(model):
        ours, kind = rule.ours.rsplit(".", 1)
        if ours.endswith("mlp.fc1"):
            if kind == "weight":
                theirs = f"model.{ours.removesuffix('fc1')}up_proj"
                yield from same_tensors(ours, theirs, bias=model.mlp_bias)
        else:
            yield rule


FAMILY = ModelFamily("ArceeForCausalLM", LLAMA.seq_length, DEFAULTS, {}, read, write, cannot_describe)
register_model_family("arcee", FAMILY, FamilyTensors("model", tensors))
