"""Tests of switches of other frameworks' files, and of sentences that name the key of the file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatronish.compat.importers import accelerate, axolotl, deepspeed
from megatronish.compat.importers.accelerate import from_accelerate
from megatronish.compat.importers.axolotl import from_axolotl
from megatronish.compat.importers.deepspeed import from_deepspeed
from megatronish.compat.importers.imported import Imported
from megatronish.compat.importers.values import settled
from megatronish.core.errors import UserError

HERE = Path()
TABLES = {
    **{f"deepspeed {key}": (key, others, from_deepspeed) for key, others in deepspeed.SWITCHES.items()},
    **{
        f"axolotl {key}": (key, others, lambda v: from_axolotl(v, folder=HERE))
        for key, others in axolotl.SWITCHES.items()
    },
    **{
        f"accelerate {key}": (key, others, lambda v: from_accelerate(v, folder=HERE))
        for key, others in accelerate.SWITCHES.items()
    },
}


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of a.b."""
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def at(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("name", TABLES)
def test_a_switch_is_on_or_off_or_refused_with_its_path(name: str) -> None:
    key, others, read = TABLES[name]
    for value, is_on in (
        ("false", False),
        ("yes", True),
        ("No", False),
        (0, False),
        (1, True),
        ("y", True),
        ("0", False),
        (None, None),
    ):
        assert at(settled(nested(key, value), {key: others}), key) is is_on
    for other in others:
        if isinstance(other, str):
            assert at(settled(nested(key, other), {key: others}), key) == other
            assert at(settled(nested(key, other.swapcase()), {key: others}), key) == other
    for value, told in (("tru", "tru"), ([1], r"\[1\]")):
        with pytest.raises(UserError, match=rf"^{key}={told} must be true or false.*; correct the file$"):
            read(nested(key, value))


def outcome(found: Imported) -> tuple[Any, ...]:
    return found.settings, found.otherwise


@pytest.mark.parametrize("name", TABLES)
def test_a_switch_in_other_words_is_read_as_true_and_false(name: str) -> None:
    """With a section that is asked for, so that its switches are read."""
    key, _, read = TABLES[name]
    around: dict[str, dict[str, Any]] = {
        "scheduler": {"type": "OneCycle", "cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
        "optimizer": {"type": "Adam"},
        "megatron_lm_config": {},
    }
    begun = {"distributed_type": "MEGATRON_LM"} if "megatron" in key else {"distributed_type": "FSDP"}
    begun = begun if name.startswith("accelerate") else {"adapter": "lora"} if name.startswith("axolotl") else {}
    if "cycle" in key and name.startswith("axolotl"):
        begun = {"lr_scheduler": "one_cycle", "max_steps": 9, "learning_rate": 1}

    def of(value: Any) -> tuple[Any, ...]:
        values = begun | nested(key, value)
        first = key.partition(".")[0]
        if first == "scheduler":
            kind = "LRRangeTest" if "range" in key else "OneCycle"
            values[first] = {"type": kind, "params": {**around[first], **values[first]["params"]}}
            values[first]["params"].pop("type")
        elif first == "optimizer":
            values[first]["type"] = "Adam"
        return outcome(read(values))

    assert of("false") == of(0) == of("Off") == of(False)
    assert of("yes") == of(1) == of("TRUE") == of(True)


@pytest.mark.parametrize(
    ("read", "values", "sentence"),
    [
        (
            "deepspeed",
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5]}}},
            r"optimizer.params.betas\[1\]=1.5",
        ),
        (
            "deepspeed",
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -5}}},
            r"scheduler.params.warmup_num_steps=-5 must be at least 0",
        ),
        (
            "deepspeed",
            {
                "scheduler": {
                    "type": "OneCycle",
                    "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_step_size": -3},
                }
            },
            r"scheduler.params.decay_step_size=-3 must be at least 0",
        ),
        ("deepspeed", {"optimizer": {"type": "Adam", "params": [1]}}, r"optimizer.params=\[1\] must be an object"),
        ("deepspeed", {"scheduler": {"type": [1]}}, r"scheduler.type=\[1\] must be a text"),
        (
            "deepspeed",
            {"zero_optimization": {"offload_param": {"device": [1]}}},
            r"zero_optimization.offload_param.device=\[1\] must be a text",
        ),
        (
            "axolotl",
            {
                **{"lr_scheduler": "one_cycle", "max_steps": 9, "learning_rate": 1},
                "lr_scheduler_kwargs": {"pct_start": 5},
            },
            r"lr_scheduler_kwargs.pct_start=5 must be at most 1",
        ),
        ("axolotl", {"adapter": "lora", "lora_r": "auto"}, "lora_r=auto must be a number; correct the file"),
        ("axolotl", {"adapter": "lora", "lora_alpha": "auto"}, "lora_alpha=auto must be a number"),
        ("axolotl", {"rl": "dpo", "rl_beta": "auto"}, "rl_beta=auto must be a number"),
        ("axolotl", {"max_steps": 9, "eval_steps": -1}, "eval_steps=-1 must be greater than 0"),
        ("axolotl", {"max_steps": 9, "save_steps": 0}, "save_steps=0 must be greater than 0"),
        ("accelerate", {"num_processes": 1e300}, r"^num_processes=1e\+300 must be at most"),
        (
            "accelerate",
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 7}},
            "deepspeed_config.zero_stage=7 must be one of 0, 1, 2 or 3",
        ),
        (
            "accelerate",
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": "maybe"}},
            "fsdp_config.fsdp_offload_params=maybe must be true or false",
        ),
    ],
)
def test_a_sentence_names_the_key_of_the_file(read: str, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        imported(read, values).refuse_out_of_range()


def imported(name: str, values: dict[str, Any]) -> Imported:
    if name == "deepspeed":
        return from_deepspeed(values)
    return from_axolotl(values, folder=HERE) if name == "axolotl" else from_accelerate(values, folder=HERE)


SETS = [{"path": "a/b", "type": "chat_template"}]


@pytest.mark.parametrize(
    ("read", "values", "key"),
    [
        ("axolotl", {"datasets": [{**SETS[0], "chat_template": "llama3"}]}, "datasets[0].chat_template"),
        ("axolotl", {"datasets": [{**SETS[0], "split": "train[:1%]"}]}, "datasets[0].split"),
        ("axolotl", {"datasets": [{"path": "a", "field": "content"}]}, "datasets[0].field"),
        ("axolotl", {"rl": "dpo", "datasets": [{"path": "a/b", "split": "test"}]}, "datasets[0].split"),
        ("axolotl", {"datasets": SETS, "pretraining_dataset": "c/d"}, "pretraining_dataset"),
        ("axolotl", {"tokens": ["<a>"]}, "tokens"),
        ("axolotl", {"overrides_of_model_config": {"a": 1}}, "overrides_of_model_config"),
        ("axolotl", {"cosine_constant_lr_ratio": 0.5}, "cosine_constant_lr_ratio"),
        ("axolotl", {"lr_quadratic_warmup": True}, "lr_quadratic_warmup"),
        ("deepspeed", {"amp": {"enabled": True}}, "amp"),
        (
            "deepspeed",
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_step": 1}}},
            "scheduler.params.warmup_step",
        ),
        (
            "accelerate",
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_mixed_precision_policy": "bf16"}},
            "fsdp_config.fsdp_mixed_precision_policy",
        ),
    ],
)
def test_what_changes_what_is_trained_is_a_warning(read: str, values: dict[str, Any], key: str) -> None:
    assert key in imported(read, values).otherwise


def test_unknown_keys_of_accelerates_sections_are_unknown() -> None:
    fsdp = imported("accelerate", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_stratgy": "NO_SHARD"}})
    zero = imported("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stge": 3}})
    told = fsdp.left_out | zero.left_out
    assert told["fsdp_config.fsdp_sharding_stratgy"] == told["deepspeed_config.zero_stge"] == "it is not known here"


def test_words_of_yaml_that_are_read_as_false_or_true_are_taken_as_they_were_meant() -> None:
    found = imported("accelerate", {"distributed_type": False, "dynamo_config": {"dynamo_backend": False}})
    assert found.settings["zero_stage"] == 0 and "compile" not in found.settings
    rl = imported("axolotl", {"rl": True, "datasets": SETS})
    assert rl.otherwise["rl"].startswith("true is not there, and preferences are not learned: this trains on the data")


def test_a_contradiction_of_a_quoted_switch_is_seen(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {}, "fp16": {"enabled": "true"}}')
    values = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    with pytest.raises(UserError, match=r"mixed_precision=bf16 and fp16 of ds.json contradict"):
        from_accelerate({**values, "mixed_precision": "bf16"}, folder=tmp_path)


def test_a_password_in_a_key_is_not_written() -> None:
    assert "HUNTER2" not in from_deepspeed({"https://user:HUNTER2@host/": 1}).to_toml(Path("ds.json"))
