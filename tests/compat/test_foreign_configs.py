"""Tests of configs by strangers: no importer writes a key that it did not mean, and none ends in a traceback."""

import json
import random
import shlex
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatronish.commands.import_config import Framework, imported
from megatronish.compat.importers.accelerate import MEGATRON, PARALLELISM
from megatronish.compat.importers.accelerate import TOP as ACCELERATE
from megatronish.compat.importers.axolotl import _OWN, RULES, from_axolotl
from megatronish.compat.importers.deepspeed import (
    ACTIVATIONS,
    BF16,
    FP16,
    OF_ONE_RANK,
    TOP,
    ZERO,
    from_deepspeed,
)
from megatronish.compat.importers.deepspeed_optimizer import MUON, MUON_RATES, PARAMS
from megatronish.compat.importers.deepspeed_scheduler import SCHEDULER_FLAGS, SCHEDULERS
from megatronish.config.config import Config
from megatronish.config.data_lists import splits_of_file
from megatronish.config.dump import to_toml, toml_value, write_toml
from megatronish.config.fields import SECTIONS
from megatronish.config.model_source import refuse_unknown_block
from megatronish.config.read import ConfigError, read_config
from megatronish.core.errors import UserError
from megatronish.core.foreign import MOST_VALUES, parse_json, parse_toml, parse_yaml, shown
from megatronish.estimate.planner.calibrate import calibrated
from megatronish.estimate.planner.calibrate import to_toml as device_toml
from megatronish.estimate.planner.devices import find_device, read_device
from megatronish.report.forecast_page import page

yaml = pytest.importorskip("yaml")

EVIL = '[plugins]\nplugin = ["/x/evil.py"]\n'
ENDS = (
    "\n",
    "\r",
    "\r\n",
    "\x85",
    "\u2028",
    "\u2029",
    "\x0b",
    "\x0c",
    "\x1b[2J",
    "\0",
    "\x7f",
    '"\n',
    "'''\n",
    '"""\n',
)
WORDS: tuple[Any, ...] = (
    *(end + EVIL + "#" for end in ENDS),
    *(
        "\ud800",
        "\u202e",
        "a" * 70_000,
        "auto",
        "",
        " ",
        "#",
        "]",
        '"',
        "\\",
        "\\u000a[plugins]",
        "=\n",
        "none",
        "1e999",
    ),
    *(float("inf"), float("-inf"), float("nan"), 10**400, -(10**400), 2**63, -1, 0, 0.5, 1.5, 1e308, True, False, None),
    *([], {}, [[]], [None], [EVIL], {"\n" + EVIL: 1}, {"path": EVIL}, {"enabled": EVIL}, {"device": "\n" + EVIL}),
    *(["a", 1, {}], [{"path": "x/y", "type": "\n" + EVIL, "data_files": [EVIL, {}]}], {"params": {EVIL: 1}}),
)
LISTS: dict[Framework, dict[str, tuple[str, ...]]] = {
    "deepspeed": {
        "": (
            *TOP,
            "optimizer",
            "scheduler",
            "fp16",
            "bf16",
            "zero_optimization",
            "activation_checkpointing",
            "compile",
            "torch_autocast",
            "gradient_allreduce_op",
        ),
        "optimizer": ("type", "params"),
        "scheduler": ("type", "params"),
        "params": (
            *PARAMS,
            *MUON,
            *MUON_RATES,
            "betas",
            *SCHEDULER_FLAGS,
            "warmup_type",
            "cycle_momentum",
            "decay_step_size",
        ),
        "fp16": (*FP16, "initial_scale_power"),
        "bf16": tuple(BF16),
        "torch_autocast": ("enabled", "dtype"),
        "zero_optimization": (*ZERO, "offload_optimizer", "offload_param"),
        "activation_checkpointing": (*ACTIVATIONS, "cpu_checkpointing"),
    },
    "axolotl": {
        "": (*RULES, *_OWN),
        "datasets": ("path", "type", "data_files", "field_messages", "split"),
        "fsdp_config": ("sharding_strategy", "offload_params", "fsdp_sharding_strategy", "reshard_after_forward"),
        "bnb_config_kwargs": ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    },
    "accelerate": {
        "": (
            *(*ACCELERATE, "mixed_precision", "num_processes", "use_cpu", "fsdp_config", "deepspeed_config"),
            *("megatron_lm_config", "parallelism_config", "dynamo_config", "distributed_type"),
        ),
        "deepspeed_config": ("zero_stage", "gradient_clipping", "deepspeed_config_file", "offload_optimizer_device"),
        "fsdp_config": ("fsdp_sharding_strategy", "fsdp_offload_params", "fsdp_version"),
        "megatron_lm_config": tuple(f"megatron_lm_{key}" for key in MEGATRON),
        "parallelism_config": tuple(f"parallelism_config_{key}" for key in PARALLELISM),
    },
}
SOUND: dict[str, tuple[Any, ...]] = {
    "type": ("AdamW", "SGD", "Muon", *SCHEDULERS, "chat_template"),
    "distributed_type": ("DEEPSPEED", "FSDP", "MEGATRON_LM", "MULTI_GPU"),
    "adapter": ("lora", "qlora"),
    "rl": ("dpo", "kto", "simpo"),
    "enabled": (True, False),
}


