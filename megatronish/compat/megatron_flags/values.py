"""Values that Megatron-LM spells otherwise, and what its values mean where one of them is several settings here."""

from collections.abc import Mapping

from megatronish.compat.megatron_flags.families import Pairs
from megatronish.tokenizer.names import MEGATRON_TOKENIZERS

# {field: {Megatron-LM's value: ours}}
VALUES: dict[str, Mapping[str, str]] = {
    "tokenizer_type": MEGATRON_TOKENIZERS,
    "attention_backend": {"fused": "flash", "local": "fused_softmax"},
    "cp_comm_type": {"a2a+p2p": "p2p", "all_gather": "p2p", "allgather": "p2p"},
    "eval_iters": {"-1": "0"},
    "moe_router_load_balancing_type": {"aux_loss": "seq_aux_loss"},
    "moe_token_dispatcher_type": {"allgather": "alltoall", "flex": "deepep"},
    "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    "window_size": {"-1": "none"},
}

_MESSAGES = "the numbers are the same, the messages are not"

# {(field, value): note} about values in whose place another one is computed.
NOTED_VALUES = {("cp_comm_type", value): _MESSAGES for value in ("a2a+p2p", "all_gather", "allgather")} | {
    (
        "moe_router_load_balancing_type",
        "aux_loss",
    ): "NOT AS ASKED: a loss over a micro-batch depends on its size and on the layout, one over each sequence does not"
}

NOTED_VALUES["moe_token_dispatcher_type", "allgather"] = _MESSAGES

_BALANCED = "use seq_aux_loss, or none with --moe-router-enable-expert-bias and --moe-router-score-function sigmoid"

# {(field, value): why it is refused, and what to use} of values that Megatron-LM has.
REFUSED_VALUES = {
    ("moe_router_load_balancing_type", "sinkhorn"): (
        f"it balances the tokens of one rank and one micro-batch, so every layout would choose otherwise; {_BALANCED}"
    ),
    ("moe_router_load_balancing_type", "quantile_balancing"): (
        f"its quantiles are those of one rank's tokens, so every layout would choose otherwise; {_BALANCED}"
    ),
    ("moe_router_score_function", "sqrtsoftplus"): "these scores are not there yet; use sigmoid or softmax",
}

# {field: why several values are refused}, of fields that have one value here.
REFUSED_LISTS = {
    "moe_router_load_balancing_type": "one loss balances the load at a time; name one",
    "moe_aux_loss_coeff": "one loss balances the load at a time; give its coefficient alone",
}

# {(field, value): the settings that it means}
SEVERAL_SETTINGS: dict[tuple[str, str], Pairs] = {
    ("position_embedding_type", "yarn"): (("position_embedding_type", "rope"), ("rope_scaling_type", "yarn")),
}
