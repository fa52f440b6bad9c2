"""Tests of the importers: configs of DeepSpeed and Axolotl become TOML that this project reads, and nothing is lost."""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chat_models import write_chat_model
from chat_tokenizers import said, write_lines
from paths import ROOT

from megatronish.commands.import_config import Framework, import_config
from megatronish.compat.importers.accelerate import from_accelerate
from megatronish.compat.importers.axolotl import RULES, from_axolotl
from megatronish.compat.importers.deepspeed import ACTIVATIONS, BF16, FP16, TOP, ZERO, from_deepspeed
from megatronish.compat.importers.deepspeed_optimizer import MUON, PARAMS
from megatronish.compat.importers.imported import Imported
from megatronish.config.fields import FIELDS
from megatronish.config.read import read_config
from megatronish.core.errors import UserError
from megatronish.formats.start import read_start
from megatronish.optim.schedules import build_learning_rate_schedule
from megatronish.report.first_lines import dry_run

MODEL = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--mock-data", "--vocab-size", "64"]


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/local/nvme", "buffer_count": 5},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "zero_quantized_gradients": True,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
    "wall_clock_breakdown": False,
    "tensorboard": {"enabled": True, "output_path": "boards"},
    "flops_profiler": {"enabled": True},
    "curriculum_learning": {"enabled": True},
    "made_up": 1,
}

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
sequence_len: 2048
sample_packing: true
adapter: lora
lora_r: 16
gradient_accumulation_steps: 2
micro_batch_size: 4
num_epochs: 1
max_steps: 500
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
eval_steps: 0.1
save_steps: 50
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
output_dir: ./outputs/out
wandb_project: mine
wandb_watch: all
deepspeed: zero2.json
odd_key: 3
"""


def settings_of(text: str) -> dict[str, Any]:
    """{field: value} of a TOML text."""
    return {name: value for section in tomllib.loads(text).values() for name, value in section.items()}


def test_a_ds_config_becomes_a_config_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    text = import_config("deepspeed", tmp_path / "ds_config.json")
    (tmp_path / "mine.toml").write_text(text)
    config = read_config(["--config", str(tmp_path / "mine.toml"), *MODEL, "--seq-length", "8"]).config
    training, optimizer, parallel = config.training, config.optimizer, config.parallel
    assert (training.global_batch_size, training.micro_batch_size, training.train_iters) == (64, 4, 1000)
    assert (optimizer.optimizer, optimizer.lr, optimizer.adam_beta2, optimizer.weight_decay) == (
        "adam",
        3e-4,
        0.95,
        0.1,
    )
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_iters) == ("cosine", 100)
    assert optimizer.min_lr == pytest.approx(3e-5)
    assert (training.bf16, training.fp16, optimizer.clip_grad, config.log.log_interval) == (True, False, 1.0, 10)
    assert (parallel.zero, parallel.optimizer_cpu_offload, parallel.param_cpu_offload) == (3, True, True)
    assert parallel.offload_folder == "/local/nvme"
    assert parallel.ddp_bucket_size == 500_000_000
    assert (config.recompute.recompute_granularity, config.recompute.offload_saved_activations) == ("full", True)
    assert config.log.tensorboard_dir == "boards"
    for line in (
        "#   made_up: it is not known here",
        "# NOT AS THERE: curriculum_learning: it is not there",
        "#   zero_optimization.stage3_max_live_parameters: it changes speed and memory alone",
        "#   zero_optimization.zero_quantized_gradients: rounding",
        "#   flops_profiler: throughput in TFLOP/s is always logged",
    ):
        assert line in text


def test_every_key_is_carried_over_or_listed() -> None:
    found = from_deepspeed(DEEPSPEED)
    told = " ".join(found.left_out | found.otherwise)
    understood = {"gradient_accumulation_steps", "bf16", "fp16", "optimizer", "scheduler", "zero_optimization"}
    understood |= {"activation_checkpointing", "tensorboard"}
    for key in DEEPSPEED:
        rule = TOP.get(key)
        assert (
            key in understood
            or key in told
            or DEEPSPEED[key] is False
            or (rule is not None and rule.field in found.settings)
        ), key


def test_neighbours_of_hpz_are_ours_under_stage_3() -> None:
    """One neighbour is none, which is DeepSpeed's default."""
    key = "zero_hpz_partition_size"

    def read(stage: int, value: Any) -> tuple[Any, str | None]:
        found = from_deepspeed({"zero_optimization": {"stage": stage, key: value}})
        return found.settings.get(key), found.left_out.get(f"zero_optimization.{key}")

    assert read(3, 8) == read(3, 8.0) == (8, None)
    assert read(3, 1) == (None, None)
    assert read(2, 8) == (None, "it is for stage 3")
    assert read(3, "auto")[0] is None and "give the value here" in (read(3, "auto")[1] or "")
    with pytest.raises(UserError, match=r"zero_hpz_partition_size=\[8\] must be a number"):
        read(3, [8])


def test_the_batch_follows_from_steps_of_accumulation_and_the_data_parallel_size() -> None:
    values = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    assert from_deepspeed(values, dp=2).settings["global_batch_size"] == 64
    assert "--dp" in from_deepspeed(values).left_out["gradient_accumulation_steps"]
    values = {"train_batch_size": 64, "gradient_accumulation_steps": 8}
    assert from_deepspeed(values, dp=2).settings["micro_batch_size"] == 4


@pytest.mark.parametrize("key", ["enabled", "deepcompile"])
def test_deepspeeds_compile_is_ours(key: str) -> None:
    found = from_deepspeed({"compile": {key: True, "backend": "inductor"}})
    assert found.settings["compile"] is True
    assert "compile.backend" in found.left_out
    assert "compile" not in from_deepspeed({"compile": {key: False}}).settings


