"""Section optimizer of DeepSpeed's ds_config.json, with what absent parameters mean."""

from collections.abc import Mapping
from typing import Any

from megatronish.compat.importers.imported import (
    AUTO,
    NOT_THERE,
    SPEED,
    Imported,
    Rule,
    apply,
    dropped,
    field,
)
from megatronish.compat.importers.values import Switches, number, section, text
from megatronish.core.errors import UserError
from megatronish.core.foreign import is_finite, shown


def optimizer(found: Imported, values: Mapping[str, Any]) -> None:
    """Optimizer with what its absent parameters mean: the defaults of DeepSpeed's and torch's classes."""
    if not values:
        return
    # 1. The kind. Weight decay of absent keys depends on `adam_w_mode`, so that is read before its key is popped.
    kind, params = (
        text(values, "type", within="optimizer.").lower(),
        dict(section(values, "params", within="optimizer.")),
    )
    ours = OPTIMIZERS.get(kind)
    if ours is None:
        found.warn(
            "optimizer.type",
            f"{text(values, 'type') or 'none'} is not there; this trains with adam (AdamW); --optimizer has sgd and "
            "muon",
        )
    found.set("optimizer", ours or "adam")
    absent = DEFAULTS[ours or "adam"] | {"weight_decay": _default_weight_decay(kind, params)}
    # "adamw" is AdamW whatever the mode says.
    if params.pop("adam_w_mode", True) is False and kind != "adamw":
        found.warn("optimizer.params.adam_w_mode", "adam is AdamW: weight decay is decoupled")
    # 2. Parameters: the pair of betas is two fields here, Muon has two learning rates, all others have a rule each.
    unsaid = _betas(found, params)
    mine = ("lr", *MUON_RATES) if ours == "muon" else ()
    rates = {key: value for key in mine if (value := params.pop(key, None)) is not None}
    unsaid |= _listed(found, params, ours or "adam")
    # 3. The defaults of the optimizer's class, except for what is "auto".
    for name, value in absent.items():
        if name not in unsaid:
            found.set_default(name, value)
    if ours == "muon":
        _muon_rates(found, rates)


def _betas(found: Imported, params: dict[str, Any]) -> set[str]:
    """Take the betas out of the parameters; the fields that "auto" says nothing about."""
    betas = params.pop("betas", None)
    if isinstance(betas, list) and len(betas) == 2 and all(map(is_finite, betas)):
        for index, beta in enumerate(betas):
            found.set(f"adam_beta{index + 1}", beta, key=f"optimizer.params.betas[{index}]")
    elif betas == "auto":
        found.leave_out("optimizer.params.betas", f"{AUTO}, as --adam-beta1 and --adam-beta2")
        return {"adam_beta1", "adam_beta2"}
    elif betas is not None:
        raise UserError(f"optimizer.params.betas={shown(betas)} must be two numbers; correct the file")
    return set()


def _listed(found: Imported, params: Mapping[str, Any], ours: str) -> set[str]:
    """Parameters by their rules; the fields that "auto" says nothing about.

    What is not there, or not known, may change what is trained, so it is a warning.
    """
    rules = PARAMS | {"momentum": field("sgd_momentum")}
    if ours == "muon":  # it takes its own parameters out of those that are given, and leaves the others
        rules = dict.fromkeys(params, UNREAD) | MUON
    apply(found, params, rules, within=OPTIMIZER)
    for key, value in params.items():
        rule, default = rules.get(key), key == "bias_correction"
        changes = rule is None or rule is NOT_THERE or rule is BIAS
        if changes and value not in (None, default):
            found.left_out.pop(f"{OPTIMIZER}{key}", None)
            found.warn(f"{OPTIMIZER}{key}", f"{shown(value)} is not {'known here' if rule is None else 'there'}")
    return {rule.field for key, rule in rules.items() if params.get(key) == "auto" and rule.field is not None}