def configs(framework: Framework, numbers: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Configs of known and unknown keys with odd values."""
    keys = LISTS[framework]

    def objects(name: str, depth: int) -> dict[str, Any]:
        known = keys.get(name, ())
        found: dict[str, Any] = {}
        for _ in range(numbers.randint(1, 6)):
            is_known = known and numbers.random() < 0.85
            key = numbers.choice(known) if is_known else str(numbers.choice(WORDS))
            if key in keys and depth < 4 and numbers.random() < 0.85:
                inner = objects(key, depth + 1)
                found[key] = [inner] if key == "datasets" else inner
            elif key in SOUND and numbers.random() < 0.7:
                found[key] = numbers.choice(SOUND[key])
            else:
                found[key] = numbers.choice(WORDS)
        return found

    for _ in range(count):
        yield objects("", 0)


@pytest.mark.long
@pytest.mark.parametrize("framework", list(LISTS))
def test_no_config_of_a_stranger_becomes_a_key_that_was_not_meant(framework: Framework, tmp_path: Path) -> None:
    numbers, read, refused = random.Random(31), 0, list[str]()
    for number, values in enumerate(configs(framework, numbers, 400)):
        path = tmp_path / f"{number}\n[plugins]\n#.json"
        path.write_text(json.dumps(values))
        try:
            found = imported(framework, path, dp=numbers.choice((None, 2)))
            text = found.to_toml(path)
        except UserError as error:
            refused.append(str(error))
            continue
        finally:
            path.unlink()
        tables = tomllib.loads(text)
        assert tables.keys() <= set(SECTIONS) - {"plugins"}
        said = {name: value for table in tables.values() for name, value in table.items()}
        assert said == {name: list(each) if isinstance(each, tuple) else each for name, each in found.settings.items()}
        assert all(line.isprintable() for line in text.splitlines())
        read += 1
    assert read > 30 and len(refused) > 30
    assert [sentence for sentence in refused if not sentence.isprintable() or len(sentence) > 700] == []


def test_the_config_that_ran_code_becomes_a_comment(tmp_path: Path) -> None:
    key = f"a\n{EVIL}#"
    for values in (
        {"train_batch_size": 4, key: 1},
        {"optimizer": {"type": "Adam", "params": {key: 1}}},
        {"zero_optimization": {"stage": 1, "offload_param": {"device": key}}},
    ):
        (tmp_path / "ds.json").write_text(json.dumps(values))
        text = imported("deepspeed", tmp_path / "ds.json").to_toml(tmp_path / "ds.json")
        assert "plugins" not in tomllib.loads(text)
        assert r"\n[plugins]\nplugin = " in text
    (tmp_path / "a.yml").write_text(yaml.safe_dump({key: 1, "datasets": [{"path": key}]}))
    assert "plugins" not in tomllib.loads(imported("axolotl", tmp_path / "a.yml").to_toml(Path(f"a\n{EVIL}.yml")))


def test_what_a_run_and_a_plan_write_reads_as_what_it_was(tmp_path: Path) -> None:
    numbers = random.Random(5)
    for _ in range(20):
        text = "".join(numbers.choice((*ENDS, EVIL, "a", '"', "\\", "é", "\U0001f600", "]")) for _ in range(4))
        lr = numbers.choice((1e22, float("inf"), 5e-324))
        config = Config().with_fields(run_dir=text, data_path=(text, "b"), lr=lr)
        assert tomllib.loads(to_toml(config))["log"]["run_dir"] == text
        device = tmp_path / "device.toml"
        device.write_text(device_toml(replace(find_device("a100-sxm"), name=text)), encoding="utf-8")
        assert read_device(device).name == text


@pytest.mark.parametrize("value", [None, {"a": 1}, "\ud800", [object()]])
def test_what_toml_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"no TOML file can hold|has no place in a TOML file"):
        write_toml({"a": {"b": value}})


def test_numbers_that_are_no_json_are_toml() -> None:
    assert [toml_value(value) for value in (float("inf"), float("-inf"), float("nan"))] == ["inf", "-inf", "nan"]


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{LAUGHS}base_model: *j\n", f"makes more than {MOST_VALUES:,} values of it"),
        ("a: &a {b: *a}", "an anchor may hold itself"),
        ("&a [*a]", "an anchor may hold itself"),
        ("a: &a\n  <<: *a\n", "an anchor may hold itself"),
        ("? [1, 2]\n: 3\n", "is a list or an object as a key"),
        ("a: !!python/object/apply:os.system ['true']", "which is no plain value"),
        ("a: !!set {b, c}", "which is no plain value"),
        ("a: !mine 3", "which is no plain value"),
        ("a: !!int b", "which is no int"),
        (f"a: {'1' * 200}", "is a number of 200 characters"),
        ("[" * 2000, "more than 50 deep"),
        ("- " * 3000, "more than 50 deep"),
        ("- " * 60 + "a", "is more than 50 lists and objects deep"),
        ("a: b: c", "mapping values are not allowed here, line 1"),
        ("a: 1\n---\nb: 2", "has several documents; keep one"),
        ("a: \0", "special characters are not allowed"),
        ("<<: 3", "is merged by <<, and is no object"),
    ],
)
def test_yaml_that_is_not_plain_or_too_much_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=sentence) as error:
        parse_yaml(text)
    assert len(str(error.value)) < 300 and str(error.value).isprintable()
    assert time.monotonic() - start < 10


def test_yaml_is_read_as_plain_values_with_texts_as_keys() -> None:
    text = "1: 2001-01-01\non: {~: 0x10}\nx: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: [*x, .inf, yes, 1_000, 2e-4, '1']\n"
    assert parse_yaml(text) == {
        "1": "2001-01-01",
        "on": {"~": 16},
        "x": {"a": 1, "b": 2},
        "y": {"a": 1, "b": 3},
        "z": [{"a": 1, "b": 2}, float("inf"), True, 1000, "2e-4", "1"],
    }
    assert parse_yaml("") is None and parse_yaml("# nothing") is None


def test_json_that_is_too_deep_or_too_large_is_refused(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "[" * 60 + "]" * 60, '{"a":' * 60 + "1" + "}" * 60):
        with pytest.raises(ValueError, match=r"more than 50 deep|too deep inside of each other"):
            parse_json(text)
    (tmp_path / "large.yml").write_text("a: 1\n" * 100_000)
    with pytest.raises(UserError, match=r"large.yml cannot be read as YAML: it has more than 65,536 bytes"):
        imported("axolotl", tmp_path / "large.yml")
    assert shown("a\nb" * 100, most=20) == r"a\nba\nba\nba\nba\nb..."[:17] + "..."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a" + ".a" * 50_000 + " = 1", "line 1 has a key of more than 50 parts"),
        ("x = 1\n[" + "a . " * 50_000 + "a]", "line 2 has a key of more than 50 parts"),
        ("x = 1\n" + "'a'." * 50_000 + "a = 1", "line 2 has a key of more than 50 parts"),
        ("a = " + "[" * 20_000, "too deep inside of each other"),
        ("a = " + "{a = " * 20_000, "too deep inside of each other"),
        ("a = " + "9" * 5000, "it has a number of thousands of digits"),
        ("a = 0x" + "f" * 5000, "line 1 has a number of thousands of digits"),
        ("#" + "x" * 2**22, "more than 4,194,304 characters"),
    ],
)
def test_toml_that_is_too_deep_or_too_large_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    before = time.process_time()
    with pytest.raises(ValueError, match=sentence):
        parse_toml(text)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=sentence):
        find_device(str(tmp_path / "mine.toml"))
    with pytest.raises(UserError, match=sentence):
        read_config(["--config", str(tmp_path / "mine.toml")])
    assert time.process_time() - before < 4.0
    assert parse_toml("a = 'one. two. three. ' # a.b.c\n[x.'y'.z]\nb.c = 1.5") == {
        "a": "one. two. three. ",
        "x": {"y": {"z": {"b": {"c": 1.5}}}},
    }


@pytest.mark.parametrize("section", ["", "[model]\n"])
def test_a_config_of_thousands_of_unknown_keys_is_soon_refused(section: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(section + "\n".join(f"k{number} = 1" for number in range(20_000)))
    before = time.process_time()
    with pytest.raises(UserError, match=r"k7 (.|\n)*correct these first") as caught:
        read_config(["--config", str(tmp_path / "mine.toml")])
    assert time.process_time() - before < 8.0 and "k300" not in str(caught.value)


def test_numbers_beyond_every_float_are_refused_by_the_planner(tmp_path: Path) -> None:
    for name, number in (("memory_gib", "9" * 4000), ("sms", "-" + "9" * 4000)):
        (tmp_path / "mine.toml").write_text(f'[mine]\nlike = "h100-sxm"\n{name} = {number}\n')
        with pytest.raises(UserError, match=rf"{name}=-?999.* must be a number"):
            find_device(str(tmp_path / "mine.toml"))
    fit = {"accepted": True, "bandwidth_bytes_per_s": 10**4000, "alpha_s": 1, "ranks": 4, "nodes": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"collective": "all_reduce", "fit": fit}))
    with pytest.raises(UserError, match=r"bandwidth_bytes_per_s=1000.* must be a number above 0"):
        calibrated(find_device("h100-sxm"), [tmp_path / "rows.jsonl"])


@pytest.mark.parametrize(
    "text", ['{"train": 3}', '{"train": {"a": 1}}', '{"train": [[1]]}', "[" * 5000, '{"train": ["a", null]}', "[]", "3"]
)
def test_a_list_of_splits_that_is_none_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "splits.json").write_text(text)
    with pytest.raises(ValueError, match=r"splits.json (must hold lists|is not JSON)"):
        splits_of_file(str(tmp_path / "splits.json"))


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("val_set_size: [1]", r"val_set_size=\[1\] must be a number"),
        ("val_set_size: -1", "val_set_size=-1 must be at least 0"),
        ("val_set_size: .nan", "val_set_size=NaN must be a number"),
        ("micro_batch_size: {}\nlora_r: 2", None),
        ("micro_batch_size: 1.5", "micro_batch_size=1.5 must be a whole number"),
        ("micro_batch_size: 0", "micro_batch_size=0 and gradient_accumulation_steps=1 must be at least 1"),
        ("gradient_accumulation_steps: 0.5", "gradient_accumulation_steps=0.5 must be a whole number"),
        ("learning_rate: 2001-01-01", "learning_rate=2001-01-01 must be a number"),
        ("base_model: 2001-01-01", None),
        ("1: 2", None),
        ("base_model: [a]", r"base_model=\[.*a.*\] must be a text"),
        ("adapter: {a: 1}", "adapter=.* must be a text"),
        ("num_epochs: .inf", "num_epochs=Infinity must be a number"),
        ("num_epochs: 0", "num_epochs=0 must be greater than 0"),
        ("learning_rate: -1", "learning_rate=-1 must be greater than 0"),
        ("adapter: lora\nlora_r: 0", "lora_r=0 must be at least 1"),
        ("max_steps: -1\nsave_total_limit: -1", None),
        ("datasets: 5", r"datasets\[0\]=5 must be an object with a path, or a path"),
        ("datasets: [{path: a/b}, null]", r"datasets\[1\]=null must be an object with a path, or a path"),
        ("adapter: lora\nlora_target_modules: 5\nlora_target_linear: true", "lora_target_modules=5 must be a list"),
        ("adapter: lora\nlora_target_linear: 3", "lora_target_linear=3 must be true or false"),
        ("fsdp_config: {fsdp_sharding_strategy: FOO}", "sharding_strategy=FOO must be FULL_SHARD, SHARD_GRAD_OP, "),
        ("seed: 1\nseed: 1", None),
        ("seed: 1\nseed: 2", "line 2, column 1 has seed again, with another value"),
    ],
)
def test_an_odd_value_of_axolotl_is_read_or_refused(lines: str, sentence: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(f"{lines}\n")
    if sentence is None:
        assert tomllib.loads(imported("axolotl", tmp_path / "a.yml").to_toml(tmp_path / "a.yml"))
        return
    with pytest.raises(UserError, match=sentence):
        imported("axolotl", tmp_path / "a.yml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"zero_optimization": {"stage": 7}}', "zero_optimization.stage=7 must be one of 0, 1, 2 or 3; correct the"),
        ('{"zero_optimization": {"stage": -1}}', "zero_optimization.stage=-1 must be one of 0, 1, 2 or 3"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": -1}}}', "optimizer.params.lr=-1 must be greater than 0"),
        ('{"train_batch_size": 2147483648}', "train_batch_size=2147483648 must be at most 2147483647"),
        ('{"bf16": {"enabled": true}, "bf16": {"enabled": false}}', "the key bf16 is there twice, with two values"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "it has a number of thousands of digits"),
    ],
)
def test_an_odd_value_of_deepspeed_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        imported("deepspeed", tmp_path / "d.json")


def test_other_encodings_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_bytes('{"seed": 1}'.encode("utf-16"))
    with pytest.raises(UserError, match="it is UTF-16, and must be UTF-8; save it as UTF-8"):
        imported("deepspeed", tmp_path / "d.json")
    (tmp_path / "c.toml").write_bytes("[training]".encode("utf-16"))
    with pytest.raises(ConfigError, match="it is UTF-16, and must be UTF-8"):
        read_config(["--config", str(tmp_path / "c.toml")])
    (tmp_path / "d.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(UserError, match="it is not UTF-8: byte 7 is 0xe9"):
        imported("deepspeed", tmp_path / "d.json")


def test_settings_that_contradict_each_other_are_told_when_they_are_imported(tmp_path: Path) -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert "TO CORRECT: bf16 contradicts fp16: a model is computed in one precision" in from_deepspeed(both).warnings()
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.01, "warmup_num_steps": 100, "total_num_steps": 50}
    lines = from_deepspeed({"scheduler": {"type": "WarmupDecayLR", "params": params}}).warnings()
    assert [
        line for line in lines if line.startswith("TO CORRECT: lr_warmup_iters=100 must be less than train_iters=50")
    ]
    assert [line for line in lines if line.startswith("TO CORRECT: min_lr=0.1 must not exceed lr=0.01")]
    given = from_axolotl({"warmup_steps": 5, "warmup_ratio": 0.1, "max_steps": 50}, folder=tmp_path)
    assert given.left_out["warmup_ratio"] == "warmup_steps, which is given, counts"
    assert given.complaints() == [] and "base_model" in given.left_out


def test_what_a_checkpoint_names_is_one_word_of_the_command_that_is_printed(tmp_path: Path) -> None:
    config = {"model": {"block": "\x1b[2Jmine"}, "plugins": {"plugin": ["a.py; rm -rf ~", "b\nc.py", "$(true).py"]}}
    with pytest.raises(UserError) as error:
        refuse_unknown_block(config, tmp_path)
    words = shlex.split(str(error.value).partition("; add ")[2].partition(", which runs")[0])
    assert words == ["--plugin", "a.py; rm -rf ~", "--plugin", r"b\nc.py", "--plugin", "$(true).py"]
    assert str(error.value).isprintable()


def test_a_page_of_a_forecast_keeps_names_of_devices_in_their_lines() -> None:
    odd = "a|b\n# Heading\n<script>"
    expected = {
        "layout": odd,
        "global_batch_size": 4,
        "memory": {"bytes": 1, "stage": 0, "by_owner": {odd: 1}},
        "step_seconds": {"low": 1.0, "high": 2.0, "device": odd, "calibrated": odd, "error": odd},
        "no_traffic": odd,
    }
    measured = {"steps": 3, "step_seconds": 1.0, "peak_memory_bytes": 2, "memory_of": odd}
    lines = page(expected, measured).splitlines()
    assert sum(line.startswith("#") for line in lines) == 3
    (row,) = (line for line in lines if line.startswith("| a"))
    assert row.count("|") == 3


@pytest.mark.parametrize(
    ("text", "dp", "expected"),
    [
        ("micro_batch_size: 4", None, {"global_batch_size": 4}),
        ("micro_batch_size: 2\nbatch_size: 8", 4, {"global_batch_size": 32}),
        ("micro_batch_size: 1\nfsdp: full_shard\nfsdp_config: {reshard_after_forward: 'False'}", 2, {"zero_stage": 2}),
        ("fsdp: full_shard\nfsdp_config: {reshard_after_forward: FULL_SHARD}", 2, {"zero_stage": 3}),
        ("fsdp: full_shard\nfsdp_config: {reshard_after_forward: 8}", 2, {"zero_stage": 3}),
        ("fsdp: full_shard\nfsdp_config: {reshard_after_forward: SHARD_GRAD_OP}", 2, {"zero_stage": 2}),
    ],
)
def test_numbers_of_one_rank_in_axolotls_files(
    text: str, dp: int | None, expected: dict[str, int], tmp_path: Path
) -> None:
    found = from_axolotl(yaml.safe_load(text), folder=tmp_path, dp=dp)
    assert {name: found.settings[name] for name in expected} == expected
    assert any(OF_ONE_RANK in line for line in found.to_toml(tmp_path / "a.yml").splitlines()) == (dp is None)


def test_a_batch_of_deepspeed_that_its_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train_batch_size=30 must be a multiple of .*=2 times --dp 4, 8"):
        from_deepspeed({"train_batch_size": 30, "gradient_accumulation_steps": 2}, dp=4)