def test_fp16_auto_and_other_schedules() -> None:
    warmup = {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-4, "warmup_num_steps": 5}
    values = {
        "train_batch_size": "auto",
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "adam_w_mode": False}},
        "scheduler": {
            "type": "WarmupLR",
            "params": warmup,
        },
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 4,
        "wandb": {"enabled": True, "project": "mine", "group": "g"},
    }
    found = from_deepspeed(values)
    assert found.settings == {
        **{"fp16": True, "hysteresis": 1, "initial_loss_scale": 4096.0, "optimizer": "adam", "lr": 1e-4},
        **{"loss_scale_window": 1000, "min_loss_scale": 1.0},
        **{"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8},
        **{"lr_decay_style": "constant", "lr_warmup_iters": 5, "lr_warmup_init": 1e-6, "clip_grad": 1.0},
        **{"lr_warmup_style": "log"},
        **{"tensor_model_parallel_size": 2, "context_parallel_size": 4, "cp_comm_type": "a2a", "zero_stage": 0},
        "wandb_project": "mine",
    }
    assert found.left_out["train_batch_size"].startswith("auto is filled in by the program")
    other = from_deepspeed({"optimizer": {"type": "OneBitLamb"}, "scheduler": {"type": "CosineLR", "params": {}}})
    assert other.otherwise["optimizer.type"].startswith("OneBitLamb is not there; this trains with adam")
    assert other.otherwise["scheduler"].startswith("CosineLR is none of DeepSpeed's (WarmupLR, WarmupDecayLR, ")
    assert other.otherwise["scheduler"].endswith("the learning rate stays constant")
    assert (other.settings["lr_decay_style"], other.settings["optimizer"]) == ("constant", "adam")
    assert "\n# NOT AS THERE: scheduler: CosineLR is none of" in other.to_toml(Path("ds.json"))
    linear = from_deepspeed({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}})
    assert linear.left_out["scheduler.params.total_num_steps"] == "give --train-iters"


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [
        *((kind, {}, 0.0) for kind in ("Adam", "AdamW", "FusedAdam", "CPUAdam", "SGD")),
        ("AdamW", {"weight_decay": 0.1}, 0.1),
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),
        ("AdamW", {"weight_decay": "auto"}, None),
    ],
)
def test_weight_decay_that_a_ds_config_does_not_name_is_deepspeeds(
    kind: str, params: dict[str, Any], decay: float | None
) -> None:
    found = from_deepspeed({"optimizer": {"type": kind, "params": params}})
    assert found.settings.get("weight_decay") == decay
    assert ("optimizer.params.weight_decay" in found.left_out) == (decay is None)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_auto_in_a_scheduler_is_listed_with_the_flag_to_give(kind: str) -> None:
    flags = {
        "warmup_num_steps": "--lr-warmup-iters",
        "warmup_max_lr": "--lr",
        "warmup_min_lr": "--lr-warmup-init",
        "total_num_steps": "--lr-decay-iters",
    }
    found = from_deepspeed({"scheduler": {"type": kind, "params": dict.fromkeys(flags, "auto")}})
    for key, flag in flags.items():
        assert found.left_out[f"scheduler.params.{key}"].endswith(f"give the value here, as {flag}")


def test_a_scheduler_that_names_no_warmup_has_deepspeeds_defaults() -> None:
    adam = {"type": "AdamW", "params": {"lr": 2e-5}}
    linear = {"warmup_type": "linear"}
    bare = from_deepspeed({"optimizer": adam, "scheduler": {"type": "WarmupDecayLR", "params": linear}})
    assert (bare.settings["lr_warmup_iters"], bare.settings["lr"]) == (1000, 0.001)
    assert bare.otherwise["optimizer.params.lr"] == (
        "the scheduler replaces it by its warmup_max_lr, by default 0.001; name it"
    )
    kept = from_deepspeed({"optimizer": adam, "scheduler": {"type": "WarmupLR", "params": linear}})
    assert kept.settings["lr"] == 2e-5
    assert "and 0.001 before: for that add --lr 0.001" in kept.otherwise["scheduler.params.warmup_max_lr"]
    none = from_deepspeed({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 0}}})
    assert none.settings["lr_warmup_iters"] == 2  # DeepSpeed's least; newer versions refuse 0
    cosine = from_deepspeed({"optimizer": adam, "scheduler": {"type": "WarmupCosineLR", "params": {}}})
    assert (cosine.settings["lr_warmup_iters"], cosine.settings["lr"]) == (1000, 2e-5)
    assert cosine.settings["min_lr"] == 2e-9


CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}


def test_a_one_cycle_says_what_differs_and_what_is_needed() -> None:
    def cycled(kind: str = "Adam", **params: Any) -> Imported:
        scheduler = {"type": "OneCycle", "params": params}
        return from_deepspeed({"optimizer": {"type": kind, "params": {"lr": 1.0}}, "scheduler": scheduler})

    found = cycled(**CYCLE)
    assert {"lr": 1e-2, "lr_warmup_init": 1e-4, "min_lr": 1e-4, "adam_beta2": 0.99}.items() <= found.settings.items()
    assert found.otherwise["scheduler.params.cycle_momentum"].startswith("the momentum of the very first step is")
    for still in (cycled(**CYCLE, cycle_momentum=False), cycled("SGD", **CYCLE), cycled("Muon", **CYCLE)):
        assert "cycle_min_momentum" not in still.settings
        assert "scheduler.params.cycle_momentum" not in still.otherwise
    assert "without betas" in cycled("SGD", **CYCLE).left_out["scheduler.params.cycle_momentum"]
    auto = cycled(cycle_min_lr="auto", cycle_max_lr=0.1, cycle_first_step_size="auto")
    assert auto.left_out["scheduler.params.cycle_min_lr"].endswith("as --lr-warmup-init and --min-lr")
    assert not {"min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_decay_iters"} & auto.settings.keys()
    with pytest.raises(UserError, match=r"^scheduler.params.cycle_max_lr is not given, and OneCycle has no default"):
        cycled(cycle_min_lr=1e-4)
    with pytest.raises(UserError, match=r"cycle_first_step_size=2.5 must be a whole number"):
        cycled(**CYCLE, cycle_first_step_size=2.5)


