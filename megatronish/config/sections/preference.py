"""Section [preference] of a config: objectives that learn from preferred completions, and their reference model."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from megatronish.config.marks import Range, at_least, greater_than

HALF = Range("must be at least 0 and less than 0.5", lambda value: 0 <= value < 0.5)


ReferenceKind = Literal["adapters-off", "stored", "model"]


@dataclass(frozen=True)
class PreferenceConfig:
    """Objectives of preferences: dpo, ipo, simpo, cpo, orpo and kto, of --objective."""

    beta: Annotated[float, greater_than(0), tyro.conf.arg(aliases=("--dpo-beta", "--kto-beta", "--orpo-lambda"))] = 0.1
    """Weight of a difference of log-probabilities; of orpo, of the odds ratio (lambda in its paper)."""
    dpo_loss_type: Literal["sigmoid", "hinge", "robust", "ipo"] = "sigmoid"
    """Loss of dpo. robust is for labels of which a known part, --label-smoothing, is wrong."""
    label_smoothing: Annotated[float, HALF] = 0.0
    """Part of the pairs whose labels are taken to be swapped: of dpo (sigmoid, robust), simpo and cpo."""
    simpo_gamma: Annotated[float, at_least(0)] = 0.5
    """Margin of simpo between the rewards of chosen and rejected."""
    cpo_alpha: Annotated[float | None, at_least(0)] = None
    """Weight of the mean loss of the chosen tokens, of cpo and simpo. Derived: 1 of cpo, 0 of simpo."""
    desirable_weight: Annotated[float, at_least(0), tyro.conf.arg(aliases=("--kto-desirable-weight",))] = 1.0
    """Weight of wanted completions, of kto."""
    undesirable_weight: Annotated[float, at_least(0), tyro.conf.arg(aliases=("--kto-undesirable-weight",))] = 1.0
    """Weight of unwanted completions, of kto."""
    reference: ReferenceKind | None = None
    """Reference of dpo, ipo, kto: the model without adapters, its numbers stored before the first step, or a second
    model. Derived: adapters-off with adapters, else model."""
