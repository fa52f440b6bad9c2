"""Tests of Megatron-LM checkpoints that are refused: damaged, untrusted, of another model or layout; each is named."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import change_args, describe, load, random_model, rank_file, rewrite, save, torch_load, without
from test_megatron_format import GPT2, LLAMA

from megatronish.commands.convert import main as convert
from megatronish.core.errors import UserError
from megatronish.formats.megatron import read as megatron
from megatronish.formats.weights import to_ours

LATENTS: dict[str, Any] = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "kv_lora_rank": 4,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
}


def test_a_tensor_rank_without_a_chunk_is_named(tmp_path: Path) -> None:
    save(tmp_path / "a", LLAMA, random_model(LLAMA), tensor_parallel_size=2)
    content = torch_load(tmp_path / "a", "01")
    content["model1"] = {}
    torch.save(content, rank_file(tmp_path / "a", "01"))
    with pytest.raises(UserError, match=r"mp_rank_00/.* lacks model1, which other tensor ranks have"):
        load(tmp_path / "a")


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("args"), "mp_rank_00/.* holds no arguments"),
        (lambda content: content.pop("model"), "mp_rank_00/.* holds no model"),
        (lambda content: content.update(checkpoint_version=1.0), "checkpoint_version 1.0, whose queries"),
        (lambda content: content.pop("checkpoint_version"), "checkpoint_version 0, whose queries"),
        (without("hidden_size", "seq_length"), "its arguments lack hidden_size, seq_length"),
        (
            change_args(num_experts=8, moe_shared_expert_intermediate_size=8),
            r"its shared experts have biases \(add_bias_linear\)",
        ),
        (change_args(onnx_safe=True), r"onnx_safe \(True\), which our model does not have"),
        (change_args(multi_latent_attention=True), r"its arguments lack kv_lora_rank, .* the sizes of its latents"),
        (change_args(**LATENTS, rotary_interleaved=True), "latent attention has rotary_interleaved True"),
        (change_args(**LATENTS, rope_type="longrope"), "rope_type is 'longrope'; supported are rope and yarn"),
        (
            change_args(**LATENTS, rope_type="rope", rotary_scaling_factor=4.0, mscale_all_dim=1.0),
            "rotary_scaling_factor and mscale_all_dim change the scores",
        ),
        (
            change_args(**LATENTS | {"position_embedding_type": "learned_absolute"}),
            "position_embedding_type 'learned_abs",
        ),
        (change_args(**LATENTS | {"qk_pos_emb_head_dim": 3}), "do not fit together: qk_pos_emb_head_dim=3"),
        (change_args(**LATENTS | {"kv_lora_rank": 2**31 - 1, "q_lora_rank": 2**31 - 1}), "kv_lora_rank among them"),
        (change_args(softmax_type="sparse"), "argument softmax_type is 'sparse'"),
        (change_args(window_attn_skip_freq="2"), "argument window_attn_skip_freq is '2'; a number or a list"),
        (
            change_args(window_size=(3, 0), window_attn_skip_freq=[1, 0]),
            r"window_attn_skip_freq=\[1, 0\] is a list of 2",
        ),
        (change_args(position_embedding_type="yarn"), "position_embedding_type is 'yarn'; supported are"),
        (change_args(normalization="L2Norm"), "argument normalization is 'L2Norm'"),
        (change_args(num_layers="four"), "argument num_layers is 'four'"),
        (change_args(num_layers=0), "num_layers is 0, and must be at least 1"),
        (change_args(num_layers=6), "holds 4 layers, and its arguments say 6"),
        (
            change_args(hidden_size=24),
            r"a rank's part of embedding.word_embeddings.weight is \[16, 16\], .* \[16, 24\]",
        ),
        (change_args(window_size=(4, 4)), r"window_size is \(4, 4\); of a window, \(tokens before, 0\) is supported"),
        (change_args(group_query_attention=True, num_query_groups=3), "4 heads cannot share 3 key/value heads"),
        (change_args(tensor_model_parallel_size=3), "mp_rank_02/model_optim_rng.pt is missing: .* size 3 and"),
        (
            change_args(tensor_model_parallel_size=10**9),
            "mp_rank_02/model_optim_rng.pt is missing: .* size 1000",
        ),
        (change_args(num_experts=torch.ones(2)), "argument num_experts is no number or word, which is not possible"),
        (change_args(seq_length="abc"), "argument seq_length is 'abc', and must be a number"),
        (change_args(seq_length=-5), "argument seq_length is -5, and must be a number of at least 1"),
        (change_args(window_size=7), r"window_size is 7; of a window, \(tokens before, 0\) is supported"),
        (change_args(hidden_size=10**30), "hidden_size is beyond 64 bits"),
        (change_args(hidden_size=10**18), "hidden_size is 1000000000000000000, and must be at most 2147483647"),
        (change_args(seq_length=10**15, max_position_embeddings=None), "larger than any model has"),
        (change_args(tensor_model_parallel_size="2"), "says tensor parallel size '2' .* not possible"),
        (lambda content: content["model"].pop("embedding.word_embeddings.weight"), "holds no embedding.word_emb"),
        (lambda content: content["model"].update({"decoder.layers.9.x": torch.ones(1)}), "some are missing"),
        (lambda content: content.update(model=torch.ones(1)), "no tensors where its model should be"),
    ],
)
def test_what_is_not_such_a_model_is_told(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    save(tmp_path / "a", GPT2, random_model(GPT2), tensor_parallel_size=2)
    rewrite(tmp_path / "a", change)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "a")


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    save(tmp_path / "a", GPT2, random_model(GPT2), tensor_parallel_size=2)
    path = rank_file(tmp_path / "a", "01")
    whole = torch.load(path, weights_only=False)
    name = "decoder.layers.0.mlp.linear_fc1.bias"
    whole["model"][name] = torch.ones(31)
    torch.save(whole, path)
    with pytest.raises(
        UserError, match=rf"mp_rank_01/.*: {name} is torch.float32 \[31\], and torch.float32 \[32\] in "
    ):
        load(tmp_path / "a")
    del whole["model"][name]
    torch.save(whole, path)
    with pytest.raises(UserError, match=f"mp_rank_01/.* lacks {name}, which .*mp_rank_00/.* has"):
        load(tmp_path / "a")
    path.unlink()
    with pytest.raises(UserError, match=r"mp_rank_01/.* is missing"):
        load(tmp_path / "a")


def test_folders_that_are_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no mp_rank_"):
        megatron.read(tmp_path / "absent")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    with pytest.raises(UserError, match="says 'soon' and must say a number or release"):
        megatron.read(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe3")
    with pytest.raises(UserError, match="must say a number or release"):
        megatron.read(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3" * 5000)
    with pytest.raises(UserError, match="must say a number or release"):
        megatron.read(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / ".metadata").touch()
    with pytest.raises(UserError, match=r"its save was not finished, or it is in .* torch_dcp or fsdp_dtensor"):
        megatron.read(tmp_path)


def test_what_is_no_weight_is_passed_over_and_what_is_unknown_is_left(tmp_path: Path) -> None:
    save(tmp_path / "a", GPT2, random_model(GPT2))

    def add(content: dict[str, Any]) -> None:
        content["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
        content["model"]["decoder.layers.1.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
        content["model"]["decoder.layers.2.mlp.linear_fc1._extra_state"] = io.BytesIO(b"state")
        content["model"]["rotary_pos_emb.inv_freq"] = torch.zeros(3)
        content["model"]["binary_head.weight"] = torch.zeros(3)
        content["model"]["mtp.layers.0.enorm.weight"] = torch.zeros(3)

    rewrite(tmp_path / "a", add)
    description, theirs = megatron.read(tmp_path / "a")
    assert description.left_out["mtp.layers.0.enorm.weight"] == (
        "of multi-token prediction, of which its arguments say nothing"
    )
    assert to_ours(theirs, megatron.rules(description)).left_over == ("binary_head.weight",)


@pytest.mark.parametrize("attention", ["cross_attention.linear_q", "inter_attention.query"])
def test_a_t5_of_megatron_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], attention: str
) -> None:
    """A rank of its encoder has no such tensor."""
    save(tmp_path / "a", GPT2, random_model(GPT2), pipeline_parallel_size=2)
    path = rank_file(tmp_path / "a", "00_001")
    whole = torch.load(path, weights_only=False)
    whole["model"][f"decoder.layers.0.{attention}.weight"] = torch.zeros(16, 16)
    torch.save(whole, path)
    flags = ["--from", "megatron", "--to", "megatronish", "--load", f"{tmp_path / 'a'}", "--save", f"{tmp_path / 'b'}"]
    assert convert(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds a T5 of Megatron-LM, whose decoder has cross attention" in line
    assert line.endswith("convert one of Hugging Face (--from hf), or train one with pretrain_t5.py")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("head", ["lm_head.dense.weight", "lm_head.dense.bias"])
def test_a_bert_of_megatron_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str) -> None:
    """Its head is on the last stage alone."""
    save(tmp_path / "a", GPT2, random_model(GPT2), pipeline_parallel_size=2)
    path = rank_file(tmp_path / "a", "00_001")
    whole = torch.load(path, weights_only=False)
    whole["model"] = {name.replace("decoder.", "encoder."): each for name, each in whole["model"].items()}
    whole["model"][head] = torch.zeros(16)
    torch.save(whole, path)
    flags = ["--from", "megatron", "--to", "megatronish", "--load", f"{tmp_path / 'a'}", "--save", f"{tmp_path / 'b'}"]
    assert convert(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds a BERT of Megatron-LM, which normalises before a sublayer and once after the last; BERT" in line
    assert line.endswith("convert one of Hugging Face (--from hf), or train one with pretrain_bert.py")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "alibi"}, "no counterpart for position_embedding_type=alibi; keep this model in"),
        ({"embed_layernorm": True}, "no counterpart for embed_layernorm"),
        ({"multi_latent_attention": True}, "no counterpart for latent attention without rotary_interleaved"),
        (
            {"multi_latent_attention": True, "rotary_interleaved": True, "latent_norm_epsilon": 1e-3},
            r"no counterpart for latent_norm_epsilon=0.001 \(there it is norm_epsilon=1e-05\)",
        ),
        ({"model_type": "t5"}, r"model_type=t5 \(its T5 has names and tensors that are not written here\); keep this"),
        ({"model_type": "bert"}, r"model_type=bert \(its BERT normalises before a sublayer\); keep this model in"),
        (
            {"attention_pattern": "fixed"},
            "no counterpart for attention_pattern=fixed; keep this model in another format",
        ),
        ({"openai_gelu": True, "disable_bias_linear": True}, "openai_gelu .* with disable_bias_linear"),
        ({"position_embedding_type": "rope", "rope_scaling_type": "yarn"}, "no counterpart for rope_scaling_type=yarn"),
        (
            {"position_embedding_type": "rope", "rope_scaling_type": "llama3", "rope_low_freq_factor": 2.0},
            "rope_low_freq_factor=2.0 .it has 1.0 built in",
        ),
        (
            {"position_embedding_type": "rope", "rope_scaling_type": "linear", "rope_scaling_factor": 2.5},
            "rope_scaling_factor=2.5 .a linear one is a whole number",
        ),
    ],
)
def test_a_model_without_a_counterpart_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron.rules(describe(replace(GPT2, **changes)))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_parallel_size": 3}, "4 key/value heads cannot be cut by a tensor parallel size of 3; use 1, 2 or 4"),
        ({"tensor_parallel_size": 16}, "8 heads cannot be cut by a tensor parallel size of 16; use 1, 2, 4 or 8"),
        ({"tensor_parallel_size": 0}, "a tensor parallel size of 0; use"),
        ({"pipeline_parallel_size": 3}, "4 layers cannot be cut by a pipeline parallel size of 3; use 1, 2 or 4"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path, layout: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        save(tmp_path / "a", LLAMA, random_model(LLAMA), **layout)
    assert not list(tmp_path.iterdir())