def test_a_decay_whose_lengths_are_filled_in_later_is_said_to_be_a_step_early() -> None:
    for params in ({"total_num_steps": "auto"}, {"total_num_steps": 50, "warmup_num_steps": "auto"}):
        found = from_deepspeed({"scheduler": {"type": "WarmupDecayLR", "params": params}})
        assert found.settings["lr_decay_style"] == "linear"
        assert found.otherwise["scheduler.type"] == (
            "the decay of WarmupDecayLR is one step later there, which needs its lengths"
        )
    odd = from_deepspeed({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}})
    assert odd.settings["lr_warmup_style"] == "log"
    assert odd.left_out["scheduler.params.warmup_type"] == "cubic is none of DeepSpeed's, which takes log"


def muon(params: dict[str, Any], **rest: Any) -> Imported:
    return from_deepspeed({"optimizer": {"type": "Muon", "params": params}, "gradient_clipping": 1, **rest})


def test_parameters_of_deepspeeds_muon_reach_muon() -> None:
    found = muon({"lr": 0.01, "momentum": 0.9, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1})
    wanted = {"lr": 0.01, "muon_momentum": 0.9, "adam_beta1": 0.8, "adam_eps": 1e-6, "muon_extra_scale_factor": 1.0}
    assert wanted.items() <= found.settings.items() and "sgd_momentum" not in found.settings and not found.otherwise
    told = muon({"ns_method": "standard", "nesterov": True, "per_head_muon": True})
    assert "compute the same" in told.left_out["optimizer.params.ns_method"]
    assert told.left_out["optimizer.params.nesterov"] == "DeepSpeed's Muon does not read it"
    assert told.otherwise == {"optimizer.params.per_head_muon": "true is not there"}


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({}, (3e-4, 0.02)),
        ({"lr": 1e-3}, (1e-3, 1e-3)),
        ({"muon_lr": 0.05}, (3e-4, 0.05)),
        ({"lr": 1e-3, "adam_lr": 1e-4}, (1e-4, 1e-3)),
        ({"muon_lr": 0.05, "adam_lr": 1e-4, "lr": "auto"}, (1e-4, 0.05)),
    ],
)
def test_the_two_rates_of_deepspeeds_muon_are_a_rate_and_a_factor(
    params: dict[str, Any], rates: tuple[float, float]
) -> None:
    found = muon(params)
    adam, matrices = found.settings["lr"], found.settings["lr"] * found.settings["muon_extra_scale_factor"]
    assert (adam, matrices) == pytest.approx(rates) and not found.otherwise
    decayed = muon({**params, "weight_decay": 0.1})
    assert ("optimizer.params.weight_decay" in decayed.otherwise) == (rates[0] != rates[1])
    # A scheduler that names a rate gives it to all parameters.
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.3, "warmup_type": "linear"}}
    scheduled = muon(params, scheduler=warmup).settings
    assert (scheduled["lr"], scheduled["muon_extra_scale_factor"]) == (0.3, 1.0)


