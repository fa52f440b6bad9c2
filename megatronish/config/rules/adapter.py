"""Rules on adapters and on the model that they are for."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import ConfigRule

_OF_QUANTISED = ("quantize_base", "double_quantization")
_OF_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "loraplus_lr_ratio")


def _idle(config: Config) -> str | None:
    """Complaint about a setting of adapters that the type of adapter does not read."""
    kind = config.adapter.adapter_type
    values = {**vars(config.adapter), "loraplus_lr_ratio": config.optimizer.loraplus_lr_ratio}
    if kind is None and config.adapter.adapter_targets:
        return "adapter_targets are for a run with adapters; add --adapter-type lora, or leave --adapter-targets out"
    if kind is None and config.adapter.quantize_base is not None:
        return (
            f"quantize_base={config.adapter.quantize_base} is for the base of adapters, and this run "
            "trains all weights; add --adapter-type lora, or leave --quantize-base out"
        )
    if config.adapter.quantize_base is None and not config.adapter.double_quantization:
        return (
            "double_quantization=false belongs to a quantised base; add --quantize-base nf4, or leave "
            "--no-double-quantization out"
        )
    for name in _OF_LORA:
        if kind != "lora" and values[name] != FIELDS[name].default:
            given = "" if kind is None else f", not to adapter_type={kind}"
            return (
                f"{name}={str(values[name]).lower()} belongs to LoRA{given}; add --adapter-type lora, or leave "
                f"{FIELDS[name].flag} out"
            )
    return None


def _base(config: Config) -> str | None:
    keep, kind = config.checkpoint, config.adapter.adapter_type
    if kind is None:
        return None
    if keep.load is None and keep.load_hf is None:
        return (
            f"adapter_type={kind} is for a trained model, and none is given; add --load-hf DIR (of Hugging "
            "Face) or --load DIR (of a run)"
        )
    if keep.moe_use_upcycling:
        return f"adapter_type={kind} needs a base that stays as it is; upcycle first, in a run of its own"
    return None


RULES = (
    ConfigRule(("adapter_type", "adapter_targets", *_OF_QUANTISED, *_OF_LORA), _idle),
    ConfigRule(("adapter_type", "load", "load_hf", "moe_use_upcycling"), _base),
)
