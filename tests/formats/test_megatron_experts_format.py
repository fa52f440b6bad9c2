"""Tests of Megatron-LM checkpoints with experts: names, ranks of experts, arguments, errors."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import (
    assert_same,
    change_args,
    describe,
    load,
    random_model,
    rank_file,
    rewrite,
    save,
    torch_load,
)
from sweeps import some_of

from megatronish.config.sections.experts import ExpertOptions
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.core.layout import ExpertLayout
from megatronish.formats.convert import convert
from megatronish.formats.megatron import read as megatron
from megatronish.formats.megatron.arguments import model_of
from megatronish.formats.megatron.expert_arguments import SAME_OF_EXPERTS
from megatronish.formats.megatron.grid import RankGrid
from megatronish.formats.weights import LazyTensor, Model, from_ours
from megatronish.inference.load import load_model
from megatronish.parallel.mesh import Mesh

MIXTRAL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    num_experts=4,
    make_vocab_size_divisible_by=4,
)
DEEPSEEK = replace(
    MIXTRAL,
    untie_embeddings_and_output_weights=True,
    moe_layer_freq="([0]*1+[1]*3)",
    num_experts=8,
    moe_ffn_hidden_size=12,
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=1e-2,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_shared_expert_intermediate_size=20,
    moe_aux_loss_coeff=1e-4,
    moe_z_loss_coeff=1e-3,
)
QWEN = replace(
    MIXTRAL,
    moe_layer_freq="2",
    moe_router_pre_softmax=True,
    moe_shared_expert_intermediate_size=8,
    moe_shared_expert_gate=True,
    moe_router_load_balancing_type="global_aux_loss",
)
SQUARED = replace(MIXTRAL, swiglu=False, squared_relu=True, normalization="LayerNorm", num_layers=2)
BIASES: dict[str, Any] = {"disable_bias_linear": False, "moe_add_bias_linear": True}
BIASED = replace(MIXTRAL, moe_layer_freq="[0, 1, 1, 1]", **BIASES)
SHAPES = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "qwen": QWEN, "squared relu": SQUARED}
LAYOUTS: list[dict[str, Any]] = [
    {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "expert_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "transformer_impl": impl,
    }
    for tp, pp, ep, etp, impl in (
        (1, 1, 1, None, "local"),
        (1, 1, 4, None, "transformer_engine"),
        (2, 1, 1, None, "transformer_engine"),
        (2, 1, 2, None, "local"),
        (1, 2, 2, None, "transformer_engine"),
        (2, 2, 4, None, "transformer_engine"),
        (2, 2, 4, 1, "transformer_engine"),
        (2, 1, 1, 1, "local"),
        (4, 1, 2, 2, "transformer_engine"),
    )
]


@pytest.mark.long
@pytest.mark.parametrize("name", some_of(SHAPES, ["deepseek"]))
def test_every_layout_comes_back_and_becomes_another(tmp_path: Path, name: str) -> None:
    expected = random_model(SHAPES[name])
    for number, layout in enumerate(LAYOUTS):
        save(tmp_path / str(number), SHAPES[name], expected, **layout)
        assert_same(load(tmp_path / str(number))[1], expected)
    for here in range(len(LAYOUTS)):
        there = (here + 4) % len(LAYOUTS)
        megatron.write(tmp_path / f"{here}{there}", megatron.read(tmp_path / str(here)), **LAYOUTS[there])
        for path in (tmp_path / str(there)).rglob("*.pt"):
            again = tmp_path / f"{here}{there}" / path.relative_to(tmp_path / str(there))
            assert again.read_bytes() == path.read_bytes()


def test_a_conversion_to_our_checkpoints_and_back_is_the_same_to_the_bit(tmp_path: Path) -> None:
    expected = random_model(DEEPSEEK)
    save(tmp_path / "a", DEEPSEEK, expected, tensor_parallel_size=2, expert_parallel_size=2)
    convert(tmp_path / "a", tmp_path / "ours", source="megatron", target="megatronish")
    writing = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    convert(tmp_path / "ours", tmp_path / "b", source="megatronish", target="megatron", writing=writing)
    assert_same(load(tmp_path / "b")[1], expected)
    # A model that runs has the biases of its routers from there.
    model = load_model(tmp_path / "ours", mesh=Mesh.start(experts=ExpertLayout())).model
    assert {name: expected[name].tolist() for name in model.state()} == {
        name: bias.tolist() for name, bias in model.state().items()
    }


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_biases_of_experts_come_back_from_every_rank(tmp_path: Path, impl: Any) -> None:
    expected = random_model(BIASED)
    layout = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_tensor_parallel_size": 1}
    save(tmp_path / "a", BIASED, expected, **layout, transformer_impl=impl)
    model = torch_load(tmp_path / "a", "01_001")["model"]
    prefix = "decoder.layers.1.mlp."
    second = ("linear_fc1.bias1", "linear_fc2.bias1")
    if impl == "local":
        second = ("local_experts.1.linear_fc1.bias", "local_experts.1.linear_fc2.bias")
    for name, ours in zip(second, ("gate_up", "down"), strict=True):
        assert torch.equal(model[f"{prefix}experts.{name}"], expected[f"layers.1.mlp.experts.{ours}.bias"][3].flatten())
    assert torch.equal(model[f"{prefix}router.bias"], expected["layers.1.mlp.router.logit_bias"])
    assert_same(load(tmp_path / "a")[1], expected)


def test_flags_of_experts_with_biases_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "a", BIASED, random_model(BIASED))
    for flag in ("--no-bias-swiglu-fusion", "--expert-tensor-parallel-size 1 --no-bias-dropout-fusion"):
        assert flag in caplog.text
    with pytest.raises(UserError, match="1 set of biases of an expert cannot be cut by an expert tensor parallel size"):
        save(tmp_path / "b", BIASED, random_model(BIASED), tensor_parallel_size=2)


def test_biases_of_routers_stay_in_fp32_whatever_is_asked_for(tmp_path: Path) -> None:
    expected = random_model(DEEPSEEK)
    save(tmp_path / "a", DEEPSEEK, expected)
    for source, target, here, there in (("megatron", "megatronish", "a", "b"), ("megatronish", "megatron", "b", "c")):
        convert(tmp_path / here, tmp_path / there, source=source, target=target, dtype=torch.bfloat16)
    found = load(tmp_path / "c")[1]
    for name, tensor in found.items():
        kept = name.endswith(".router.bias")
        assert torch.equal(tensor, expected[name] if kept else expected[name].bfloat16()), name


def test_folders_are_named_by_tensor_pipeline_and_expert_rank(tmp_path: Path) -> None:
    def folders(**layout: Any) -> list[str]:
        name = "-".join(map(str, layout.values()))
        save(tmp_path / name, MIXTRAL, random_model(MIXTRAL), **layout)
        return sorted(path.name for path in (tmp_path / name / "release").iterdir())

    assert folders(expert_parallel_size=2) == ["mp_rank_00_000", "mp_rank_00_001"]
    assert folders(tensor_parallel_size=2, pipeline_parallel_size=2, expert_parallel_size=2) == [
        f"mp_rank_{tp:02d}_{pp:03d}_{ep:03d}" for tp in range(2) for pp in range(2) for ep in range(2)
    ]
    # One expert tensor rank: tensor rank 0 has experts of rank 0, tensor rank 1 those of rank 1, and no rank others.
    assert folders(tensor_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=1) == [
        "mp_rank_00_000",
        "mp_rank_01_001",
    ]


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 4, 1), (2, 2, 2), (2, 4, 1), (4, 2, 2), (4, 2, 1), (8, 4, 2)])
def test_ranks_are_those_of_the_expert_grid(tp: int, ep: int, etp: int) -> None:
    world = range(tp * ep * etp * 4)
    assert set(RankGrid(tp, 1, ep, etp).ranks()) == {(r % tp, r // etp % ep) for r in world}


def test_a_rank_holds_the_experts_that_megatron_gives_it(tmp_path: Path) -> None:
    tensors = random_model(MIXTRAL)
    number = torch.arange(4.0).view(4, 1, 1, 1) * 1000  # expert 1000, up-projection 100, row 1
    gate_up = number + torch.tensor([0.0, 100.0]).view(1, 2, 1, 1) + torch.arange(24.0).view(1, 1, 24, 1)
    tensors["layers.3.mlp.experts.gate_up.weight"] = gate_up.expand(4, 2, 24, 16).contiguous()
    down = number[..., 0] + torch.arange(24.0)
    tensors["layers.3.mlp.experts.down.weight"] = down.expand(4, 16, 24).contiguous()
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "expert_parallel_size": 2}
    save(tmp_path / "a", MIXTRAL, tensors, **layout)
    model = torch_load(tmp_path / "a", "01_001_001")["model"]
    prefix = "decoder.layers.1.mlp.experts."
    assert {name for name in model if name.startswith(prefix)} == {
        f"{prefix}linear_fc{fc}.weight{expert}" for fc in (1, 2) for expert in (0, 1)
    }
    rows = [3000 + first + row for first in (0, 100) for row in range(12, 24)]
    assert model[f"{prefix}linear_fc1.weight1"][:, 0].tolist() == rows
    assert model[f"{prefix}linear_fc2.weight0"][0].tolist() == [2000 + column for column in range(12, 24)]
    save(tmp_path / "b", MIXTRAL, tensors, **layout, transformer_impl="local")
    other = torch_load(tmp_path / "b", "01_001_001")["model"]
    assert torch.equal(other[f"{prefix}local_experts.1.linear_fc1.weight"], model[f"{prefix}linear_fc1.weight1"])


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_names_of_dense_and_of_expert_layers(tmp_path: Path, impl: Any) -> None:
    config = replace(DEEPSEEK, num_layers=2, moe_layer_freq="[0, 1]")
    save(tmp_path / "a", config, random_model(config), transformer_impl=impl)
    names = set(torch_load(tmp_path / "a", "00")["model"])
    dense_norm = "pre_mlp_layernorm.weight" if impl == "local" else "mlp.linear_fc1.layer_norm_weight"
    assert {
        name.removeprefix("decoder.layers.0.") for name in names if re.match(r"decoder.layers.0.(pre_)?mlp", name)
    } == {
        dense_norm,
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }
    of_experts = {name.removeprefix("decoder.layers.1.") for name in names if name.startswith("decoder.layers.1.")}
    assert {name for name in of_experts if "attention" not in name and "experts." not in name} - {
        "input_layernorm.weight"
    } == {"pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"}
    assert {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"} <= of_experts
    save(tmp_path / "b", QWEN, random_model(QWEN))
    assert "decoder.layers.2.mlp.shared_experts.gate_weight" in torch_load(tmp_path / "b", "00")["model"]


@pytest.mark.parametrize("name", SHAPES)
def test_the_arguments_describe_the_same_model(tmp_path: Path, name: str) -> None:
    config = SHAPES[name]
    save(tmp_path / "a", config, random_model(config), **LAYOUTS[5])
    told = replace(
        config,
        kv_channels=config.head_size,
        max_position_embeddings=8,
        ffn_hidden_size=config.ffn_size,
        moe_ffn_hidden_size=config.expert_ffn_size,
        moe_layer_freq="[0, 1, 1, 1]" if name == "deepseek" else config.moe_layer_freq,
    )
    assert load(tmp_path / "a")[0].model == told
    args = torch_load(tmp_path / "a", "00_000_000")["args"]
    assert (args.expert_model_parallel_size, args.expert_tensor_parallel_size, args.sequence_parallel) == (4, 2, True)
    assert args.moe_grouped_gemm is True and args.moe_router_dtype == "fp32"


def test_a_softmax_divided_by_its_sum_is_one_over_the_chosen(tmp_path: Path) -> None:
    config = replace(QWEN, moe_router_norm_topk_prob=True)
    save(tmp_path / "a", config, random_model(config))
    model = load(tmp_path / "a")[0].model
    assert (model.moe_router_pre_softmax, model.moe_router_norm_topk_prob) == (False, False)


def test_flags_of_experts_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "a", DEEPSEEK, random_model(DEEPSEEK))
    for flags in (
        "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 12 --moe-shared-expert-intermediate-size 20",
        "--moe-router-score-function sigmoid --moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-layer-freq '[0, 1, 1, 1]'",
        "--moe-router-dtype fp32 --moe-grouped-gemm --moe-token-dispatcher-type alltoall",
    ):
        assert flags in caplog.text


ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 4,
    "add_bias_linear": False,
    "num_experts": 4,
}


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({}, {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": "1", "moe_aux_loss_coeff": 0.0}),
        ({"num_experts": None, "moe_router_topk": 3}, {"num_experts": None, "moe_router_topk": 2}),
        ({"num_experts": 0, "moe_expert_capacity_factor": 1.0}, {"num_experts": None}),
        ({"moe_layer_freq": 2}, {"expert_layers": (True, False)}),
        ({"moe_layer_freq": [0, 1]}, {"expert_layers": (False, True)}),
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": None},
            {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.0},
        ),
        (
            {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [1e-3]},
            {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1e-3},
        ),
        ({"moe_router_topk_scaling_factor": 2}, {"moe_router_topk_scaling_factor": 2.0}),
        ({"ffn_hidden_size": 6}, {"expert_ffn_size": 6}),
    ],
)
def test_arguments_mean_what_they_mean_there(args: dict[str, Any], fields: dict[str, Any]) -> None:
    model = model_of(ARGUMENTS | args, before_core=False)
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"moe_expert_capacity_factor": 1.25}, r"trained with moe_expert_capacity_factor \(1.25\)"),
        ({"moe_latent_size": 4}, "trained with moe_latent_size"),
        ({"moe_apply_probs_on_input": True}, "trained with moe_apply_probs_on_input"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "moe_router_score_function is 'sqrtsoftplus'"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "type is 'sinkhorn'; supported are aux_loss, none, seq_aux"),
        ({"moe_router_load_balancing_type": 3}, "moe_router_load_balancing_type is 3; supported are"),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            "type is .*'seq_aux_loss'], and a router has one balancing loss here; load it",
        ),
        (
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8},
            "its shared experts have biases .add_bias_linear.",
        ),
        ({"moe_aux_loss_coeff": [1e-3, 1]}, r"moe_aux_loss_coeff is \[0.001, 1\], and a router has one"),
        ({"moe_router_topk": 5}, "do not fit together: moe_router_topk=5 must be at most num_experts=4"),
        ({"moe_layer_freq": [1]}, r"moe_layer_freq=\[1\] must have num_layers=2 entries"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "num_experts=4 must be divisible by"),
        ({"moe_router_enable_expert_bias": True}, "is added to sigmoid scores"),
        ({"num_experts": 10**9}, "num_experts is 1000000000, and must be at most 32767"),
        ({"num_experts": "many"}, "num_experts is 'many', which is not possible"),
        ({"moe_ffn_hidden_size": 10**12}, "moe_ffn_hidden_size is 1000000000000, and must be at most 2147483647"),
        ({"num_experts": None, "expert_model_parallel_size": 2}, r"trained with expert_model_parallel_size \(2\)"),
    ],
)
def test_arguments_without_a_counterpart_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_of(ARGUMENTS | args, before_core=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"disable_bias_linear": False}, "no counterpart for experts without biases in a model with biases; keep"),
        ({"moe_add_bias_linear": True}, "moe_add_bias_linear with disable_bias_linear"),
        (BIASES | {"moe_shared_expert_intermediate_size": 8}, "moe_add_bias_linear with shared experts"),
        (BIASES | {"swiglu": False, "openai_gelu": True}, "moe_add_bias_linear with openai_gelu"),
        ({"moe_expert_capacity_factor": 1.0}, "no counterpart for moe_expert_capacity_factor"),
        ({"moe_router_topk": 1}, "moe_router_topk=1 with a weight that is always 1"),
        (
            {
                "moe_router_pre_softmax": True,
                "moe_router_norm_topk_prob": True,
                "moe_router_num_groups": 2,
                "moe_router_group_topk": 1,
            },
            "moe_router_norm_topk_prob with moe_router_num_groups",
        ),
        (
            {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_scores_per_group": 1},
            "moe_router_scores_per_group=1 .there it is moe_router_topk over moe_router_group_topk",
        ),
    ],
)
def test_a_model_without_a_counterpart_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron.rules(describe(replace(MIXTRAL, **changes)))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"expert_parallel_size": 3}, "4 experts cannot be cut by a expert parallel size of 3; use 1, 2 or 4"),
        (
            {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 4},
            "2 tensor parallel ranks cannot be cut by a expert tensor parallel size of 4; use 1 or 2",
        ),
        ({"expert_parallel_size": 0}, "cannot be cut by a expert parallel size of 0"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path, layout: dict[str, Any], message: str) -> None:
    message = message.replace(" a expert", " an expert")
    with pytest.raises(UserError, match=message):
        save(tmp_path / "a", MIXTRAL, random_model(MIXTRAL), **layout)
    dense = replace(MIXTRAL, num_experts=None)
    with pytest.raises(UserError, match="a model without experts cannot be cut by an expert parallel size of 2"):
        save(tmp_path / "a", dense, random_model(dense), expert_parallel_size=2)


def _rename(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        content["model"] = {name.replace(old, new): tensor for name, tensor in content["model"].items()}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_args(num_experts=6), r"a rank's part of .*mlp.router.weight is \[4, 16\], .* for \[6, 16\]"),
        (change_args(num_experts=2), "linear_fc1.weight1, and its arguments say 1 experts a rank"),
        (change_args(expert_model_parallel_size=4), r"mp_rank_00_002/model_optim_rng.pt is missing: .* size 4 and exp"),
        (change_args(expert_model_parallel_size="2"), "expert parallel size '2' .* not possible"),
        (change_args(expert_tensor_parallel_size=3), "expert tensor parallel size 3, which does not divide"),
        (_rename("experts.linear_fc1.weight0", "experts.weight1"), "all experts of a rank in one tensor; load it into"),
    ],
)
def test_what_is_not_such_a_model_is_told(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    save(tmp_path / "a", MIXTRAL, random_model(MIXTRAL), expert_parallel_size=2)
    rewrite(tmp_path / "a", change)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "a")


def test_an_expert_rank_that_is_missing_or_differs_is_named(tmp_path: Path) -> None:
    save(tmp_path / "a", MIXTRAL, random_model(MIXTRAL), expert_parallel_size=2)
    path = rank_file(tmp_path / "a", "00_001")
    content = torch.load(path, weights_only=False)
    del content["model"]["decoder.layers.0.mlp.experts.linear_fc1.weight1"]
    torch.save(content, path)
    with pytest.raises(UserError, match=r"mp_rank_00_001/.* lacks decoder.layers.0.mlp.experts.linear_fc1.weight1"):
        load(tmp_path / "a")
    path.unlink()
    with pytest.raises(UserError, match=r"mp_rank_00_001/.* is missing"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        ("01_000", "decoder.layers.0.mlp.router.weight"),
        ("00_001", "decoder.layers.0.mlp.router.weight"),
        ("01_001", "decoder.final_layernorm.weight"),
        ("01_001", "decoder.layers.0.self_attention.linear_qkv.weight"),
    ],
)
def test_copies_that_differ_between_ranks_are_named(tmp_path: Path, rank: str, name: str) -> None:
    save(tmp_path / "a", MIXTRAL, random_model(MIXTRAL), tensor_parallel_size=2, expert_parallel_size=2)
    path = next(path for path in (tmp_path / "a").rglob("*.pt") if rank in str(path))
    content = torch.load(path, weights_only=False)
    content["model"][name].view(-1)[0] += 1
    torch.save(content, path)
    with pytest.raises(UserError, match=rf"{re.escape(name)} differs between .*mp_rank_.* and .*mp_rank_") as error:
        load(tmp_path / "a")
    assert f"mp_rank_{rank}/" in str(error.value)


def test_each_tensor_is_read_once_and_in_the_order_of_the_rules(tmp_path: Path) -> None:
    """Experts are read one by one: the stack of a layer is never whole in memory."""
    read: list[str] = []

    def tensor(name: str, values: torch.Tensor) -> LazyTensor:
        def take() -> torch.Tensor:
            read.append(name)
            return values

        def part(start: int, stop: int) -> torch.Tensor:
            read.append(f"{name}[{start}:{stop}]")
            return values[start:stop]

        return LazyTensor(tuple(values.shape), values.dtype, take, part if ".experts." in name else None)

    ours = {name: tensor(name, values) for name, values in random_model(DEEPSEEK).items()}
    description = describe(DEEPSEEK)
    theirs = from_ours(ours, megatron.rules(description)).tensors
    megatron.write(tmp_path / "a", Model(description, theirs), tensor_parallel_size=2, expert_parallel_size=4)
    stacks = [name for name in ours if ".experts." in name]
    single = [f"{name}[{row}:{row + 1}]" for name in stacks for row in range(ours[name].shape[0])]
    assert sorted(read) == sorted([*single, *(name for name in ours if name not in stacks)])


def test_all_options_of_experts_have_a_place() -> None:
    """A new option must be translated, or be refused."""
    others = {
        "moe_layer_freq",
        "moe_router_norm_topk_prob",
        "moe_router_scores_per_group",
        "moe_expert_capacity_factor",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "moe_router_force_load_balancing",
        "moe_sparsemixer_eps",
        "moe_apply_probs_on_input",
        "moe_add_bias_linear",
    }
    assert {field.name for field in fields(ExpertOptions)} == {*SAME_OF_EXPERTS, *others}