def test_rates_of_muon_that_are_none_are_told() -> None:
    auto = muon({"lr": "auto", "muon_lr": 0.02, "momentum": "auto"})
    assert "lr" not in auto.settings and "--muon-extra-scale-factor" in auto.left_out["optimizer.params.lr"]
    assert "muon_momentum" not in auto.settings and "optimizer.params.momentum" in auto.left_out
    with pytest.raises(UserError, match="muon_lr=0 and adam_lr=0 must be greater than 0; correct the file"):
        muon({"lr": 0})


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"dampening": 0.1}, "0.1 is not there"),
        ({"nesterov": True}, "true is not there"),
        ({"amsgrad": False, "bias_correction": True, "foreach": True, "dampening": 0}, None),
        ({"bias_correction": False}, "false is not there"),
        ({"max_grad_norm": 1.0}, "1.0 is not known here"),
    ],
)
def test_parameters_that_change_what_is_trained_are_warnings(params: dict[str, Any], told: str | None) -> None:
    found = from_deepspeed({"optimizer": {"type": "SGD", "params": params}, "gradient_clipping": 1})
    assert list(found.otherwise.values()) == ([told] if told else [])


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"bf16": True}),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, {"fp16": True, "hysteresis": 1}),
        ({"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, {"bf16": False}),
        ({"bfloat16": {"enabled": True}}, {"bf16": True}),
        ({"bfloat16": {"enabled": True}, "bf16": {}}, {"bf16": False}),
    ],
)
def test_precisions_of_deepspeed_are_ours(values: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings.items() <= from_deepspeed(values).settings.items()


def test_gradients_that_are_summed_are_a_warning() -> None:
    assert "gradient_allreduce_op" in from_deepspeed({"gradient_allreduce_op": "SUM"}).otherwise
    assert "gradient_allreduce_op" not in from_deepspeed({"gradient_allreduce_op": "mean"}).otherwise


def test_batch_sizes_that_contradict_each_other_are_refused() -> None:
    sizes = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    rule = "train_batch_size=10 must be a multiple of train_micro_batch_size_per_gpu=4 times "
    with pytest.raises(UserError, match=f"{rule}gradient_accumulation_steps=2, 8; correct the file, or remove one"):
        from_deepspeed(sizes)
    assert from_deepspeed({**sizes, "train_batch_size": 16}).settings["global_batch_size"] == 16


def test_rules_name_fields() -> None:
    for rules in (TOP, PARAMS, MUON, BF16, FP16, ZERO, ACTIVATIONS, RULES):
        for key, rule in rules.items():
            assert rule.field in FIELDS or (rule.field is None and rule.reason), key


def test_a_config_of_axolotl_becomes_a_config_that_is_read(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "config.yml").write_text(AXOLOTL)
    (tmp_path / "chats.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (tmp_path / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}}))
    text = import_config("axolotl", tmp_path / "config.yml", dp=2)
    (tmp_path / "mine.toml").write_text(text)
    write_chat_model(tmp_path / "base")
    base = ["--data-path", str(tmp_path / "chats.jsonl"), "--load-hf", str(tmp_path / "base")]
    config = read_config(["--config", str(tmp_path / "mine.toml"), *base, "--dp", "2"], read_start=read_start).config
    training, optimizer = config.training, config.optimizer
    assert (training.seq_length, training.micro_batch_size, training.global_batch_size) == (2048, 4, 16)
    assert (training.train_iters, training.bf16, training.eval_interval) == (500, True, 50)
    assert (optimizer.lr, optimizer.lr_warmup_fraction, optimizer.weight_decay) == (2e-4, 0.1, 0.0)
    assert (optimizer.lr_decay_style, optimizer.clip_grad, training.seed) == ("cosine", 1.0, 42)
    assert (config.data.split, config.data.dataset_type) == ("0.9,0.1,0", "chat")
    assert (config.chat.chat_format, config.chat.chat_template) == ("alpaca", "alpaca")
    assert (config.chat.train_on, config.chat.pack_samples) == ("assistant", True)
    assert (config.parallel.zero, config.recompute.recompute_granularity) == (2, "full")
    assert config.log.wandb_project == "mine"
    assert (config.log.run_dir, config.checkpoint.save_interval) == ("./outputs/out", 50)
    for line in (
        "#   base_model: NousResearch/Llama-3.2-1B is not a folder here, so a run downloads it from Hugging Face's hub",
        "#   datasets[0].path: teknium/GPT4-LLM-Cleaned is not a file here, so a run downloads its JSON lines from",
        "#   optimizer: adamw_8bit: optimizer states are in fp32",
        "#   num_epochs: max_steps, which is given, counts",
        "#   flash_attention: which kernels are used is decided at run time",
        "#   odd_key: it is not known here",
        "#   wandb_watch: W&B reads its other settings from its environment",
    ):
        assert line in text


def test_lora_of_axolotl_becomes_adapters_of_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    values = {"base_model": "model", "adapter": "lora", "lora_r": 8, "lora_alpha": "16", "lora_dropout": 0.05}
    more = {"lora_target_modules": ["q_proj", "v_proj"], "peft_use_rslora": True}
    found = from_axolotl({**values, **more}, folder=tmp_path)
    assert {name: found.settings[name] for name in ("adapter_type", "lora_rank", "lora_alpha", "lora_dropout")} == {
        **{"adapter_type": "lora", "lora_rank": 8, "lora_alpha": 16.0, "lora_dropout": 0.05}
    }
    assert (found.settings["adapter_targets"], found.settings["use_rslora"]) == (("q_proj", "v_proj"), True)
    quantised = from_axolotl({**values, "adapter": "qlora", "lora_target_linear": True}, folder=tmp_path)
    assert "adapter_targets" not in quantised.settings and quantised.settings["quantize_base"] == "nf4"
    options = {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "fp4"}
    once = from_axolotl({**values, "load_in_4bit": True, "bnb_config_kwargs": options}, folder=tmp_path)
    assert once.settings["quantize_base"] == "nf4" and once.settings["double_quantization"] is False
    assert "fp4: the base is quantised to NF4" in once.left_out["bnb_config_kwargs.bnb_4bit_quant_type"]


def test_preferences_of_axolotl_become_an_objective() -> None:
    values = {"rl": "dpo", "dpo_beta": 0.3, "dpo_loss_type": ["robust"], "dpo_label_smoothing": 0.1, "simpo_gamma": 1}
    found = from_axolotl({**values, "precompute_ref_log_probs": True}, folder=Path())
    wanted = {"objective": "dpo", "dataset_type": "chat", "beta": 0.3, "dpo_loss_type": "robust", "reference": "stored"}
    assert wanted.items() <= found.settings.items() and found.settings["label_smoothing"] == 0.1
    assert "simpo_gamma" in found.left_out
    kto = from_axolotl({"rl": "kto", "rl_beta": "2e-1", "kto_undesirable_weight": 0.2}, folder=Path()).settings
    assert (kto["objective"], kto["beta"], kto["undesirable_weight"]) == ("kto", 0.2, 0.2)
    simpo = from_axolotl({"rl": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.1}, folder=Path()).settings
    assert (simpo["simpo_gamma"], simpo["cpo_alpha"]) == (0.7, 0.1)
    assert from_axolotl({"rl": "orpo", "orpo_alpha": 0.2}, folder=Path()).settings["beta"] == 0.2
    assert from_axolotl({"rl": "kto", "rl_beta": 0.3, "trl": {"beta": 0.2}}, folder=Path()).settings["beta"] == 0.2
    assert from_axolotl({"rl": "simpo"}, folder=Path()).settings["cpo_alpha"] == 1.0
    assert "grpo is not there" in from_axolotl({"rl": "grpo"}, folder=Path()).otherwise["rl"]


def test_axolotl_with_fsdp_a_local_model_and_without_a_data_parallel_size(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    values = {
        **{"base_model": "model", "micro_batch_size": 2, "gradient_accumulation_steps": 4, "fp16": True},
        **{
            "optimizer": "lion_pytorch",
            "lr_scheduler": "rex",
            "eval_steps": 0.1,
            "warmup_steps": 3,
            "warmup_ratio": 0.1,
        },
        **{"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}, "load_in_4bit": True},
        **{"gradient_checkpointing": "offload", "learning_rate": "1e-5", "cosine_min_lr_ratio": 0.1},
    }
    found = from_axolotl(values, folder=tmp_path)
    assert found.settings["load_hf"] == str(tmp_path / "model")
    assert (found.settings["zero_stage"], found.settings["param_cpu_offload"], found.settings["fp16"]) == (
        3,
        True,
        True,
    )
    assert found.settings["min_lr"] == 0.0  # of no cosine
    assert "lr_warmup_fraction" not in found.settings
    assert found.settings["offload_saved_activations"]
    assert {"gradient_accumulation_steps", "eval_steps"} <= found.left_out.keys()
    assert {"optimizer", "lr_scheduler", "load_in_4bit"} <= found.otherwise.keys()
    assert (found.settings["optimizer"], found.settings["lr_decay_style"]) == ("adam", "constant")
    assert (
        "cannot be read; name its stage"
        in from_axolotl({"deepspeed": "no.json"}, folder=tmp_path).left_out["deepspeed"]
    )


@pytest.mark.parametrize(
    ("values", "trained"),
    [
        ({"fp16": True}, "fp16"),
        ({"fp16": True, "bf16": "auto"}, "fp16"),
        ({"fp16": True, "bf16": True}, "bf16"),
        ({"bf16": False}, "fp32"),
        ({"bf16": False, "bfloat16": True}, "bf16"),
        ({"bf16": "full"}, "bf16"),
        ({"float32": True}, "bf16"),
        ({"float32": True, "bf16": False}, "fp32"),
    ],
)
def test_precision_of_axolotl(values: dict[str, Any], trained: str, tmp_path: Path) -> None:
    found = from_axolotl(values, folder=tmp_path).settings
    assert ([key for key in ("bf16", "fp16") if found.get(key)] or ["fp32"]) == [trained]


def test_schedules_of_axolotl_end_where_they_do_there(tmp_path: Path) -> None:
    cosine = {"learning_rate": 1e-3, "lr_scheduler": "cosine_with_min_lr"}
    for options, least in (({"min_lr_rate": 0.1}, 1e-4), ({"min_lr": 1e-5}, 1e-5), ({}, 0.0)):
        found = from_axolotl({**cosine, "lr_scheduler_kwargs": options}, folder=tmp_path)
        assert found.settings["min_lr"] == pytest.approx(least) and not found.otherwise
    other = from_axolotl({"lr_scheduler_kwargs": {"num_cycles": 2}}, folder=tmp_path)
    assert "lr_scheduler_kwargs.num_cycles" in other.otherwise
    constant = from_axolotl({"lr_scheduler": "constant", "warmup_steps": 9}, folder=tmp_path)
    assert constant.settings["lr_warmup_iters"] == 0 and "no warm-up there" in constant.left_out["warmup_steps"]
    warmed = from_axolotl({"lr_scheduler": "constant_with_warmup", "warmup_steps": 9}, folder=tmp_path)
    assert warmed.settings["lr_warmup_iters"] == 9


def test_the_muon_of_axolotl_depends_on_the_number_of_processes(tmp_path: Path) -> None:
    one = from_axolotl({"optimizer": "muon", "adam_beta2": 0.8}, folder=tmp_path)
    wanted = {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2, "adam_beta1": 0.95, "adam_beta2": 0.95}
    assert wanted.items() <= one.settings.items() and "--dp N" in one.left_out["optimizer"]
    assert "norms and biases learn" in one.otherwise["optimizer"] and "adam_beta2" in one.left_out
    both = {"optimizer": "muon", "adam_beta1": 0.7, "adam_beta2": 0.8, "weight_decay": 0.1}
    several = from_axolotl(both, folder=tmp_path, dp=2)
    wanted = {"muon_scale_mode": "unit_rms_norm", "muon_nesterov": False, "adam_beta1": 0.7, "adam_beta2": 0.8}
    assert wanted.items() <= several.settings.items() and list(several.otherwise) == ["weight_decay"]


def test_what_a_deepspeed_file_decides_in_axolotl_is_said(tmp_path: Path) -> None:
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    file: dict[str, Any] = {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": adam}}
    values = {"deepspeed": "ds.json", "max_grad_norm": 0.3}
    (tmp_path / "ds.json").write_text(json.dumps(file))
    found = from_axolotl(values, folder=tmp_path)
    assert found.settings["clip_grad"] == 0.3 and not found.otherwise
    del file["gradient_clipping"], adam["eps"]
    (tmp_path / "ds.json").write_text(json.dumps({**file, "scheduler": {"type": "WarmupDecayLR"}}))
    told = from_axolotl(values, folder=tmp_path)
    assert told.settings["clip_grad"] == 1.0
    assert list(told.otherwise) == ["ds.json: gradient_clipping", "ds.json: optimizer", "ds.json: scheduler"]


def test_chats_that_are_too_long_are_left_out_in_axolotl_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("{}")
    values = {"datasets": [{"path": "chats.jsonl", "type": "chat_template"}]}
    assert "is cut" in from_axolotl(values, folder=tmp_path).left_out["excess_length_strategy"]
    same = from_axolotl({**values, "excess_length_strategy": "truncate"}, folder=tmp_path)
    assert "excess_length_strategy" not in same.left_out


def test_paths_that_are_neither_here_nor_on_a_hub_are_listed(tmp_path: Path) -> None:
    sets = [{"path": "org/chats", "type": "chat_template"}, {"path": "data/gone.jsonl", "type": "chat_template"}]
    found = from_axolotl({"base_model": "gone", "datasets": sets}, folder=tmp_path)
    assert found.settings["data_path"] == ("org/chats",)
    assert "a run downloads" in found.left_out["datasets[0].path"]
    assert "no name of a hub" in found.left_out["datasets[1].path"] and "no name" in found.left_out["base_model"]


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"fsdp": ["shard_grad_op", "offload"]}, {"zero_stage": 2, "optimizer_cpu_offload": True}),
        ({"fsdp": ["no_shard"]}, {"zero_stage": 0}),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, {"zero_stage": 2}),
        ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}}, {"zero_stage": 2}),
        (
            {"fsdp_config": {"reshard_after_forward": True, "activation_checkpointing": True, "offload_params": True}},
            {"zero_stage": 3, "param_cpu_offload": True, "recompute_granularity": "full"},
        ),
    ],
)
def test_the_strategy_of_fsdp_is_a_stage_of_zero(
    tmp_path: Path, values: dict[str, Any], settings: dict[str, Any]
) -> None:
    found = from_axolotl(values, folder=tmp_path).settings
    names = ("zero_stage", "param_cpu_offload", "optimizer_cpu_offload", "recompute_granularity")
    assert {name: found[name] for name in names if name in found} == settings


