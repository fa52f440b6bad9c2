"""Tests of what all importers share: files, the page of absent keys, and what no file of a run holds."""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from foreign_configs import ACCELERATE, AXOLOTL, DEEPSPEED, settings_of
from paths import ROOT

from megatronish.commands.import_config import Framework, import_config
from megatronish.compat.importers.axolotl import RULES
from megatronish.compat.importers.deepspeed import ACTIVATIONS, BF16, FP16, TOP, ZERO, from_deepspeed
from megatronish.compat.importers.deepspeed_optimizer import MUON, PARAMS
from megatronish.config.fields import FIELDS
from megatronish.config.read import read_config
from megatronish.core.errors import UserError


def test_rules_name_fields() -> None:
    for rules in (TOP, PARAMS, MUON, BF16, FP16, ZERO, ACTIVATIONS, RULES):
        for key, rule in rules.items():
            assert rule.field in FIELDS or (rule.field is None and rule.reason), key


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ds.json", "{", r"ds.json cannot be read as JSON: .*; correct the file"),
        ("ds.json", "[1]", r"ds.json holds no settings, but \[1\]; name another file"),
        ("ds.json", '{"train_batch_size": "many"}', r"train_batch_size=many must be a whole number"),
        ("ds.json", '{"optimizer": 3}', r"optimizer=3 must be an object of settings"),
        ("ds.json", '{"gradient_accumulation_steps": []}', r"gradient_accumulation_steps=\[\] must be a number"),
        ("ds.json", '{"wandb": {"enabled": true, "team": "\\ud800"}}', r"it holds what no TOML file can hold: "),
        ("ds.json", " \n", r"ds.json is empty: it has no settings; name another file"),
        ("config.yml", "# nothing\n", r"config.yml is empty: it has no settings; name another file"),
        ("ds.json", None, r"ds.json cannot be read: No such file or directory; correct the path"),
        ("a.yml", "a: [", r"a.yml cannot be read as YAML: "),
        ("a.yml", "- 1", r"a.yml holds no settings"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if name.endswith("yml"):
        pytest.importorskip("yaml")
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        import_config("axolotl" if name.endswith("yml") else "deepspeed", tmp_path / name)


def test_yaml_without_its_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yml").write_text("a: 1\n")
    with pytest.raises(UserError, match="is read by PyYAML, and it is not installed; pip install pyyaml"):
        import_config("axolotl", tmp_path / "a.yml")
    (tmp_path / "a.json").write_text('{"sequence_len": 9}')
    assert settings_of(import_config("axolotl", tmp_path / "a.json"))["seq_length"] == 9


def run_tool(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / f"{name}.py", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False)


def test_the_tools_write_to_a_file_or_print(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    done = run_tool("from_deepspeed", tmp_path / "ds.json")
    assert done.returncode == 0, done.stderr
    assert settings_of(done.stdout)["zero_stage"] == 3
    assert run_tool("from_deepspeed", tmp_path / "ds.json", "--output", tmp_path / "o.toml", "--dp", 2).returncode == 0
    assert (tmp_path / "o.toml").read_text() == done.stdout
    (tmp_path / "a.json").write_text('{"sequence_len": 9}')
    assert settings_of(run_tool("from_axolotl", tmp_path / "a.json").stdout)["seq_length"] == 9
    for name, words in (("from_deepspeed", ["no.json"]), ("from_axolotl", ["no.yml"])):
        bad = run_tool(name, *words)
        assert (bad.returncode, "cannot be read" in bad.stderr) == (2, True)


HEAD = re.compile(r"\| absent key of (\w+)(?:'s `(\w+(?:\.\w+)*)`)? \|")
ABSENT = re.compile(r"\| (.+?) \| .+? \| `(\w+) = (.+?)` \| .+? \|")


def rows_of_the_page() -> Iterator[tuple[Framework, str, str, Any]]:
    """Framework, key with its holder, our field and its value, of each row of the tables of absent keys."""
    head = None
    for line in (ROOT / "docs" / "COMING_FROM.md").read_text(encoding="utf-8").splitlines():
        head = HEAD.match(line) or (head if line.startswith("|") else None)
        row = ABSENT.match(line) if head else None
        if head and row:
            holder = f"{head[2]}." if head[2] else ""
            framework = cast(Framework, head[1].lower())
            yield framework, holder + row[1].replace("`", ""), row[2], tomllib.loads(f"a = {row[3]}")["a"]


ROWS = list(rows_of_the_page())
SCHEDULED = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}}
HALF = {"enabled": True}
MUON_ALONE = {"optimizer": {"type": "Muon", "params": {}}}
SGD_ALONE = {"optimizer": {"type": "SGD", "params": {}}}
FILE = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
AROUND: dict[str, dict[str, Any]] = {
    "scheduler.params.warmup_num_steps": SCHEDULED,
    "scheduler.params.warmup_type": {"scheduler": {"type": "WarmupLR", "params": {}}},
    **{
        f"scheduler.params.{key}": {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}}
        for key in ("cycle_first_step_size", "cycle_second_step_size", "cycle_min_mom", "cycle_max_mom")
    },
    **{
        f"scheduler.params.lr_range_test_{key}": {"scheduler": {"type": "LRRangeTest", "params": {}}}
        for key in ("min_lr", "step_size", "step_rate")
    },
    "optimizer.params.betas of OneCycle": {
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}
    },
    "scheduler.params.warmup_max_lr of WarmupDecayLR": {
        "optimizer": {"type": "Adam", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {}},
    },
    "scheduler.params.warmup_max_lr of WarmupLR": {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}, **SCHEDULED},
    "scheduler.params.warmup_min_lr": {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
    "scheduler.params.cos_min_ratio": {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}},
    **{f"optimizer.params.{key} of SGD": SGD_ALONE for key in ("lr", "momentum", "weight_decay")},
    **{
        f"optimizer.params.{key} of Muon": MUON_ALONE
        for key in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "scale")
    },
    "optimizer.params.muon_lr": MUON_ALONE,
    "optimizer.params.weight_decay of torch_adam": {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
    **{f"fp16.{key}": {"fp16": HALF} for key in ("initial_scale_power", "loss_scale_window", "min_loss_scale")},
    "fp16.hysteresis with ZeRO": {"fp16": HALF, "zero_optimization": {"stage": 1}},
    "fp16.hysteresis without ZeRO": {"fp16": {**HALF, "hysteresis": 4}},
    "zero_optimization.stage": {"zero_optimization": {"overlap_comm": True}},
    "fp16 without a scale": {"fp16": True},
    "lora_r": {"adapter": "lora"},
    "lora_alpha": {"adapter": "lora"},
    "lora_dropout": {"adapter": "lora"},
    "lora_target_modules": {"adapter": "lora"},
    "rl_beta": {"rl": "dpo"},
    "simpo_gamma": {"rl": "simpo"},
    "cpo_alpha": {"rl": "simpo"},
    "fsdp_config.sharding_strategy": {"fsdp_config": {"offload_params": False}},
    "warmup_steps of lr_scheduler: constant": {"lr_scheduler": "constant", "warmup_ratio": 0.1},
    **{f"{key} of muon": {"optimizer": "muon"} for key in ("adam_beta1", "adam_beta2", "nesterov", "scale")},
    "momentum of sgd": {"optimizer": "sgd"},
    "gradient_clipping of a DeepSpeed file": {"deepspeed": "ds.json", "max_grad_norm": 0.3, **FILE},
    "bf16 of a DeepSpeed file": {"mixed_precision": "bf16", **FILE},
    "fp16 of a DeepSpeed file": {"mixed_precision": "fp16", **FILE},
    "loss scale of DeepSpeed": {"mixed_precision": "fp16", "distributed_type": "DEEPSPEED"},
    "loss scale of Megatron-LM": {"mixed_precision": "fp16", "distributed_type": "MEGATRON_LM"},
    "loss scale of FSDP": {"mixed_precision": "fp16", "distributed_type": "FSDP"},
    "deepspeed_config.zero_stage": {"distributed_type": "DEEPSPEED"},
    "fsdp_config.fsdp_sharding_strategy": {"distributed_type": "FSDP"},
    "deepspeed_config.gradient_clipping": {"distributed_type": "DEEPSPEED"},
    **{
        f"megatron_lm_config.megatron_lm_{key}": {"distributed_type": "MEGATRON_LM"}
        for key in ("gradient_clipping", "attention_dropout", "hidden_dropout", "use_distributed_optimizer")
    },
}
"""What makes an absent key mean something, where the smallest config does not."""


