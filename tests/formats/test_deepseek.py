"""Tests of DeepSeek-V2, DeepSeek-V3 and Kimi K2 from Hugging Face: their keys, weights in fp8, what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of, to_hf, to_ours
from engines import world_size_of
from expert_models import LATENT, D, tensors_of_family, write_family
from jobs import MOCK, steps_of, train_on_ranks
from safetensors.torch import load_file, save_file
from sweeps import some_of
from torch import Tensor

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.adapters import SavedAdapter, read_native
from megatronish.formats.hf import tensors as hf
from megatronish.formats.hf.config import hf_config_of, read_hf_config
from megatronish.formats.peft import folder as peft
from megatronish.formats.safetensors import FILE
from megatronish.formats.weights import LazyTensor
from megatronish.report.plot import read_lines
from megatronish.specs.adapter_targets import adapted_sections

ONE = {"num_experts_per_tok": 1, "norm_topk_prob": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "max_position_embeddings": 163840,
        "ep_size": 1,
        "num_nextn_predict_layers": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
    },
    "kimi_k2": {
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
    },
    "deepseek_v2": {
        "hidden_size": 5120,
        "num_attention_heads": 128,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
    },
}
"""Keys of the published models in which they differ from the defaults, or which change nothing here."""


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(**read_hf_config(folder).model)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("deepseek_v3", {"head_size": 192, "rotary_growths": (1.0, 1.0), "moe_router_topk_scaling_factor": 2.5}),
        ("deepseek_v3", {"scores_per_group": 2, "moe_router_num_groups": 8, "moe_router_group_topk": 4}),
        ("deepseek_v3", {"expert_layers": (False,) * 3 + (True,) * 58, "rotary_interleaved": True}),
        ("deepseek_v3", {"latent_epsilon": 1e-6, "rope_mscale_all_dim": 1.0, "rope_scaling_factor": 40.0}),
        ("kimi_k2", {"moe_router_num_groups": None, "moe_router_score_function": "sigmoid", "num_experts": 384}),
        ("deepseek_v2", {"scores_per_group": 1, "moe_router_pre_softmax": True, "moe_router_norm_topk_prob": False}),
        ("deepseek_v2", {"moe_shared_expert_intermediate_size": 2 * 1407, "moe_router_enable_expert_bias": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_keys_are_understood(tmp_path: Path, kind: str, expected: dict[str, Any]) -> None:
    model = read(tmp_path, {"model_type": kind, **PUBLISHED[kind]})
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize("kind", LATENT)
def test_what_is_written_again_is_not_quantised(tmp_path: Path, kind: str) -> None:
    origin = {"model_type": kind, **PUBLISHED[kind]}
    model = read(tmp_path, origin)
    found = read_hf_config(tmp_path)
    written = hf_config_of(model, vocab_size=found.vocab_size, seq_length=found.seq_length, origin=origin)
    kept = {key: value for key, value in origin.items() if key != "quantization_config"}
    assert written == kept
    assert read(tmp_path, written) == model


@pytest.mark.parametrize(
    ("kind", "config", "told"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=true is not supported: projections"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention_heads=4"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported: after the first dense layers"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace=2 leaves none of 2 layers with experts"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0 must be a whole number of at least 1"),
        ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func="softmax" is not supported in this family'),
        ("deepseek_v3", {"topk_method": "greedy"}, 'topk_method="greedy" is not supported in this family'),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=false is not supported: weights sum to one"),
        ("kimi_k2", {"num_experts_per_tok": 1}, "norm_topk_prob=true is not supported: weights sum to one"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3 must divide n_routed_experts=4; correct that line"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group=3 must be at most n_group=2; correct that line"),
        ("deepseek_v3", {"n_group": 4}, "topk_group=1 leaves fewer experts than num_experts_per_tok=2; correct"),
        ("deepseek_v3", {"n_group": 4, **ONE}, "n_group=4 leaves groups of fewer than 2 experts"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, 'topk_method="noaux_tc" is not supported in this family'),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=true is not supported: transformers does not read"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=true is not supported: experts have no biases"),
        ("deepseek_v2", {"quantization_config": {"quant_method": "gptq"}}, "quantized other than in fp8; take the un"),
        (
            "deepseek_v2",
            {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}},
            "quantized other than in fp8",
        ),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "must have a weight_block_size of two whole"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "only yarn does"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.5}}, "versions differ in what"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 0.5}}, "multiplies attent"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, kind: str, config: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        hf.read(write_family(tmp_path / "theirs", kind, **config))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"moe_shared_expert_intermediate_size": None}, "deepseek_v3 not no shared expert"),
        ({"moe_shared_expert_intermediate_size": 13}, "deepseek_v3 not moe_shared_expert_intermediate_size=13"),
        ({"latent_norm_epsilon": 1e-5}, "deepseek_v3 not latent_norm_epsilon=1e-05"),
        ({"qk_layernorm": False}, "deepseek_v3 not qk_layernorm=False"),
        ({"moe_layer_freq": "2"}, r"deepseek_v3 not moe_layer_freq=\[1, 0\]"),
        ({"moe_router_scores_per_group": 1}, "deepseek_v3 not moe_router_scores_per_group=1"),
        ({"moe_router_enable_expert_bias": False}, "deepseek_v3 not moe_router_enable_expert_bias=False"),
        ({"rope_mscale": 0.7, "rope_mscale_all_dim": 0.0}, "deepseek_v3 not .*mscale without mscale_all_dim"),
    ],
    ids=str,
)
def test_a_model_of_neither_family_is_told_why(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    before = hf.describe(write_family(tmp_path / "theirs", "deepseek_v3")).model
    with pytest.raises(UserError, match=told):
        hf_config_of(ModelConfig(**vars(before) | fields), vocab_size=101, seq_length=16)


# Tensors


def in_fp8(tensors: dict[str, Tensor], rows: int, columns: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights as they are published in fp8, block by block, and what they are in bf16."""
    stored, expected = {}, {}
    for name, tensor in tensors.items():
        if "_proj" not in name and ".experts." not in name:
            stored[name] = expected[name] = tensor if name.endswith("_bias") else tensor.bfloat16()
            continue
        down, across = (range(0, size, step) for size, step in zip(tensor.shape, (rows, columns), strict=True))
        scales = torch.empty(len(down), len(across))
        small = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        whole = torch.empty(tensor.shape, dtype=torch.bfloat16)
        for i, top in enumerate(down):
            for j, left in enumerate(across):
                block = (slice(top, top + rows), slice(left, left + columns))
                scales[i, j] = tensor[block].abs().max() / 448
                small[block] = (tensor[block] / scales[i, j]).to(torch.float8_e4m3fn)
                whole[block] = (small[block].float() * scales[i, j]).bfloat16()
        stored |= {name: small, f"{name}_scale_inv": scales}
        expected[name] = whole
    return stored, expected