def test_every_setting_of_fsdp_is_carried_over_or_listed(tmp_path: Path) -> None:
    config = {"fsdp_sharding_strategy": "HYBRID_SHARD", "state_dict_type": "FULL_STATE_DICT", "auto_wrap_policy": "X"}
    found = from_axolotl({"fsdp_config": config}, folder=tmp_path)
    assert "--dp-replicate" in found.left_out["fsdp_config.sharding_strategy"]
    assert found.left_out["fsdp_config.state_dict_type"] == "every checkpoint loads in every layout"
    assert "fsdp_config.auto_wrap_policy" in found.left_out


def test_axolotl_lists_templates_answers_checkpoints_and_plugins(tmp_path: Path) -> None:
    values = {
        "train_on_inputs": False,
        "datasets": [
            {"path": "b", "type": "completion"},
            {"path": "c"},
            {"path": "d", "type": {"format": "{instruction}"}},
        ],
        "sample_packing": True,
        "pretraining_dataset": {"path": "e", "type": "pretrain"},
        "resume_from_checkpoint": "outputs/checkpoint-5",
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    }
    found = from_axolotl(values, folder=tmp_path)
    assert "--dataset-type chat counts answers only" in found.left_out["train_on_inputs"]
    assert found.otherwise["datasets[2].type"].startswith("written in the file: a prompt template is not applied")
    for key in ("datasets[0].type", "datasets[1].type", "pretraining_dataset[0].type"):
        assert key not in found.left_out
    assert found.settings["reset_attention_mask"] and "dataset_type" not in found.settings
    assert "load" not in found.settings
    assert "megatronish convert --from hf" in found.left_out["resume_from_checkpoint"]
    assert "given with --plugin" in found.left_out["plugins"]


