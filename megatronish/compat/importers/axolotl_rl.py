"""Axolotl's keys of preference learning, `rl` and the numbers of its objectives, as settings of this project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.compat.importers.axolotl_data import preferences
from megatronish.compat.importers.imported import Imported, is_on, number, text
from megatronish.core.foreign import shown
from megatronish.core.names import OBJECTIVE_NAMES

# Keys of our fields; of those of one name, the first that is given counts.
_NUMBERS = {
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "cpo_alpha": "cpo_alpha",
    "simpo_gamma": "simpo_gamma",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
}
_LOSS_TYPES = ("sigmoid", "hinge", "robust", "ipo")
ABSENT = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "simpo_gamma": 0.5,
    "cpo_alpha": 1.0,  # of simpo, too, where 0 is the paper's and ours
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}
"""What numbers mean that are absent: TRL's defaults."""
RL_KEYS = ("rl", "dpo_loss_type", "precompute_ref_log_probs", *_NUMBERS)


def from_rl(found: Imported, values: Mapping[str, Any], folder: Path) -> None:
    """The objective of `rl`, with those of its numbers that it reads here, and its data."""
    name = text(values, "rl")
    if not name:
        return
    if name not in ("dpo", "ipo", "kto", "orpo", "simpo"):
        found.warn(
            "rl",
            f"{name} is not there, and this trains on text; there are dpo, ipo, simpo, cpo, orpo and kto (--objective)",
        )
        return
    found.set("objective", name)
    found.set("dataset_type", "chat")
    reads = OBJECTIVE_NAMES[name].reads
    for key, field in _NUMBERS.items():
        if values.get(key) is None or field in found.settings:
            continue
        if field in reads:
            found.set(field, number(values, key))
        else:
            found.leave_out(key, f"rl: {name} does not read it")
    for field, value in ABSENT.items():
        if field in reads:
            found.set_default(field, value)
    kinds = values.get("dpo_loss_type")
    kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
    if kind is not None and (name != "dpo" or kind not in _LOSS_TYPES):
        found.warn("dpo_loss_type", f"{shown(kinds)} is not there for {name}; dpo has {', '.join(_LOSS_TYPES)}")
    elif kind is not None:
        found.set("dpo_loss_type", kind)
    if is_on(values.get("precompute_ref_log_probs")) and OBJECTIVE_NAMES[name].has_reference:
        found.set("reference", "stored")
    preferences(found, values, folder)
