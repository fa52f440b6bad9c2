"""A family of Hugging Face models: VaultGemma, a Gemma 2 whose layers have no norms after their sublayers.

    python pretrain_gpt.py --plugin examples/plugins/vaultgemma.py --load-hf DIR ...
    python tools/convert_checkpoint.py --plugin examples/plugins/vaultgemma.py --from megatronish --to hf --load RUN \
        --save DIR

A family whose layers are none of the package registers their block, too (parallel_block.py).
"""

from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.decoder import DecoderNames, decoder
from megatronish.formats.hf.family import ConfigJson, ModelFamily
from megatronish.formats.hf.gemma import GEMMA2
from megatronish.plugins import register_model_family

# The names of a layer's norms; those of the other tensors are as usual.
NAMES = DecoderNames(norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"})


def read(config: ConfigJson) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of a config.json; what we do not have is refused by its key."""
    config.must_be("add_cross_attention", None, False, why="is not supported")
    return GEMMA2.read(config) | {"norm_placement": "pre"}


def write(model: ModelConfig, seq_length: int) -> dict[str, Any]:
    """Keys of config.json from a model."""
    return GEMMA2.write(model, seq_length)


def cannot_describe(model: ModelConfig) -> str | None:
    """The field of a model that no VaultGemma has, or None: then it can be written as one.

    What would change if its keys were written and read again is refused without this.
    """
    if model.placement != "pre":
        return f"norm_placement={model.placement}"
    return GEMMA2.cannot_describe(model)


# The defaults are what a config.json that leaves a key out means.
FAMILY = ModelFamily("VaultGemmaForCausalLM", GEMMA2.seq_length, GEMMA2.defaults, {}, read, write, cannot_describe)
register_model_family("vaultgemma", FAMILY, decoder(NAMES))
