"""State of Megatron-LM's optimizer in its format `torch_dist`: which tensors hold it, and whether they are whole.

    optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc2.weight         Adam's states of a parameter, in its shape
    optimizer.state.exp_avg_sq.decoder.layers.3.mlp.linear_fc2.weight
    optimizer.state.fp32_param.decoder.layers.3.mlp.linear_fc2.weight      a weight in fp32, where the model's is bf16
    optimizer.state.param....                                              the same, of the distributed optimizer

So they are where the optimizer is not distributed, or saved with `--dist-ckpt-optim-fully-reshardable`. By default the
distributed optimizer saves its buckets as they lie in memory, of which only its own layout makes tensors again.

A training of ours is written for all three: its optimizer in fp32, that with 16-bit weights, and the distributed one in
its fully reshardable form. Each takes the tensors that it asks for, and its own place of the groups in common.pt.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from megatronish.checkpoint.foreign import ListedTensor
from megatronish.formats.megatron.names import rules
from megatronish.formats.megatron.torch_dist.files import SCALER
from megatronish.formats.weights import MOMENTS, Description, LazyTensor, Training, from_ours

STATE = re.compile(r"(?:chained_\d{1,9}\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
NO_PARAMETER = ".expert_bias"
"""End of the names of weights without a gradient, and so without moments."""
OPTIMIZER = "the state of Megatron-LM's optimizer"
IN_PIECES = (
    f"{OPTIMIZER}, which is not there tensor by tensor; load it into Megatron-LM and save it again with "
    "--dist-ckpt-optim-fully-reshardable to keep it"
)
NO_STEP = f"{OPTIMIZER}, of which common.pt does not say after how many steps it is"


class States(NamedTuple):
    """Names of the tensors of Adam's states, and of masters, by the name of the weight that they belong to."""

    moments: dict[str, dict[str, str]]
    masters: dict[str, str]

    def keys(self) -> set[str]:
        """Names of all of them."""
        return {key for keys in (*self.moments.values(), self.masters) for key in keys.values()}


def find_states(listed: Mapping[str, ListedTensor], weights: Collection[str]) -> States | None:
    """Adam's states of these weights; None unless there is one, in the shape of its weight, for every parameter."""
    named: dict[str, dict[str, str]] = {}
    for key in listed:
        if match := STATE.fullmatch(key):
            named.setdefault("master" if "param" in match[1] else match[1], {})[match[2]] = key
    parameters = [key for key in weights if not key.endswith(NO_PARAMETER)]
    moments = {state: named.get(state, {}) for state in MOMENTS}
    masters = named.get("master", {})
    rounded = [key for key in parameters if listed[key].dtype != torch.float32]
    for names, needed in (*((each, parameters) for each in moments.values()), (masters, rounded)):
        if not all(key in names and listed[names[key]].shape == listed[key].shape for key in needed):
            return None
    # Some weights may be in fp32 in the model, too: those are their own masters.
    return States(moments, {key: masters.get(key, key) for key in parameters} if rounded else {})


def reason_against(*, has_states: bool, num_updates: int | None) -> str:
    """Why an optimizer's state is left out; that of one that can be read says no more than what it is."""
    if not has_states:
        return IN_PIECES
    return NO_STEP if num_updates is None else OPTIMIZER


STATES = "optimizer.state."
MASTERS = ("param", "fp32_param")
"""Names of the weights in fp32: of the distributed optimizer, and of the one with 16-bit weights."""
SHARDING = "fully_reshardable"


def states_of_training(
    training: Training, description: Description, weights: Mapping[str, LazyTensor]
) -> dict[str, dict[str, LazyTensor]]:
    """{state: {name in names.py: tensor}} of Adam's moments, and of the masters, which are the weights themselves."""
    by_rule = rules(description, of_moments=True)
    moments = {moment: from_ours(tensors, by_rule).tensors for moment, tensors in training.moments.items()}
    parameters = set().union(*moments.values())
    masters = {name: tensor for name, tensor in weights.items() if name in parameters}
    return moments | dict.fromkeys(MASTERS, masters)


def common_of_training(training: Training, *, has_expert_ranks: bool, has_expert_biases: bool) -> dict[str, Any]:
    """What common.pt says of it: iteration, schedule, and the groups of parameters with the number of Adam's steps.

    Where Megatron-LM deals experts to ranks, it has two optimizers in a chain, the second one for experts. Each is
    given exactly its groups: weights, and what has no weight decay.
    """
    asked = training.optimizer
    decay, rate = asked.get("weight_decay", 0.01), asked.get("lr") or 0.0
    shared = {
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": rate,
        "min_lr": asked.get("min_lr", 0.0),
        "lr": rate,
        "betas": (asked.get("adam_beta1", 0.9), asked.get("adam_beta2", 0.999)),
        "eps": asked.get("adam_eps", 1e-8),
        "decoupled_weight_decay": True,
    }
    scale = torch.tensor([training.loss_scale.get("scale", 1.0)])
    scaler = {**training.loss_scale, "scale": LazyTensor((1,), scale.dtype, scale.clone)}
    of_scaler = {SCALER: scaler} if training.loss_scale else {}
    optimizers: list[dict[str, Any]] = []
    for is_expert, multiples in ((False, (1.0, 0.0)), (True, (1.0, 0.0) if has_expert_biases else (1.0,))):
        groups = [
            shared
            | {"wd_mult": each, "weight_decay": decay * each, "is_expert_parallel": is_expert}
            | {"step": float(training.num_updates)}
            for each in multiples
        ]
        of_inner = {"state": {"common_step": float(training.num_updates)}, "param_groups": groups}
        optimizers.append({**of_inner, **of_scaler, "optimizer": of_inner, "param_state_sharding_type": SHARDING})
    schedule = {
        "max_lr": rate,
        "min_lr": asked.get("min_lr", 0.0),
        "lr_warmup_steps": 0,
        "num_steps": training.consumed_samples,
        "lr_decay_style": asked.get("lr_decay_style", "linear"),
        "lr_decay_steps": training.consumed_samples,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }
    return {
        "iteration": training.iteration,
        "optimizer": dict(enumerate(optimizers)) if has_expert_ranks else optimizers[0],
        "opt_param_scheduler": schedule,
        "content_metadata": {
            "singleton_local_shards": True,
            "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": SHARDING,
        },
    }
