"""PEFT's adapter_config.json: read into our config of adapters, and written from it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.core import foreign
from megatronish.core.errors import UserError
from megatronish.formats.hf import tensors as hf
from megatronish.formats.weights import Description
from megatronish.model.adapters import lora_settings

CONFIG = "adapter_config.json"
DOWN = (".down_proj", ".mlp.c_proj", ".dense_4h_to_h")
LARGEST_RANK = 2**31
NOT_DONE = {
    "use_dora": "DoRA",
    "lora_bias": "biases of adapters",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "rows of the embedding that learn",
    "modules_to_save": "whole modules that learn",
    "alora_invocation_tokens": "adapters that begin at a token",
    "use_qalora": "adapters of pooled inputs",
    "use_bdlora": "block-diagonal adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "adapters chosen by a router",
}
OTHER_BASE = ("pissa", "olora", "corda", "loftq")
"""Beginnings of values of `init_lora_weights` with which PEFT changes the weights of the base itself."""


def their_config(
    config: AdapterConfig,
    modules: list[str],
    parameters: list[str],
    ranks: Mapping[str, int],
    description: Description,
    base: str,
) -> dict[str, Any]:
    """Content of adapter_config.json. Modules are listed by their full names, so that no other one matches."""
    content: dict[str, Any] = {
        "peft_type": "LORA" if config.adapter_type == "lora" else "IA3",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "fan_in_fan_out": hf.config_json(description)["model_type"] == "gpt2",
        "target_modules": modules,
    }
    if config.adapter_type == "ia3":
        down = [name for name in modules if name.endswith(DOWN)]
        return content | {"feedforward_modules": down}
    # The scale alpha / r, or alpha / sqrt(r), stays that of one section.
    alphas = {
        name: config.lora_alpha * (math.sqrt(number) if config.use_rslora else number) for name, number in ranks.items()
    }
    return content | {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "bias": "none",
        "rank_pattern": {name: config.lora_rank * number for name, number in ranks.items()},
        "alpha_pattern": alphas,
        **({"target_parameters": parameters} if parameters else {}),
    }


def read_config(path: Path) -> dict[str, Any]:
    try:
        content = foreign.read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; name a folder that PEFT has saved") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; fetch it again")
    return content


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]


def our_config(path: Path, theirs: Mapping[str, Any]) -> AdapterConfig:
    """Config of an adapter from PEFT's; UserError for what it asks for and is not done here."""
    kind = theirs.get("peft_type")
    if kind not in ("LORA", "IA3"):
        raise UserError(f"{path}: peft_type={kind} is not supported; LORA and IA3 are")
    for key, what in NOT_DONE.items():
        if theirs.get(key):
            raise UserError(f"{path}: {key} asks for {what}, which are not supported; merge the adapter with PEFT")
    if str(initial := theirs.get("init_lora_weights")).lower().startswith(OTHER_BASE):
        raise UserError(
            f"{path}: init_lora_weights={initial} changes the weights of the base, so the adapter is not for the "
            "model as it is; merge it with PEFT, or convert it with PEFT's path_initial_model_for_weight_conversion"
        )
    if theirs.get("bias", "none") != "none":
        raise UserError(f"{path}: bias={theirs['bias']} trains biases, which is not supported; merge it with PEFT")
    if kind == "IA3":
        return AdapterConfig(adapter_type="ia3")
    _refuse_no_numbers(path, theirs)
    rank, alpha, rs = theirs.get("r", 8), theirs.get("lora_alpha", 8), bool(theirs.get("use_rslora"))
    dropout = theirs.get("lora_dropout") or 0.0
    ranks, alphas = theirs.get("rank_pattern") or {}, theirs.get("alpha_pattern") or {}
    config = AdapterConfig(
        adapter_type="lora",
        lora_rank=rank,
        lora_alpha=float(alpha),
        lora_dropout=float(dropout),
        use_rslora=rs,
    )
    for name in {*ranks, *alphas}:
        their_rank = ranks.get(name, rank)
        scale = alphas.get(name, alpha) / (math.sqrt(their_rank) if rs else their_rank)
        if not math.isclose(scale, lora_settings(config).scale, rel_tol=1e-12):
            raise UserError(
                f"{path}: {name} is scaled by {scale:g} and others by {lora_settings(config).scale:g}; adapters of one "
                "scale are read, merge it with PEFT"
            )
    return config


def _refuse_no_numbers(path: Path, theirs: Mapping[str, Any]) -> None:
    """UserError for ranks that are no whole numbers from 1 on, and for other settings that are no numbers."""
    ranks, others = {"r": theirs.get("r", 8)}, {"lora_alpha": theirs.get("lora_alpha", 8)}
    others["lora_dropout"] = theirs.get("lora_dropout") or 0.0
    for key, values in (("rank_pattern", ranks), ("alpha_pattern", others)):
        pattern = theirs.get(key) or {}
        if not isinstance(pattern, dict):
            raise UserError(f"{path}: {key}={pattern!r} is no JSON object; fetch it again")
        values |= {f"{key} of {name}": value for name, value in pattern.items()}
    for name, value in ranks.items():
        if type(value) is not int or not 1 <= value < LARGEST_RANK:
            raise UserError(f"{path}: {name}={_shown(value)} must be a whole number from 1 on; fetch it again")
    for name, value in others.items():
        if type(value) not in (int, float) or not 0 <= value < LARGEST_RANK:
            raise UserError(f"{path}: {name}={_shown(value)} must be a number from 0 on; fetch it again")
