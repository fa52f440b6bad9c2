"""Rules on T5: its two sides, what its layers cannot be, and settings that it alone reads."""

from collections.abc import Callable

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import MESH, ConfigRule
from megatronish.config.sections.model import ModelConfig
from megatronish.core.hidden_spans import SpanRule, too_few_sentinels

SIDES = {
    "num_layers": ("encoder_num_layers", "decoder_num_layers"),
    "seq_length": ("encoder_seq_length", "decoder_seq_length"),
}
"""Sizes of a T5 that are sums of those of its sides."""
_OWN = (
    *(name for names in SIDES.values() for name in names),
    *("relative_attention_num_buckets", "relative_attention_max_distance", "unscaled_logits"),
    *("vocab_extra_ids", "mean_span_length"),
)
_OTHER_LAYERS: dict[str, Callable[[ModelConfig], bool]] = {
    "block": lambda model: model.block != "transformer",
    "num_experts": lambda model: model.num_experts is not None,
    "window_size": lambda model: model.window_size is not None,
    "attention_pattern": lambda model: model.attention_pattern != "none",
    "softmax_type": lambda model: model.softmax_type != "vanilla",
    "qk_layernorm": lambda model: model.qk_layernorm,
    "clip_qkv": lambda model: model.clip_qkv is not None,
    "embed_layernorm": lambda model: model.embed_layernorm,
}
"""What the layers of a T5 cannot be."""


def _missing(name: str) -> ConfigRule:
    """Rule that the sizes of both sides are given, which add up to the one called `name`."""
    names = SIDES[name]

    def complaint(config: Config) -> str | None:
        missing = [each for each in names if getattr(config.model, each) is None]
        if not config.model.has_encoder or not missing:
            return None
        flags = " and ".join(FIELDS[each].flag for each in missing)
        return f"model_type=t5 has an encoder and a decoder, and {missing[0]} is not given; add {flags}"

    return ConfigRule(("model_type", *names), complaint)


def _sum(name: str) -> ConfigRule:
    """Rule that the size called `name` is the sum of those of both sides."""
    names = SIDES[name]

    def complaint(config: Config) -> str | None:
        sizes = [getattr(config.model, each) for each in names]
        if not config.model.has_encoder or None in sizes:
            return None
        total = getattr(config.model if name == "num_layers" else config.training, name)
        if total == sum(sizes):
            return None
        both = " and ".join(f"{each}={size}" for each, size in zip(names, sizes, strict=True))
        return f"{name}={total} must be the sum of {both} (here it counts both sides); leave {FIELDS[name].flag} out"

    return ConfigRule(("model_type", name, *names), complaint)


_SHORTEST = 3


def _cut_sides(config: Config) -> str | None:
    model = config.model
    if not model.has_encoder:
        return None
    layout = config.layout
    of = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if config.parallel.sequence_parallel else 1)
    for name in SIDES["seq_length"]:
        length = getattr(model, name)
        if length is not None and length < _SHORTEST:
            return (
                f"{name}={length} has no room for a text of two tokens with a sentinel and an end; use "
                f"{FIELDS[name].flag} {_SHORTEST} or more"
            )
        if length is not None and length % of:
            return (
                f"{name}={length} must be divisible by {of}, as context_parallel_size={layout.cp} and sequence "
                f"parallelism cut each side; use {FIELDS[name].flag} {-(-length // of) * of}"
            )
    return None


def _layers(config: Config) -> str | None:
    model = config.model
    if not model.has_encoder:
        if model.position_embedding_type != "relative":
            return None
        return (
            "position_embedding_type=relative is the score bias of a T5; use --model-type t5, or another "
            "--position-embedding-type"
        )
    if model.position_embedding_type != "relative":
        return (
            f"position_embedding_type={model.position_embedding_type} is not that of a T5, whose scores have a learned "
            "bias; use --position-embedding-type relative"
        )
    for name, is_other in _OTHER_LAYERS.items():
        if is_other(model):
            return (
                f"model_type=t5 does not go with {name}={getattr(model, name)}, which layers of a GPT alone have; "
                f"leave {FIELDS[name].flag} out"
            )
    return None


