"""Rules on multi-token prediction: which models and objectives have it."""

from megatronish.config.config import Config
from megatronish.config.rules.rule import ConfigRule

_OF_GPT = {"model_type": "gpt", "block": "transformer", "embed_layernorm": False}
_POSITIONS = ("rope", "alibi", "none")


def _said(config: Config) -> str:
    return f"mtp_num_layers={config.model.mtp_num_layers}"


def _gpt_alone(config: Config) -> str | None:
    if config.model.num_depths == 0:
        return None
    for name, needed in _OF_GPT.items():
        value = getattr(config.model, name)
        if value != needed:
            return (
                f"{_said(config)} is for the layers and words of a plain GPT, and not for {name}={value}; leave one out"
            )
    return None


def _positions(config: Config) -> str | None:
    kind = config.model.position_embedding_type
    if config.model.num_depths == 0 or kind in _POSITIONS:
        return None
    return (
        f"{_said(config)} looks words up where the model ends, and position_embedding_type={kind} adds to them where "
        "it begins; add --position-embedding-type rope, or leave --mtp-num-layers out"
    )


def _objective(config: Config) -> str | None:
    name = config.training.objective
    if config.model.num_depths == 0 or name == "causal_lm":
        return None
    return f"{_said(config)} adds to a loss of each next token, which objective={name} is not; use --mtp-num-layers 0"


def _length(config: Config) -> str | None:
    length = config.training.seq_length
    if config.model.num_depths < length:
        return None
    return f"{_said(config)} must be less than seq_length={length}, or nothing is there to predict; use less"


RULES = (
    ConfigRule(("mtp_num_layers", *_OF_GPT), _gpt_alone),
    ConfigRule(("mtp_num_layers", "position_embedding_type"), _positions),
    ConfigRule(("mtp_num_layers", "objective"), _objective),
    ConfigRule(("mtp_num_layers", "seq_length"), _length),
)
