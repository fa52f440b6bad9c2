"""Rules on muP: which models and optimizers it is for, and that a factor has one value."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import ConfigRule
from megatronish.config.sections.width import OF_MUP
from megatronish.core.names import OPTIMIZER_NAMES

_FACTORS = {
    "embedding_multiplier": "--mup-embedding-mult",
    "logits_multiplier": "--mup-output-mult",
    "softmax_scale": "--mup-base-head-dim",
}


def _kind_of_model(config: Config) -> str | None:
    model = config.model
    if not model.use_mup:
        return None
    if model.model_type != "gpt" or model.block != "transformer":
        name = "model_type" if model.model_type != "gpt" else "block"
        return f"use_mup knows the layers of a GPT, and {name}={getattr(model, name)} has others; leave --use-mup out"
    if config.adapter.is_used:
        return "use_mup is about the rates of whole matrices, which are frozen under adapters; use --no-use-mup"
    return None


def _optimizer(config: Config) -> str | None:
    name = config.optimizer.optimizer
    if not config.model.use_mup or OPTIMIZER_NAMES[name].divided_by_width:
        return None
    able = ", ".join(name for name, choice in OPTIMIZER_NAMES.items() if choice.divided_by_width)
    return f"use_mup has the learning rates of {able}, and those of optimizer={name} differ; use --optimizer adam"


def _factors(config: Config) -> str | None:
    for name, value in config.model.factors_of_width.items():
        given = getattr(config.model, name)
        if given != value:
            return (
                f"{name}={given} contradicts use_mup, which makes it {value:g}; leave {FIELDS[name].flag} out, or "
                f"change {_FACTORS[name]}"
            )
    return None


RULES = (
    ConfigRule(("use_mup", "model_type", "block", "adapter_type"), _kind_of_model),
    ConfigRule(("use_mup", "optimizer"), _optimizer),
    ConfigRule(
        (
            *(*OF_MUP, *_FACTORS, "model_type", "hidden_size", "num_attention_heads", "kv_channels"),
            *("multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim"),
        ),
        _factors,
    ),
)
