"""Rules on objectives that learn from preferences, and on the model that they compare with."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, fields_of
from megatronish.config.rules.rule import ConfigRule
from megatronish.config.sections.preference import PreferenceConfig
from megatronish.core.names import OBJECTIVE_NAMES

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
    found = "mock_data" if config.data.mock_data else f"dataset_type={kind}"
    return (
        f"objective={objective} learns from {_HOLDS[wanted]}, which {found} does not give; add --dataset-type chat "
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


RULES = (
    ConfigRule(("objective", *_NUMBERS), _unread),
    ConfigRule(("objective", "dataset_type", "mock_data"), _data),
    ConfigRule(("objective", "train_on"), _trained),
    ConfigRule(("objective", "reference", "adapter_type", "load", "load_hf"), _reference),
    ConfigRule(("objective", "cuda_graph"), _graph),
)
