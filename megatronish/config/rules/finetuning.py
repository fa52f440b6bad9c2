"""Rules on fine-tuning: adapters, and objectives that learn from preferences."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, fields_of
from megatronish.config.rules.rule import ConfigRule
from megatronish.config.sections.finetuning import PreferenceConfig
from megatronish.core.names import OBJECTIVE_NAMES

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
    if config.adapter.quantize_base != "nf4" and not config.adapter.double_quantization:
        return (
            "double_quantization=false belongs to a base in NF4; add --quantize-base nf4, or leave "
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


ADAPTER_RULES = (
    ConfigRule(("adapter_type", "adapter_targets", *_OF_QUANTISED, *_OF_LORA), _idle),
    ConfigRule(("adapter_type", "load", "load_hf", "moe_use_upcycling"), _base),
)

_NUMBERS = tuple(name for name in fields_of(PreferenceConfig, "preference") if name != "reference")
_HOLDS = {"pairs": "pairs of completions", "labelled": "labelled completions"}


def _unread(config: Config) -> str | None:
    objective = config.training.objective
    for name in _NUMBERS:
        value = getattr(config.preference, name)
        if value == FIELDS[name].default or name in OBJECTIVE_NAMES[objective].reads:
            continue
        reading = [other for other, choice in OBJECTIVE_NAMES.items() if name in choice.reads]
        return (
            f"{name}={value} is not read by objective={objective}; leave {FIELDS[name].flag} out, or use --objective "
            f"{' or '.join(reading)}"
        )
    kind, smoothing = config.preference.dpo_loss_type, config.preference.label_smoothing
    if objective == "dpo" and smoothing and kind in ("hinge", "ipo"):
        return (
            f"label_smoothing={smoothing} is not read by dpo_loss_type={kind}; leave it out, or use --dpo-loss-type "
            "sigmoid or robust"
        )
    return None


def _data(config: Config) -> str | None:
    objective, kind = config.training.objective, config.data.dataset_type
    wanted = OBJECTIVE_NAMES[objective].learns_from
    if wanted == "text" or not (config.data.mock_data or kind == "pretrain"):
        return None
    source = "mock_data" if config.data.mock_data else f"dataset_type={kind}"
    return (
        f"objective={objective} learns from {_HOLDS[wanted]}, which {source} does not give; add --dataset-type chat "
        "--data-path FILE"
    )


def _trained(config: Config) -> str | None:
    objective, train_on = config.training.objective, config.chat.train_on
    if OBJECTIVE_NAMES[objective].learns_from == "text" or train_on == "assistant":
        return None
    return f"train_on={train_on} is not read by objective={objective}, which compares whole completions; leave it out"


def _reference(config: Config) -> str | None:
    objective, given, keep = config.training.objective, config.preference.reference, config.checkpoint
    if given is not None and config.reference is None:
        return f"reference={given} is not read by objective={objective}, which has no reference; leave --reference out"
    if config.reference == "adapters-off" and not config.adapter.is_used:
        return (
            "reference=adapters-off is for a run with adapters, and this one has none; add --adapter-type lora, or use "
            "--reference model or stored"
        )
    if config.reference in ("model", "stored") and keep.load is None and keep.load_hf is None:
        return (
            f"objective={objective} compares with the model that the run starts from, and none is given; add --load-hf "
            "DIR (of Hugging Face) or --load DIR (of a run)"
        )
    return None


def _graph(config: Config) -> str | None:
    if not config.training.cuda_graph or OBJECTIVE_NAMES[config.training.objective].learns_from == "text":
        return None
    return (
        f"cuda_graph replays micro-batches of equal shapes, and those of objective={config.training.objective} differ; "
        "leave --cuda-graph out"
    )


PREFERENCE_RULES = (
    ConfigRule(("objective", *_NUMBERS), _unread),
    ConfigRule(("objective", "dataset_type", "mock_data"), _data),
    ConfigRule(("objective", "train_on"), _trained),
    ConfigRule(("objective", "reference", "adapter_type", "load", "load_hf"), _reference),
    ConfigRule(("objective", "cuda_graph"), _graph),
)
