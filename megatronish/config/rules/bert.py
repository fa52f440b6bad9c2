"""Rules on BERT: what its layers cannot be, what it learns from, and settings that it alone reads."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import ConfigRule
from megatronish.core.names import DATASET_NAMES, OBJECTIVE_NAMES

_OWN = ("num_token_types", "bert_no_binary_head", "mask_prob", "short_seq_prob")
_LAYERS = ("num_experts", "window_size", "attention_pattern", "position_embedding_type", "embed_layernorm")
_COUNTS = "which counts on tokens that see none after them"


def _layers(config: Config) -> str | None:
    model = config.model
    if model.is_causal:
        return None
    for name, is_other, why in (
        ("num_experts", model.num_experts is not None, "whose capacity and order of tokens were tried in a GPT alone"),
        ("window_size", model.window_size is not None, _COUNTS),
        ("attention_pattern", model.attention_pattern != "none", _COUNTS),
        ("position_embedding_type", model.position_embedding_type == "alibi", _COUNTS),
        ("embed_layernorm", model.embed_layernorm, "which BERT has in any case, over the sum of its embeddings"),
    ):
        if is_other:
            return (
                f"model_type=bert does not go with {name}={getattr(model, name)}, {why}; leave {FIELDS[name].flag} out"
            )
    return None


def _objective(config: Config) -> str | None:
    objective, model = config.training.objective, config.model.model_type
    wanted = OBJECTIVE_NAMES[objective].model_types
    if model in wanted:
        return None
    fitting = [name for name, choice in OBJECTIVE_NAMES.items() if model in choice.model_types]
    return (
        f"objective={objective} trains model_type={wanted[0]}, and this one is {model}; use --objective {fitting[0]}, "
        f"or --model-type {wanted[0]}"
    )


def _data(config: Config) -> str | None:
    kind = config.data.dataset_type
    if config.model.is_causal:
        if not DATASET_NAMES[kind].has_sentences:
            return None
        return f"dataset_type={kind} is for BERT; use --dataset-type pretrain, or --model-type bert"
    if config.data.mock_data:
        return None
    if kind == "chat":
        return "dataset_type=chat is for models that answer, and BERT writes no text; use --dataset-type sentences"
    if config.model.has_binary_head and not DATASET_NAMES[kind].has_sentences:
        return (
            f"dataset_type={kind} has no pairs of sentences, whose order BERT's binary head learns; add --dataset-type "
            "sentences, or --bert-no-binary-head"
        )
    return None


def _prompt(config: Config) -> str | None:
    if config.model.is_causal or config.log.sample_prompt is None:
        return None
    return f"sample_prompt={config.log.sample_prompt!r} asks for text, and BERT writes none; leave --sample-prompt out"


def _unread(config: Config) -> str | None:
    if not config.model.is_causal:
        return None
    for name in _OWN:
        value = getattr(getattr(config, FIELDS[name].section), name)
        if value != FIELDS[name].default and not (name == "mask_prob" and config.model.has_encoder):
            return f"{name}={value} is read for BERT alone; add --model-type bert, or leave {FIELDS[name].flag} out"
    return None


RULES = (
    ConfigRule(("model_type", *_LAYERS), _layers),
    ConfigRule(("model_type", "objective"), _objective),
    ConfigRule(("model_type", "dataset_type", "bert_no_binary_head", "mock_data"), _data),
    ConfigRule(("model_type", "sample_prompt"), _prompt),
    ConfigRule(("model_type", *_OWN), _unread),
)