@pytest.mark.parametrize("blocks", [(8, 8), (5, 7), (128, 128)], ids=str)
def test_weights_in_fp8_are_read_block_by_block(tmp_path: Path, blocks: tuple[int, int]) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [*blocks]}
    folder = write_family(tmp_path / "theirs", "deepseek_v3", quantization_config=settings)
    stored, expected = in_fp8(tensors_of_family("deepseek_v3"), *blocks)
    save_file(stored, folder / FILE, metadata={"format": "pt"})
    to_ours(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = load_file(tmp_path / "back" / FILE)
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize("shape", [None, (1, 1)])
def test_factors_that_are_missing_or_of_other_blocks_are_told(tmp_path: Path, shape: tuple[int, ...] | None) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    folder = write_family(tmp_path / "theirs", "kimi_k2", quantization_config=settings)
    stored, _ = in_fp8(tensors_of_family("kimi_k2"), 8, 8)
    name = "model.layers.0.mlp.up_proj.weight"
    del stored[f"{name}_scale_inv"]
    if shape is not None:
        stored[f"{name}_scale_inv"] = torch.ones(shape)
    save_file(stored, folder / FILE)
    with pytest.raises(UserError, match=r"up_proj.weight \[20, 24\] is in fp8, and .*must have a factor for each bl"):
        hf.read(folder)


def further_tensors(family: str = "deepseek_v3") -> dict[str, Tensor]:
    """A layer of multi-token prediction as it is published, after the two of the model."""
    model = tensors_of_family(family)
    generator = torch.Generator().manual_seed(9)
    shapes = {name.replace("layers.1", "layers.2"): x.shape for name, x in model.items() if "layers.1." in name}
    own = {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "shared_head.norm": (D,)}
    shapes |= {f"model.layers.2.{name}.weight": torch.Size(shape) for name, shape in own.items()}
    drawn = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    return drawn | {f"model.layers.2.{name}.weight": model[of].clone() for name, of in copies.items()}


def test_layers_of_multi_token_prediction_come_back_with_their_copies(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "theirs", "deepseek_v3", num_nextn_predict_layers=1)
    save_file(tensors_of_family("deepseek_v3") | further_tensors(), folder / FILE)
    assert hf.describe(folder).model.num_depths == 1
    lines = str(to_ours(folder, tmp_path / "ours")).splitlines()
    copies = [line for line in lines if "second copy" in line]
    assert [line.partition(", ")[0] for line in copies] == [
        "left out on purpose: model.layers.2.embed_tokens.weight",
        "left out on purpose: model.layers.2.shared_head.head.weight",
    ]
    to_hf(tmp_path / "ours", tmp_path / "back")
    before, after = (load_file(path / FILE) for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_is_another_tensor_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_family(tmp_path / "theirs", "deepseek_v3", num_nextn_predict_layers=1)
    further = further_tensors()
    further[f"model.layers.2.{name}.weight"][3, 2] += 1e-3
    save_file(tensors_of_family("deepseek_v3") | further, folder / FILE)
    with pytest.raises(UserError, match=rf"layers.2.{name}.weight is not .* they are one tensor of its model"):
        to_ours(folder, tmp_path / "ours")


def test_layers_of_multi_token_prediction_that_are_not_there_are_none(tmp_path: Path) -> None:
    """transformers says that there is one, by default, and writes none."""
    folder = write_family(tmp_path / "theirs", "deepseek_v3", num_nextn_predict_layers=1)
    assert hf.describe(folder).model.num_depths == 0
    to_ours(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert load_file(tmp_path / "back" / FILE).keys() == tensors_of_family("deepseek_v3").keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_further_layers_than_config_says_are_left_out_in_one_line(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "theirs", "deepseek_v3")
    save_file(tensors_of_family("deepseek_v3") | further_tensors(), folder / FILE)
    lines = str(to_ours(folder, tmp_path / "ours")).splitlines()
    (line,) = [line for line in lines if "multi-token" in line]
    assert line.endswith("more, of multi-token prediction, which the model is read without")


def test_a_run_trains_on_with_layers_of_multi_token_prediction_or_without(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "theirs", "deepseek_v3", num_nextn_predict_layers=1)
    save_file(tensors_of_family("deepseek_v3") | further_tensors(), folder / FILE)
    losses = []
    for name, more in {"with": "--tp 2", "without": "--mtp-num-layers 0"}.items():
        run = tmp_path / name
        flags = f"{COMMON} --train-iters 2 --load-hf {folder} --run-dir {run} {more}"
        train_on_ranks(flags.split(), world_size=world_size_of(more))
        assert {"mtp_1_loss" in line for line in read_lines(run / "metrics.jsonl")} == {name == "with"}
        losses.append(steps_of(run)[1].loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_an_adapter_of_a_layer_of_multi_token_prediction_stays_here(tmp_path: Path) -> None:
    """The model that PEFT wraps has no such layer."""
    folder = write_family(tmp_path / "theirs", "deepseek_v3", num_nextn_predict_layers=1)
    save_file(tensors_of_family("deepseek_v3") | further_tensors(), folder / FILE)
    run, flags = tmp_path / "run", f"--load-hf {folder} --adapter-type lora --adapter-targets q o projection"
    train_on_ranks(f"{COMMON} --train-iters 1 --save-interval 1 {flags} --run-dir {run}".split())
    adapter = read_native(run)
    assert {name.split(".")[1] for name in adapter.tensors} == {"0", "1", "2"}
    assert "layers.2.projection.projection.A" in adapter.tensors
    peft.write(tmp_path / "peft", adapter, hf.describe(folder), base=str(folder))
    assert {name.split(".")[4] for name in load_file(tmp_path / "peft" / peft.FILE)} == {"0", "1"}


# Runs


@pytest.mark.parametrize("name", LATENT)
def test_a_folder_computes_what_its_checkpoint_computes(tmp_path: Path, name: str) -> None:
    """With the biases of its routers, which are no parameters."""
    folder = write_family(tmp_path / "theirs", name)
    tensors = tensors_of_family(name)
    biases = {key: tensor * 10 for key, tensor in tensors.items() if key.endswith("_bias")}
    save_file(tensors | biases, folder / FILE)
    to_ours(folder, tmp_path / "ours")
    tokens = torch.arange(24).view(2, 12)
    expected = logits_of(tmp_path / "ours", tokens, tp=1)
    for tp, ep in ((1, 1), (2, 2)):
        torch.testing.assert_close(logits_of(folder, tokens, tp=tp, ep=ep), expected, rtol=1e-5, atol=1e-6)


def test_an_adapter_has_the_names_of_peft_and_comes_back(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "theirs", "deepseek_v3")
    description = hf.describe(folder)
    targets = ("q_down", "q", "kv_down", "kv_up", "o")
    config = AdapterConfig(adapter_type="lora", lora_rank=2, adapter_targets=targets)
    generator = torch.Generator().manual_seed(3)
    parts = {
        f"{each.name}.{part}": torch.randn(shape, generator=generator)
        for each in adapted_sections(description.model, config)
        for part, shape in (("A", (2, each.in_features)), ("B", (each.out_features, 2)))
    }
    tensors = {name: LazyTensor(tuple(part.shape), part.dtype, part.clone) for name, part in parts.items()}
    peft.write(tmp_path / "adapter", SavedAdapter(folder, config, tensors), description, base=str(folder))
    layer = "base_model.model.model.layers.1.self_attn"
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    written = load_file(tmp_path / "adapter" / peft.FILE)
    assert {name for name in written if name.startswith(layer)} == {
        f"{layer}.{name}.lora_{part}.weight" for name in names for part in "AB"
    }
    back = peft.read(tmp_path / "adapter", description)
    assert {*back.config.adapter_targets} == {*targets} and back.tensors.keys() == parts.keys()
    for name, part in parts.items():
        assert torch.equal(back.tensors[name].read(), part), name


LAYOUTS = ["--tp 2 --sequence-parallel --pp 2", "--dp 2 --ep 2 --zero-stage 3"]
COMMON = f"{MOCK} --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --eval-iters 0 --device cpu"


@pytest.mark.parametrize("name", some_of(LATENT, ["deepseek_v3"]))
def test_twenty_steps_are_equal_in_two_layouts(tmp_path: Path, name: str) -> None:
    """With biases of routers, which each step moves from where the folder has them."""
    folder = write_family(tmp_path / "theirs", name)
    seen = []
    for number, layout in enumerate(LAYOUTS):
        flags = f"{COMMON} --train-iters 20 --load-hf {folder} --run-dir {tmp_path / str(number)} {layout}"
        train_on_ranks(flags.split(), world_size=world_size_of(layout))
        seen.append(steps_of(tmp_path / str(number)))
    assert len(seen[0]) == 20
    for step, metrics in seen[0].items():
        assert seen[1][step] == pytest.approx(metrics, rel=1e-5), f"step {step}"
