"""Tests of the importer of DeepSpeed's ds_config.json: every key is carried over, or listed with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_configs import DEEPSPEED, MODEL

from megatronish.commands.import_config import import_config
from megatronish.compat.importers.deepspeed import TOP, from_deepspeed
from megatronish.compat.importers.imported import Imported
from megatronish.config.read import read_config
from megatronish.core.errors import UserError
from megatronish.optim.schedules import build_learning_rate_schedule


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


@pytest.mark.parametrize(("name", "dtype"), [("zero_quantized_gradients", "int4"), ("zero_quantized_weights", "int8")])
def test_codes_of_zero_plus_plus_are_ours_under_stage_3(name: str, dtype: str) -> None:
    def read(stage: int, value: Any) -> tuple[Any, str | None]:
        found = from_deepspeed({"zero_optimization": {"stage": stage, name: value}})
        return found.settings.get(name), found.left_out.get(f"zero_optimization.{name}")

    assert read(3, True) == (dtype, None)
    assert read(3, False) == (None, None)
    assert read(2, True) == (None, "it is for stage 3")
    with pytest.raises(UserError, match=rf"zero_optimization.{name}=tru must be true or false"):
        read(3, "tru")


@pytest.mark.parametrize("never", ["inf", float("inf")])
def test_a_run_that_never_prints_is_read(never: Any) -> None:
    found = from_deepspeed({"steps_per_print": never})
    assert "log_interval" not in found.settings and "--log-interval" in found.left_out["steps_per_print"]


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


def test_a_learning_rate_without_a_scheduler_is_the_same_in_every_step(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}))
    (tmp_path / "a.toml").write_text(import_config("deepspeed", path, dp=1))
    config = read_config(["--config", f"{tmp_path}/a.toml", *MODEL, "--seq-length", "8", "--train-iters", "3"]).config
    schedule = build_learning_rate_schedule(config.optimizer, config.training, global_batch_size=4)
    assert [schedule.learning_rate(samples) for samples in (0, 4, 8)] == [1e-3] * 3


def test_a_batch_that_is_no_multiple_of_the_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"train_batch_size=4 must be a multiple of train_micro_batch_size_per_gpu=7;"):
        from_deepspeed({"train_micro_batch_size_per_gpu": 7, "train_batch_size": 4})


def sparse(**section: Any) -> Imported:
    """What becomes of a section sparse_attention."""
    return from_deepspeed({"sparse_attention": section})


def of_pattern(found: Imported) -> dict[str, Any]:
    """The settings of the pattern, by the ends of their names."""
    return {name.removeprefix("attention_"): value for name, value in found.settings.items() if "attention_" in name}


def test_modes_of_sparse_attention_are_patterns() -> None:
    causal = {"attention": "unidirectional"}
    fixed = sparse(mode="fixed", block=32, num_local_blocks=8, num_global_blocks=2, **causal)
    assert of_pattern(fixed) == {"pattern": "fixed", "block_size": 32, "local_blocks": 8, "global_blocks": 2}
    bigbird = sparse(mode="bigbird", num_sliding_window_blocks=5, num_random_blocks=2, **causal)
    assert of_pattern(bigbird) == {
        **{"pattern": "bigbird", "block_size": 16, "local_blocks": 3, "global_blocks": 1},
        "random_blocks": 2,
    }
    longformer = sparse(mode="bslongformer", global_block_indices=[1, 0], **causal)
    assert of_pattern(longformer) == {
        **{"pattern": "longformer", "block_size": 16, "local_blocks": 2, "global_blocks": 2},
    }
    ranges = sparse(mode="bslongformer", global_block_indices=[0], global_block_end_indices=[3], **causal)
    assert of_pattern(ranges)["global_blocks"] == 3
    window = sparse(mode="local_sliding_window", num_sliding_window_blocks=4)
    assert of_pattern(window) == {"pattern": "sliding", "block_size": 16, "local_blocks": 3}
    for found in (fixed, bigbird, longformer, ranges, window):
        assert not any("sparse_attention" in key for key in found.otherwise | found.left_out)
    assert of_pattern(sparse(mode="dense")) == of_pattern(from_deepspeed({})) == {}


def test_defaults_of_sparse_attention_are_those_of_deepspeed() -> None:
    found = sparse(block=16)
    assert of_pattern(found) == {"pattern": "fixed", "block_size": 16, "local_blocks": 4, "global_blocks": 1}
    assert "attention here is causal" in found.otherwise["sparse_attention.attention"]
    assert of_pattern(sparse(mode="bigbird"))["random_blocks"] == 0


@pytest.mark.parametrize(
    ("section", "key", "reason"),
    [
        ({"mode": "variable"}, "mode", "windows of unlike sizes are not there"),
        ({"num_different_global_patterns": 2}, "num_different_global_patterns", "all heads see the last blocks"),
        ({"horizontal_global_attention": True}, "horizontal_global_attention", "a token sees no later one"),
        ({"mode": "bigbird", "different_layout_per_head": True}, "different_layout_per_head", "all heads have one"),
        ({"mode": "bslongformer", "global_block_indices": [0, 7]}, "global_block_indices", "the first 1 of the seq"),
    ],
)
def test_what_no_pattern_has_of_sparse_attention_is_said(section: dict[str, Any], key: str, reason: str) -> None:
    found = sparse(attention="unidirectional", **section)
    assert reason in found.otherwise[f"sparse_attention.{key}"]
    assert any(reason in line for line in found.warnings())


def test_keys_of_sparse_attention_that_a_mode_does_not_read_are_listed() -> None:
    found = sparse(attention="unidirectional", num_random_blocks=3, made_up=1, different_layout_per_head=True)
    assert "mode fixed does not read it" in found.left_out["sparse_attention.num_random_blocks"]
    assert "it is not known here" in found.left_out["sparse_attention.made_up"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"mode": "striped"},
            r"sparse_attention.mode='?striped'? must be one of dense, variable, fixed, bigbird, bslong",
        ),
        ({"num_local_blocks": 2.5}, r"sparse_attention.num_local_blocks=2.5 must be a whole number; correct the file"),
        ({"num_local_blocks": "many"}, r"num_local_blocks=.*must be a number; correct the file"),
        (
            {"mode": "bslongformer", "global_block_indices": 3},
            r"sparse_attention.global_block_indices=3 must be a list of whole numbers from 0 to 100000; correct",
        ),
        (
            {"mode": "bslongformer", "global_block_indices": [0, 4], "global_block_end_indices": [1]},
            r"global_block_indices has 2 numbers, and global_block_end_indices must have as many, not 1; correct",
        ),
    ],
)
def test_a_wrong_section_of_sparse_attention_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sparse(**section)


def test_an_imported_pattern_is_read(tmp_path: Path) -> None:
    values = {"sparse_attention": {"mode": "bigbird", "block": 4, "attention": "unidirectional"}}
    (tmp_path / "ds_config.json").write_text(json.dumps(DEEPSPEED | values))
    (tmp_path / "mine.toml").write_text(import_config("deepspeed", tmp_path / "ds_config.json"))
    config = read_config(["--config", str(tmp_path / "mine.toml"), *MODEL, "--seq-length", "8"]).config
    assert (config.model.attention_pattern, config.model.attention_block_size) == ("bigbird", 4)
