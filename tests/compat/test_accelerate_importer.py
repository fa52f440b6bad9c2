"""Tests of the importer of Accelerate's YAML: layouts, precision, and the DeepSpeed files that it completes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from foreign_configs import ACCELERATE, MODEL, settings_of

from megatronish.commands.import_config import import_config
from megatronish.compat.importers.accelerate import from_accelerate
from megatronish.compat.importers.imported import Imported
from megatronish.config.read import read_config
from megatronish.core.errors import UserError


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
        "fsdp_config.fsdp_auto_wrap_policy",
        "fsdp_config.fsdp_state_dict_type",
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
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/local/nvme"},
            },
            {"zero_stage": 2, "optimizer_cpu_offload": True, "offload_folder": "/local/nvme"},
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
    ("values", "sentence"),
    [
        ({"distributed_type": "NOPE"}, "distributed_type=NOPE must be NO, DEEPSPEED, FSDP"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_accumulation_steps": -2}},
            "deepspeed_config.gradient_accumulation_steps=-2 must be at least 1",
        ),
        (
            {"distributed_type": "MEGATRON_LM", "num_processes": 8, "megatron_lm_config": {"megatron_lm_tp_degree": 0}},
            "tp_degree=0 must be at least 1",
        ),
    ],
)
def test_an_odd_value_is_refused_by_its_key(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        from_accelerate(values, folder=tmp_path)