def _muon_rates(found: Imported, given: Mapping[str, Any]) -> None:
    """Muon's two learning rates, of matrices and of the rest, as one rate and the factor between them."""
    # Each half has a rate of its own, or the common one, or else a default of its own.
    both = {key: given.get(key, given.get("lr", default)) for key, default in MUON_RATES.items()}
    if "auto" in both.values():
        found.leave_out(
            "optimizer.params.lr",
            f"{AUTO}, as --lr of what is no matrix, and --muon-extra-scale-factor, the rate of matrices over it",
        )
        return
    muon, adam = (number(both, key, within=OPTIMIZER) for key in MUON_RATES)
    if not muon or not adam or min(muon, adam) < 0:
        raise UserError(
            f"optimizer.params: muon_lr={shown(both['muon_lr'])} and adam_lr={shown(both['adam_lr'])} must be greater "
            "than 0; correct the file"
        )
    found.set("lr", adam, key=f"{OPTIMIZER}adam_lr" if "adam_lr" in given else f"{OPTIMIZER}lr")
    found.set("muon_extra_scale_factor", muon / adam, key=f"{OPTIMIZER}muon_lr / adam_lr")
    if muon != adam and found.settings.get("weight_decay") != 0:
        found.warn(
            "optimizer.params.weight_decay",
            f"a step shrinks matrices by {adam:.15g} times this, and by {muon:.15g} times this there",
        )


def _default_weight_decay(kind: str, params: Mapping[str, Any]) -> float:
    """Weight decay of an optimizer that names none: 0, except for PyTorch's own AdamW."""
    is_adamw = kind == "adamw" or (kind == "adam" and params.get("adam_w_mode", True) is not False)
    return 0.01 if is_adamw and params.get("torch_adam") is True else 0.0


OPTIMIZER = "optimizer.params."
OPTIMIZER_SWITCHES: Switches = dict.fromkeys(
    (
        *("adam_w_mode", "torch_adam", "bias_correction", "amsgrad", "nesterov", "maximize", "per_head_muon"),
        *("fused", "foreach", "capturable", "differentiable"),
    ),
    (),
)
"""Parameters that are switches."""

EXACT = dropped("rounding that saves messages is not there; the exact numbers are sent")

BIAS = dropped("Adam always corrects its bias")
UNREAD = dropped("DeepSpeed's Muon does not read it")
ALL: dict[str, Rule] = {
    "lr": field("lr"),
    "eps": field("adam_eps"),
    "weight_decay": field("weight_decay"),
    "torch_adam": dropped("there is one implementation"),
    "fp32_optimizer_states": dropped("optimizer states are in fp32"),
    "foreach": SPEED,
}
PARAMS: dict[str, Rule] = {
    **ALL,
    "bias_correction": BIAS,
    "freeze_step": EXACT,
    **dict.fromkeys(("fused", "capturable", "differentiable", "set_grad_none"), SPEED),
    **dict.fromkeys(("amsgrad", "nesterov", "dampening", "maximize"), NOT_THERE),
}
MUON: dict[str, Rule] = {
    **ALL,
    "momentum": field("muon_momentum"),
    "ns_method": dropped("standard and gram compute the same; the steps here are those of standard"),
    "per_head_muon": NOT_THERE,
}
"""Parameters of optimizers: of all, of all except Muon, and of Muon."""
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"), "adam"),
    **{"sgd": "sgd", "muon": "muon"},
}

DEFAULTS: dict[str, dict[str, float | bool | str]] = {
    "adam": {"lr": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8},
    "sgd": {"lr": 1e-3, "sgd_momentum": 0.0},
    "muon": {
        "muon_momentum": 0.95,
        "muon_nesterov": True,
        "muon_num_ns_steps": 5,
        "muon_scale_mode": "shape_scaling",
        "muon_coefficient_type": "simple",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-10,
    },
}
"""What parameters mean that an optimizer does not name: the defaults of DeepSpeed's FusedAdam and MuonWithAuxAdam, and
of torch's SGD. Lamb, Lion and the one-bit optimizers, which train with adam here, have those of FusedAdam."""
MUON_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}
"""Learning rates of Muon's matrices and of its other parameters, where not even a common one is named."""