def chat_settings(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the importer says of chats."""
    found = from_axolotl(values, folder=folder).settings
    names = ("dataset_type", "data_path", "chat_template", "chat_format", "train_on", "pack_samples", "seq_length")
    return {name: found[name] for name in names if name in found}


def test_keys_without_which_another_model_is_trained_are_warnings(tmp_path: Path) -> None:
    asked = {"neftune_noise_alpha": 5, "early_stopping_patience": 3, "load_in_8bit": True, "lora_fan_in_fan_out": True}
    usual = {"roles_to_train": ["assistant"], "train_on_eos": "turn", "optim_args": None, "debug": True}
    found = from_axolotl(asked | usual, folder=tmp_path)
    assert found.otherwise.keys() >= asked.keys()
    assert not found.otherwise.keys() & usual.keys() and "debug" in found.left_out
    alpaca = from_axolotl({"datasets": [{"path": "a/b", "type": "alpaca"}]}, folder=tmp_path)
    assert alpaca.otherwise["datasets.type"].startswith("the opening sentence of alpaca is not added")


def test_chats_of_axolotl_become_flags_of_chat_data(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("{}")
    path = str(tmp_path / "chats.jsonl")
    sets = [{"path": "chats.jsonl", "type": "chat_template"}]
    values = {"datasets": sets, "sequence_len": 2048, "sample_packing": True, "chat_template": "phi_3"}
    expected = {"dataset_type": "chat", "data_path": (path,), "train_on": "assistant", "pack_samples": True}
    assert chat_settings(values, tmp_path) == {**expected, "chat_template": "phi3", "seq_length": 2048}
    own = {"datasets": sets, "chat_template": "tokenizer_default", "train_on_inputs": True}
    assert chat_settings(own, tmp_path) == {**expected, "train_on": "all", "pack_samples": False, "seq_length": 512}
    file = {"datasets": [{"path": "json", "data_files": "chats.jsonl", "type": "sharegpt"}]}
    jinja = {"chat_template": "jinja", "chat_template_jinja": "mine.jinja"}
    shown = chat_settings({**file, **jinja}, tmp_path)
    assert (shown["chat_format"], shown["chat_template"], shown["data_path"]) == ("sharegpt", "mine.jinja", (path,))
    other = from_axolotl({"datasets": sets, "chat_template": "exaone", "roles_to_train": ["human"]}, folder=tmp_path)
    assert other.otherwise["chat_template"].startswith("exaone is not there; the model's own is used")
    assert "datasets" not in other.left_out and "roles_to_train" in other.otherwise


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


ABSENT = re.compile(r"\| (\w+) \| `(.+?)` \| .+? \| `(\w+) = (.+?)` \| .+? \|")
ROWS = [
    (framework.lower(), key, field, tomllib.loads(f"a = {value}")["a"])
    for framework, key, field, value in ABSENT.findall((ROOT / "docs" / "COMING_FROM.md").read_text())
]
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


def test_a_learning_rate_without_a_scheduler_is_the_same_in_every_step(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}))
    (tmp_path / "a.toml").write_text(import_config("deepspeed", path, dp=1))
    config = read_config(["--config", f"{tmp_path}/a.toml", *MODEL, "--seq-length", "8", "--train-iters", "3"]).config
    schedule = build_learning_rate_schedule(config.optimizer, config.training, global_batch_size=4)
    assert [schedule.learning_rate(samples) for samples in (0, 4, 8)] == [1e-3] * 3


ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
rdzv_backend: static
same_network: true
use_cpu: false
"""


def test_a_config_of_accelerate_becomes_a_layout(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text(ACCELERATE)
    text = import_config("accelerate", tmp_path / "a.yaml")
    (tmp_path / "a.toml").write_text(text)
    own = ["--micro-batch-size", "1", "--seq-length", "8", "--lr", "1e-3", "--train-iters", "3"]
    config = read_config(["--config", f"{tmp_path}/a.toml", *MODEL, *own]).config
    parallel = config.parallel
    assert (parallel.zero, parallel.param_cpu_offload, config.layout.tp, config.layout.dp) == (3, True, 2, 4)
    assert (config.training.bf16, config.recompute.recompute_granularity) == (True, "full")
    for key in (
        "rdzv_backend",
        "fsdp_config.auto_wrap_policy",
        "fsdp_config.state_dict_type",
        "optimizer, learning rate",
    ):
        assert f"#   {key}" in text


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
            {"zero_stage": 3, "param_cpu_offload": True},
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
            {"zero_stage": 1, "clip_grad": 0.5},
        ),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_clipping": "0.3"}}, {"clip_grad": 0.3}),
        ({"mixed_precision": False, "num_processes": "4"}, {"bf16": False, "data_parallel_size": 4}),
        ({"mixed_precision": "fp16"}, {"fp16": True, "loss_scale_window": 2000, "hysteresis": 1}),
        ({"distributed_type": "MULTI_CPU", "num_processes": 2}, {"device": "cpu", "data_parallel_size": 2}),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"compile": True}),
        (
            {
                **{"distributed_type": "MEGATRON_LM", "num_processes": 8},
                "megatron_lm_config": {"megatron_lm_tp_degree": "2", "megatron_lm_pp_degree": 2},
            },
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "data_parallel_size": 2},
        ),
    ],
)
def test_kinds_of_accelerate_are_ours(values: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}')
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert settings.items() <= settings_of(import_config("accelerate", tmp_path / "a.json")).items()