@pytest.mark.parametrize(("framework", "key", "field", "value"), ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_an_absent_key_is_written_as_what_it_means_there(
    framework: Framework, key: str, field: str, value: Any, tmp_path: Path
) -> None:
    smallest: dict[str, dict[str, Any]] = {
        "deepspeed": {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {}}},
        "axolotl": {"datasets": [{"path": "a.jsonl", "type": "chat_template"}], "learning_rate": 1e-3},
        "accelerate": {"num_machines": 1},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**smallest[framework], **AROUND.get(key, {})}))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    found = settings_of(import_config(framework, path))[field]
    assert type(found) is type(value)
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


def test_the_page_of_absent_keys_has_all_frameworks() -> None:
    counts = Counter(row[0] for row in ROWS)
    assert (counts["deepspeed"], counts["axolotl"], counts["accelerate"]) == (41, 33, 15)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("a.yml", "YAML", "from-axolotl"),
        ("b.yaml", "YAML", "from-accelerate"),
        ("ds.json", "JSON", "from-deepspeed"),
    ],
)
def test_a_config_of_another_framework_names_its_importer(name: str, kind: str, words: str, tmp_path: Path) -> None:
    texts = {"a.yml": AXOLOTL, "b.yaml": ACCELERATE, "ds.json": json.dumps(DEEPSPEED)}
    (tmp_path / name).write_text(texts[name])
    with pytest.raises(
        UserError, match=rf"is {kind}, and a config is TOML; write it as TOML with: megatronish {words} "
    ):
        read_config(["--config", str(tmp_path / name)])


def test_a_password_of_another_frameworks_file_is_not_written() -> None:
    board = {"enabled": True, "output_path": "s3://me:HUNTER2@b/x"}
    text = from_deepspeed({"train_micro_batch_size_per_gpu": 1, "tensorboard": board}).to_toml(Path("ds.json"))
    assert "HUNTER2" not in text and "tensorboard_dir = " not in text
    assert (
        "NOT AS THERE: tensorboard.output_path: it has a password, which no file of a run holds; give it as --" in text
    )
