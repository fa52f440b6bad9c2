"""ZeRO, as FSDP's settings say it, or a DeepSpeed file that another config names: of Axolotl and of Accelerate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.compat.importers.deepspeed import OLDER_CLIPPING, from_deepspeed
from megatronish.compat.importers.imported import (
    SPEED,
    UNKNOWN,
    Imported,
    Rule,
    apply,
    dropped,
    missed,
)
from megatronish.compat.importers.values import Switches, read_object, section, text
from megatronish.config.fields import one_of
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown


def sharding(found: Imported, values: Mapping[str, Any], folder: Path) -> None:
    """ZeRO, from the DeepSpeed file that the config names, or from FSDP."""
    # 1. A DeepSpeed file, whose path may be relative to the config.
    if name := text(values, "deepspeed"):
        path = next(
            (each for each in (Path(name), folder / name, folder / Path(name).name) if is_file(each)), Path(name)
        )
        try:
            given = read_object(path, is_yaml=False)
        except UserError:
            found.leave_out("deepspeed", f"{path} cannot be read; name its stage with --zero-stage")
            return
        try:
            shared = from_deepspeed({"zero_optimization": section(given, "zero_optimization")})
            shared.refuse_out_of_range()
            _of_deepspeed(found, given, path.name)
        except UserError as error:
            raise UserError(f"{shown(path.name)}: {error}") from None
        for name in KEPT:
            if name in shared.settings:
                found.set(name, shared.settings[name], key=f"{path.name}: {shared.key_of.get(name, name)}")
    # 2. FSDP, which is ZeRO under other names. The older key has words, or a list of them.
    elif (words := values.get("fsdp")) or values.get("fsdp_config"):
        fsdp(found, shown(words or ""), section(values, "fsdp_config"))


def is_file(path: Path) -> bool:
    """Whether a file is there; False for what is no path at all."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name of thousands of characters, or one with NUL in it
        return False


def _of_deepspeed(found: Imported, given: Mapping[str, Any], name: str) -> None:
    """What else a DeepSpeed file decides. Most of it says "auto", which the config's own keys fill in."""
    # Clipping is DeepSpeed's there: max_grad_norm reaches it only in the place of "auto".
    if given.get("gradient_clipping") is None:
        found.set("clip_grad", 1.0)
        found.warn(f"{name}: gradient_clipping", f"max_grad_norm does not take its place; {OLDER_CLIPPING}")
    # These sections replace the config's own optimizer and schedule; of adam only what they leave to DeepSpeed.
    for key, own in {"optimizer": "optimizer", "scheduler": "lr_scheduler"}.items():
        options = section(given, key)
        kind, params = text(options, "type", within=f"{key}."), section(options, "params", within=f"{key}.")
        is_adam = kind.lower() in ("adam", "adamw") and found.settings["optimizer"] == "adam"
        if kind and not (is_adam and {"lr", "betas", "eps", "weight_decay"} <= params.keys()):
            found.warn(f"{name}: {key}", f"{kind} takes the place of {own} there; megatronish from-deepspeed reads it")


def fsdp(found: Imported, words: str, config: Mapping[str, Any]) -> None:
    """ZeRO, from FSDP: `words` are those of the older key, the keys of `config` may begin with fsdp_.

    A strategy that is not named is a full one. Switches are settled (FSDP_SWITCHES).
    """
    given = {key.removeprefix(FSDP_PREFIX): value for key, value in config.items()}
    names = {key.removeprefix(FSDP_PREFIX): f"{WITHIN}{key}" for key in config}
    # 1. The stage. Older files have words or numbers for strategies, FSDP2 only reshard_after_forward: parameters that
    # stay gathered after a forward are those of ZeRO-2.
    name = names.get("sharding_strategy", f"{WITHIN}sharding_strategy")
    named = text(given, "sharding_strategy", within=WITHIN)
    named = STRATEGIES.get(named, named).upper()
    if named and named not in STRATEGIES.values():
        raise UserError(f"{name}={shown(named)} must be {one_of(STRATEGIES.values())}; correct the file")
    strategy, reshards = f"{words} {named}".upper(), given.get("reshard_after_forward")
    strategy += f" {reshards}".upper()  # Accelerate writes FULL_SHARD, SHARD_GRAD_OP and their like here, too
    stage = 2 if reshards is False or "SHARD_GRAD_OP" in strategy or "ZERO2" in strategy else 3
    found.set("zero_stage", 0 if "NO_SHARD" in strategy else stage)
    # 2. Hybrid sharding: the file does not say how many replicas there are, as FSDP takes the ranks of a machine.
    if "HYBRID" in strategy and "num_distributed_optimizer_instances" not in found.settings:
        found.leave_out(name, "a hybrid one; add --dp-replicate, the number of groups")
    # 3. FSDP has one switch for what is offloaded; here each stage offloads what it shards.
    if (given.get("offload_params") or "OFFLOAD" in strategy) and "NO_SHARD" not in strategy:
        found.set("param_cpu_offload" if stage == 3 else "optimizer_cpu_offload", True)
    if given.get("activation_checkpointing"):
        found.set("recompute_granularity", "full")
    # 4. What is left. A key that was read above is listed at most there.
    rest = {key: value for key, value in config.items() if key.removeprefix(FSDP_PREFIX) not in READ}
    apply(found, rest, {key: FSDP.get(key.removeprefix(FSDP_PREFIX), NOT_KNOWN) for key in rest}, within=WITHIN)


WITHIN, FSDP_PREFIX = "fsdp_config.", "fsdp_"
STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
"""FSDP's strategies by their numbers, in older files."""
READ = ("sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing")
FSDP_SWITCHES: Switches = {
    "fsdp_config.offload_params": (),
    "fsdp_config.activation_checkpointing": (),
    # A number is that of ranks that keep what is gathered.
    "fsdp_config.reshard_after_forward": (*STRATEGIES.values(), int),
}
"""Switches among the keys that are read."""
KEPT = (
    *("zero_stage", "optimizer_cpu_offload", "param_cpu_offload", "offload_folder", "overlap_grad_reduce"),
    "ddp_bucket_size",
)
"""Settings that Axolotl's config takes from a DeepSpeed file."""
NOT_KNOWN = dropped(UNKNOWN)
CHECKPOINTS = dropped("every checkpoint loads in every layout")
FSDP: dict[str, Rule] = {
    **dict.fromkeys(("state_dict_type", "final_state_dict_type"), CHECKPOINTS),
    "mixed_precision_policy": missed("the precision is that of the whole run: --bf16 or --fp16"),
    "ignored_modules": missed("every parameter is shared"),
    **dict.fromkeys(
        (
            *("version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"),
            *("min_num_params", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "use_orig_params"),
            *("sync_module_states", "cpu_ram_efficient_loading", "limit_all_gathers", "xla", "xla_fsdp_v2"),
            *("xla_fsdp_grad_ckpt", "cpu_offload_pin_memory"),
        ),
        SPEED,
    ),
}
"""Its keys that change nothing of what is trained, and those that do."""