def _execution(config: Config) -> str | None:
    parallel, training = config.parallel, config.training
    if not config.model.has_encoder:
        return None
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type == "p2p":
        return (
            "cp_comm_type=p2p is not for model_type=t5: a score bias that learns goes round no ring; use "
            "--cp-comm-type a2a"
        )
    for name in ("compile", "cuda_graph"):
        if getattr(training, name):
            return (
                f"{name} was tried with a GPT alone, and model_type=t5 cuts rows into two sides; leave "
                f"{FIELDS[name].flag} out"
            )
    if training.attention_backend not in ("auto", "unfused"):
        return (
            f"attention_backend={training.attention_backend} knows no score bias that learns; with model_type=t5 use "
            "--attention-backend unfused, or leave it out"
        )
    return None


def _data(config: Config) -> str | None:
    data = config.data
    if not config.model.has_encoder:
        return None
    if not data.mock_data and data.dataset_type not in ("pretrain", "chat"):
        return (
            f"dataset_type={data.dataset_type} is not what a T5 learns from, which is text with hidden spans, or pairs "
            "of texts; use --dataset-type pretrain, or chat"
        )
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(data, name):
            return f"{name} is about texts of a GPT, and model_type=t5 has two rows; leave {FIELDS[name].flag} out"
    if data.has_chats:
        return _pairs(config)
    if data.vocab_extra_ids == 0:
        return "vocab_extra_ids=0 leaves no sentinels to hide spans with; add --vocab-extra-ids 100"
    return None


_WITHOUT_OWN = ("null", "bytes")
"""Tokenizers that have no sentinels of their own: how many there are is known before one is built."""


def _sentinels(config: Config) -> str | None:
    model, data = config.model, config.data
    encoder, decoder = model.encoder_seq_length, model.decoder_seq_length
    is_known = data.mock_data or data.tokenizer_type in _WITHOUT_OWN
    if not model.has_encoder or data.has_chats or data.vocab_extra_ids == 0 or not is_known:
        return None
    if encoder is None or decoder is None or min(encoder, decoder) < _SHORTEST:
        return None
    return too_few_sentinels(SpanRule(data.mask_prob, data.mean_span_length), encoder, decoder, data.vocab_extra_ids)


def _pairs(config: Config) -> str | None:
    """Complaint about a setting that pairs of texts do not go with."""
    if config.chat.train_on == "all":
        return (
            "train_on=all is for rows of a GPT: the decoder of a model_type=t5 writes the answer alone; use --train-on "
            "assistant, or last"
        )
    for name in ("mask_prob", "mean_span_length"):
        value = getattr(config.data, name)
        if value != FIELDS[name].default:
            return (
                f"{name}={value} is about hidden spans, and pairs of texts have none; leave {FIELDS[name].flag} out, "
                "or use --dataset-type pretrain"
            )
    return None


def _unread(config: Config) -> str | None:
    if config.model.has_encoder:
        return None
    for name in _OWN:
        value = getattr(getattr(config, FIELDS[name].section), name)
        if value != FIELDS[name].default:
            return f"{name}={value} is read for T5 alone; add --model-type t5, or leave {FIELDS[name].flag} out"
    return None


RULES = (
    *(rule(name) for name in SIDES for rule in (_missing, _sum)),
    ConfigRule((*MESH, "model_type", "sequence_parallel", *SIDES["seq_length"]), _cut_sides),
    ConfigRule(("model_type", "position_embedding_type", *_OTHER_LAYERS), _layers),
    ConfigRule(
        ("model_type", "context_parallel_size", "cp_comm_type", "compile", "cuda_graph", "attention_backend"),
        _execution,
    ),
    ConfigRule(
        (
            *("model_type", "dataset_type", "mock_data", "vocab_extra_ids", "train_on", "mask_prob"),
            *("mean_span_length", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        ),
        _data,
    ),
    ConfigRule(
        (
            *("model_type", *SIDES["seq_length"], "mock_data", "dataset_type", "tokenizer_type", "vocab_extra_ids"),
            *("mask_prob", "mean_span_length"),
        ),
        _sentinels,
    ),
    ConfigRule(("model_type", *_OWN), _unread),
)