def accelerated(folder: Path, file: dict[str, Any] | None, *, keys: Any = None, **values: Any) -> Imported:
    """What the importer makes of Accelerate's config with DeepSpeed, and with this DeepSpeed file."""
    config = dict(keys or {})
    if file is not None:
        (folder / "ds.json").write_text(json.dumps(file))
        config["deepspeed_config_file"] = "ds.json"
    return from_accelerate({"distributed_type": "DEEPSPEED", "deepspeed_config": config, **values}, folder=folder)


ON, OFF, BY_PROGRAM = {"enabled": True}, {"enabled": False}, {"enabled": "auto"}


@pytest.mark.parametrize(
    ("precision", "sections", "trained"),
    [
        ("bf16", {}, "bf16"),
        ("bf16", {"fp16": OFF}, "bf16"),
        ("bf16", {"bf16": BY_PROGRAM, "fp16": BY_PROGRAM}, "bf16"),
        ("bf16", {"bf16": OFF}, "fp32"),
        ("bf16", {"bf16": {}}, "fp32"),
        ("bf16", {"fp16": ON}, None),
        ("fp16", {}, "fp16"),
        ("fp16", {"fp16": BY_PROGRAM, "bf16": BY_PROGRAM}, "fp16"),
        ("fp16", {"fp16": OFF}, "fp32"),
        ("fp16", {"bf16": ON}, None),
        ("no", {}, "fp32"),
        ("no", {"bf16": BY_PROGRAM, "fp16": BY_PROGRAM}, "fp32"),
        ("no", {"bf16": ON}, "bf16"),
        ("no", {"fp16": ON}, "fp16"),
        ("no", {"bfloat16": ON}, "fp32"),
    ],
)
def test_accelerate_completes_the_precision_of_a_deepspeed_file(
    precision: str, sections: dict[str, Any], trained: str | None, tmp_path: Path
) -> None:
    file = {"zero_optimization": {"stage": 2}, **sections}
    if trained is None:
        with pytest.raises(UserError, match=rf"mixed_precision={precision} and \w+ of ds.json contradict each other"):
            accelerated(tmp_path, file, mixed_precision=precision)
        return
    found = accelerated(tmp_path, file, mixed_precision=precision)
    kinds = [key for key in ("bf16", "fp16") if found.settings.get(key)] or ["fp32"]
    assert kinds == [trained]
    if trained == "fp16":
        scale = {"initial_loss_scale": 65536.0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1.0}
        assert scale.items() <= found.settings.items()
    if precision != "no":
        assert ("is off, and counts" in found.left_out["mixed_precision"]) == (trained == "fp32")


def test_accelerate_fills_what_a_deepspeed_file_leaves_to_it(tmp_path: Path) -> None:
    zero = {"stage": "auto", "offload_optimizer": {"device": "auto"}}
    file: dict[str, Any] = {
        **{"zero_optimization": zero, "gradient_clipping": "auto", "tensor_parallel": {"autotp_size": 2}},
        **{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "train_batch_size": "auto"},
    }
    found = accelerated(tmp_path, file, num_processes=8)
    assert {"zero_stage": 2, "clip_grad": 1.0, "data_parallel_size": 4}.items() <= found.settings.items()
    assert (
        "optimizer_cpu_offload" not in found.settings
        and "max_grad_norm" in found.left_out["ds.json: gradient_clipping"]
    )
    # The program has a schedule where the file has none, so nothing is said of it.
    assert not {"lr_decay_style", "lr_warmup_iters", "lr"} & found.settings.keys()
    del file["train_batch_size"]
    assert accelerated(tmp_path, file, num_processes=8).settings["global_batch_size"] == 4 * 3 * 4
    scheduled = accelerated(tmp_path, {**file, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}}})
    assert scheduled.settings["lr_warmup_init"] == 0.0


def test_keys_of_accelerates_yaml_beside_a_deepspeed_file_are_listed(tmp_path: Path) -> None:
    keys = {"zero_stage": 3, "gradient_clipping": 0.3, "offload_param_device": "cpu", "zero3_init_flag": True}
    found = accelerated(tmp_path, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}, keys=keys)
    assert {"zero_stage": 1, "clip_grad": 0.5}.items() <= found.settings.items()
    assert "param_cpu_offload" not in found.settings
    for key in ("zero_stage", "gradient_clipping", "offload_param_device"):
        assert found.left_out[f"deepspeed_config.{key}"].startswith("ds.json counts")
    assert "refuses a file without it" in accelerated(tmp_path, {}).left_out["ds.json: zero_optimization"]


@pytest.mark.parametrize(("clip", "is_said"), [(None, False), ("auto", False), (0, True), ("0.0", True)])
def test_clipping_that_accelerate_does_not_hand_on_is_deepspeeds(tmp_path: Path, clip: Any, is_said: bool) -> None:
    found = accelerated(tmp_path, None, keys={"gradient_clipping": clip})
    assert found.settings["clip_grad"] == 1.0
    assert ("deepspeed_config.gradient_clipping" in found.otherwise) == is_said


