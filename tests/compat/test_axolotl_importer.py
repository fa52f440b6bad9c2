"""Tests of the importer of Axolotl's config.yml: models, adapters, data, precision and sharding."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_models import write_chat_model
from chat_tokenizers import said, write_lines
from foreign_configs import AXOLOTL

from megatronish.commands.import_config import import_config
from megatronish.compat.importers.axolotl import from_axolotl
from megatronish.config.read import read_config
from megatronish.core.errors import UserError
from megatronish.formats.start import read_start
from megatronish.report.first_lines import dry_run


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
    eight = from_axolotl({**values, "load_in_8bit": True}, folder=tmp_path)
    assert eight.settings["quantize_base"] == "int8" and "load_in_8bit" not in eight.left_out
    with pytest.raises(UserError, match="both true, and a base has one form"):
        from_axolotl({**values, "load_in_8bit": True, "load_in_4bit": True}, folder=tmp_path)


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
    assert "--dp-replicate" in found.left_out["fsdp_config.fsdp_sharding_strategy"]
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


def test_what_is_trained_on_is_told_where_a_data_set_says_it(tmp_path: Path) -> None:
    asked = {"roles_to_train": ["user"], "train_on_eos": "last"}
    chats = {"datasets": [{"path": "a/b", "type": "chat_template", **asked}, {"path": "a/c", "type": "alpaca"}]}
    found = from_axolotl(chats, folder=tmp_path)
    assert {f"datasets[0].{key}" for key in asked} <= found.otherwise.keys()
    usual = {"roles_to_train": ["assistant"], "train_on_eos": "turn"}
    found = from_axolotl({"datasets": [{"path": "a/b", "type": "chat_template", **usual}]}, folder=tmp_path)
    assert not any("roles_to_train" in key or "train_on_eos" in key for key in (*found.otherwise, *found.left_out))
    (tmp_path / "text.jsonl").write_text("{}")
    texts = {"datasets": [{"path": str(tmp_path / "text.jsonl"), "type": "completion"}], **asked}
    found = from_axolotl(texts, folder=tmp_path)
    assert found.settings["train_on"] == "all" and not asked.keys() & found.otherwise.keys()
    assert asked.keys() <= found.left_out.keys()
    mixed = {"datasets": [{"path": "a/b", "type": "alpaca"}, {"path": "a/c", "type": "completion"}]}
    # The loss of a text counts every token among chats, too: nothing is otherwise.
    assert "datasets[1].type" not in from_axolotl(mixed, folder=tmp_path).otherwise


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gradient_checkpointing": 7}, "gradient_checkpointing=7 must be true or false, or offload, offload_disk or"),
        ({"sample_packing": "nope"}, "sample_packing=nope must be true or false; correct the file"),
        ({"fsdp_config": {"reshard_after_forward": "maybe"}}, "reshard_after_forward=maybe must be true or false, or"),
        ({"fsdp_config": {"fsdp_offload_params": "maybe"}}, "offload_params=maybe must be true or false; correct"),
    ],
)
def test_a_switch_that_is_none_is_refused(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        from_axolotl(values, folder=tmp_path)


def test_two_precisions_and_a_model_with_a_password_are_told_once(tmp_path: Path) -> None:
    found = from_axolotl({"bf16": True, "fp16": True, "base_model": "https://u:pw@host/model"}, folder=tmp_path)
    assert found.settings["bf16"] and "this trains in bf16" in found.otherwise["fp16"]
    assert "has a password" in found.otherwise["base_model"] and "base_model" not in found.left_out
    assert "load_hf" not in found.otherwise
    with pytest.raises(UserError, match=r"^lora_r=0 must be at least 1"):
        from_axolotl({"adapter": "lora", "lora_r": 0}, folder=tmp_path).refuse_out_of_range()