def test_older_and_quoted_keys_of_accelerate_are_read(tmp_path: Path) -> None:
    older = from_accelerate({"fp16": True, "dynamo_backend": "INDUCTOR"}, folder=tmp_path).settings
    assert (older["fp16"], older["compile"], older["loss_scale_window"]) == (True, True, 2000)
    megatron = {"tp_degree": "2", "use_distributed_optimizer": "true", "attention_dropout": "0.2", "hidden_dropout": 0}
    found = from_accelerate(
        {
            **{"distributed_type": "MEGATRON_LM", "num_processes": 4},
            "megatron_lm_config": {f"megatron_lm_{key}": value for key, value in megatron.items()},
        },
        folder=tmp_path,
    )
    wanted = {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True, "attention_dropout": 0.2}
    assert wanted.items() <= found.settings.items() and not found.otherwise
    assert "--cp 2" in found.left_out["megatron_lm_config.megatron_lm_context_parallel_size"]


def test_ranks_of_accelerate_that_the_file_does_not_name(tmp_path: Path) -> None:
    found = from_accelerate({"distributed_type": "FSDP"}, folder=tmp_path)
    assert "data_parallel_size" not in found.settings and "add --dp" in found.left_out["num_processes"]
    cut = {"parallelism_config_cp_size": 4, "parallelism_config_sp_size": 1}
    sizes = from_accelerate({"num_processes": 8, "parallelism_config": cut}, folder=tmp_path).settings
    assert (sizes["context_parallel_size"], sizes["data_parallel_size"]) == (4, 2)
    ulysses = from_accelerate({"num_processes": 8, "parallelism_config": {"sp_size": 2, "cp_size": 1}}, folder=tmp_path)
    assert (ulysses.settings["context_parallel_size"], ulysses.settings["cp_comm_type"]) == (2, "a2a")


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


CHATS = [{"path": "chats.jsonl", "type": "chat_template"}]
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"datasets": CHATS, "num_epochs": 3, "sample_packing": True, "warmup_ratio": 0.1, "evals_per_epoch": 4},
    "qwen3": {"datasets": CHATS, "chat_template": "qwen3", "val_set_size": 0.1},
    "qwen_25": {"datasets": CHATS, "chat_template": "qwen_25", "gradient_accumulation_steps": 4},
    "alpaca": {"datasets": [{"path": "alpaca.jsonl", "type": "alpaca"}], "num_epochs": 1},
    "lora": {"datasets": CHATS, "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True},
    "qlora": {"datasets": CHATS, "adapter": "qlora", "load_in_4bit": True, "lora_r": 4, "optimizer": "adamw_bnb_8bit"},
    "dpo": {"datasets": [{"path": "pairs.jsonl", "type": "chatml.prompt_pairs"}], "rl": "dpo", "adapter": "lora"},
    "kto": {"datasets": [{"path": "labels.jsonl", "type": "chatml.argilla"}], "rl": "kto", "adapter": "lora"},
    "orpo": {"datasets": [{"path": "pairs.jsonl", "type": "chat_template.argilla"}], "rl": "orpo", "num_epochs": 4},
    "simpo": {"datasets": [{"path": "pairs.jsonl"}], "rl": "simpo"},
    "ipo": {
        "datasets": [{"path": "pairs.jsonl"}],
        "rl": "ipo",
        "adapter": "lora",
        "test_datasets": [{"path": "pairs.jsonl"}],
    },
    "pretraining": {"pretraining_dataset": [{"path": "text.jsonl", "type": "pretrain"}], "max_steps": 20},
    "completion": {"datasets": [{"path": "json", "data_files": ["text.jsonl"], "type": "completion"}]},
    "fsdp": {"datasets": CHATS, "fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_axolotl_with_its_files_runs_dry_as_it_is_imported(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml")
    write_chat_model(tmp_path / "model")
    write_lines(tmp_path / "chats.jsonl", [said("a", "b")] * 8)
    write_lines(tmp_path / "alpaca.jsonl", [{"instruction": "a", "output": "b"}] * 8)
    write_lines(tmp_path / "text.jsonl", [{"text": "a text"}] * 8)
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8)
    write_lines(tmp_path / "labels.jsonl", [{"prompt": "a", "completion": "b", "label": True}] * 8)
    values = {"base_model": "model", "learning_rate": "2e-4", "sequence_len": 64, "micro_batch_size": 2, "bf16": "auto"}
    (tmp_path / "config.yml").write_text(json.dumps({**values, "output_dir": "out", **RECIPES[recipe]}))
    (tmp_path / "mine.toml").write_text(import_config("axolotl", tmp_path / "config.yml"))
    monkeypatch.chdir(tmp_path)
    config, _ = read_config(["--config", "mine.toml"], read_start=read_start)
    training, data = config.training, config.data
    assert data.dataset_type == "chat" and (data.data_path or data.train_data_path)
    assert training.train_iters == RECIPES[recipe].get("max_steps")
    assert training.train_iters or training.num_epochs == RECIPES[recipe].get("num_epochs", 1.0)
    assert training.objective == RECIPES[recipe].get("rl", "causal_lm")
    if recipe in ("sft", "orpo", "pretraining"):
        assert dry_run(config, []) == 0


def test_a_password_of_another_frameworks_file_is_not_written() -> None:
    board = {"enabled": True, "output_path": "s3://me:HUNTER2@b/x"}
    text = from_deepspeed({"train_micro_batch_size_per_gpu": 1, "tensorboard": board}).to_toml(Path("ds.json"))
    assert "HUNTER2" not in text and "tensorboard_dir = " not in text
    assert "NOT AS THERE: tensorboard_dir: it has a password, which no file of a run holds; give it as --" in text


def test_a_batch_that_is_no_multiple_of_the_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"train_batch_size=4 must be a multiple of train_micro_batch_size_per_gpu=7;"):
        from_deepspeed({"train_micro_batch_size_per_gpu": 7, "train_batch_size": 4})
