"""Tests of Megatron-LM checkpoints: names, layouts, arguments and folders."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import (
    VOCAB_SIZE,
    assert_same,
    change_args,
    describe,
    lazy,
    load,
    random_model,
    rank_file,
    rewrite,
    save,
    torch_load,
    without,
)
from paths import GOLDEN
from sweeps import some_of
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import RunError, UserError
from megatronish.formats.megatron import read as megatron
from megatronish.formats.megatron.arguments import model_of
from megatronish.formats.weights import LazyTensor, Model, from_ours
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT

GPT2 = ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=4, make_vocab_size_divisible_by=4)
LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=4,
    ffn_hidden_size=24,
    position_embedding_type="rope",
    rope_scaling_type="llama3",
    rotary_base=500000.0,
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    make_vocab_size_divisible_by=4,
)
QWEN = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    kv_channels=6,
    ffn_hidden_size=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    add_qkv_bias=True,
    qk_layernorm=True,
    window_size=5,
    make_vocab_size_divisible_by=8,
)
NEMOTRON = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    squared_relu=True,
    apply_layernorm_1p=True,
    qk_layernorm=True,
    position_embedding_type="rope",
    rotary_percent=0.5,
    rope_scaling_type="linear",
    rope_scaling_factor=4.0,
    untie_embeddings_and_output_weights=True,
    make_vocab_size_divisible_by=4,
)
GPT_OSS = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    position_embedding_type="rope",
    normalization="RMSNorm",
    quick_geglu=True,
    glu_linear_offset=1.0,
    activation_func_clamp_value=7.0,
    softmax_type="learnable",
    window_size=4,
    window_attn_skip_freq="[1, 0, 1, 0]",
    no_rope_freq="[0, 0, 0, 1]",
    make_vocab_size_divisible_by=4,
)
SHARED = replace(LLAMA, num_query_groups=2, add_qkv_bias=True)
LATENT = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    position_embedding_type="rope",
    rotary_interleaved=True,
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    multi_latent_attention=True,
    qk_layernorm=True,
    q_lora_rank=8,
    kv_lora_rank=6,
    qk_head_dim=4,
    qk_pos_emb_head_dim=2,
    v_head_dim=6,
    make_vocab_size_divisible_by=4,
)

SHAPES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "shared heads": SHARED,
    "qwen": QWEN,
    "nemotron": NEMOTRON,
    "gpt-oss": GPT_OSS,
    "latent": LATENT,
    "ahead": replace(LLAMA, mtp_num_layers=2),
    "tied, ahead": replace(GPT2, mtp_num_layers=2),
}
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "transformer_impl": impl}
    for tp, pp, impl in (
        (1, 1, "local"),
        (1, 2, "transformer_engine"),
        (2, 1, "local"),
        (2, 4, "transformer_engine"),
        (4, 2, "local"),
    )
]


@pytest.mark.long
@pytest.mark.parametrize("name", some_of(SHAPES, ["shared heads", "gpt-oss", "tied, ahead"]))
def test_every_layout_comes_back_and_becomes_every_other(tmp_path: Path, name: str) -> None:
    expected = random_model(SHAPES[name])
    for number, layout in enumerate(LAYOUTS):
        save(tmp_path / str(number), SHAPES[name], expected, **layout)
        assert_same(load(tmp_path / str(number))[1], expected)
    for here, there in itertools.permutations(range(len(LAYOUTS)), 2):
        megatron.write(tmp_path / f"{here}{there}", megatron.read(tmp_path / str(here)), **LAYOUTS[there])
        for path in (tmp_path / str(there)).rglob("*.pt"):
            again = tmp_path / f"{here}{there}" / path.relative_to(tmp_path / str(there))
            assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", SHAPES)
def test_the_arguments_describe_the_same_model(tmp_path: Path, name: str) -> None:
    config = SHAPES[name]
    save(tmp_path / "a", config, random_model(config), **LAYOUTS[2])
    description = load(tmp_path / "a")[0]
    assert (description.vocab_size, description.seq_length) == (VOCAB_SIZE, 8)
    told = replace(  # what is derived from the other fields is told in the arguments
        config,
        ffn_hidden_size=config.ffn_size,
        kv_channels=None if config.multi_latent_attention else config.head_size,
        max_position_embeddings=8,
    )
    assert description.model == told


@pytest.mark.parametrize(("name", "has_table"), [("ahead", True), ("llama", False)])
def test_the_last_stage_has_the_embedding_where_it_predicts_further_tokens(
    tmp_path: Path, name: str, has_table: bool
) -> None:
    save(tmp_path / "a", SHAPES[name], random_model(SHAPES[name]), pipeline_parallel_size=2)
    first, last = (torch_load(tmp_path / "a", f"00_{stage:03}")["model"] for stage in range(2))
    table = "embedding.word_embeddings.weight"
    assert (table in last) == has_table
    assert not has_table or torch.equal(last[table], first[table])


def test_queries_keys_and_values_of_plain_attention_lie_by_head() -> None:
    config = ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=2, kv_channels=2)
    q, k, v = [1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]  # two rows a head
    theirs = [1, 2, 11, 12, 21, 22, 3, 4, 13, 14, 23, 24]
    rule = next(r for r in megatron.rules(describe(config)) if r.ours == "layers.0.attention.qkv.weight")
    assert rule.theirs == ("decoder.layers.0.self_attention.linear_qkv.weight",)
    whole = torch.tensor([[row] * 4 for row in q + k + v])
    (grouped,) = rule.split(whole)
    assert grouped[:, 0].tolist() == theirs
    assert torch.equal(rule.join([grouped]), whole)


def test_queries_that_share_a_key_lie_before_it() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        kv_channels=1,
        group_query_attention=True,
        num_query_groups=2,
    )
    ours = torch.tensor([1, 2, 3, 4, 11, 12, 21, 22])  # queries 1 and 2 see key 11, and 3 and 4 key 12
    theirs = torch.tensor([1, 2, 11, 21, 3, 4, 12, 22])
    rule = next(r for r in megatron.rules(describe(config)) if r.ours == "layers.0.attention.qkv.bias")
    assert torch.equal(rule.split(ours)[0], theirs) and torch.equal(rule.join([theirs]), ours)


def test_a_rank_holds_the_parts_that_megatron_gives_it(tmp_path: Path) -> None:
    tensors = random_model(LLAMA)
    rows = {"embedding.tokens.weight": 100, "layers.1.mlp.fc1.weight": 200, "layers.1.attention.qkv.weight": 300}
    for name, first in rows.items():  # every row is its own number
        tensors[name] = (first + torch.arange(float(len(tensors[name])))).unsqueeze(1).expand(-1, 16).contiguous()
    tensors["layers.1.attention.out.weight"] = torch.arange(16.0).expand(16, -1).contiguous()
    save(tmp_path / "a", LLAMA, tensors, tensor_parallel_size=4, pipeline_parallel_size=2)
    model = torch_load(tmp_path / "a", "01_000")["model"]
    # Rows: gate from 200, up from 224; 4 groups of 2 queries, a key and a value of 2 rows each, from 300, 316 and 324.
    fc1 = model["decoder.layers.1.mlp.linear_fc1.weight"][:, 0]
    qkv = model["decoder.layers.1.self_attention.linear_qkv.weight"][:, 0]
    assert fc1.tolist() == [206, 207, 208, 209, 210, 211, 230, 231, 232, 233, 234, 235]
    assert qkv.tolist() == [304, 305, 306, 307, 318, 319, 326, 327]
    assert model["decoder.layers.1.self_attention.linear_proj.weight"][0].tolist() == [4, 5, 6, 7]
    assert torch_load(tmp_path / "a", "00_001")["args"].padded_vocab_size == 32  # 30 to a multiple of 4 x 4
    assert torch_load(tmp_path / "a", "03_000")["model"]["embedding.word_embeddings.weight"][:, 0].tolist() == [
        *(124, 125, 126, 127, 128, 129),
        *(0, 0),
    ]


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_norms_have_the_names_of_the_implementation(tmp_path: Path, impl: Any) -> None:
    save(tmp_path / "a", GPT2, random_model(GPT2), transformer_impl=impl)
    names = set(torch_load(tmp_path / "a", "00")["model"])
    here = {"decoder.layers.3.input_layernorm.bias", "decoder.layers.3.pre_mlp_layernorm.weight"}
    there = {
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_bias",
        "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
    }
    assert names >= (here if impl == "local" else there) and names.isdisjoint(there if impl == "local" else here)


def test_a_stage_of_several_chunks_is_read(tmp_path: Path) -> None:
    expected = random_model(GPT2)
    save(tmp_path / "a", GPT2, expected, tensor_parallel_size=2, pipeline_parallel_size=4)
    for tp in range(2):
        files = [torch_load(tmp_path / "a", f"{tp:02d}_{pp:03d}") for pp in range(4)]
        for pp in range(2):  # stage pp of two holds chunks pp and pp + 2
            content = files[pp] | {"model0": files[pp]["model"], "model1": files[pp + 2]["model"]}
            del content["model"]
            content["args"].pipeline_model_parallel_size = 2
            torch.save(content, rank_file(tmp_path / "a", f"{tp:02d}_{pp:03d}"))
        for pp in range(2, 4):
            rank_file(tmp_path / "a", f"{tp:02d}_{pp:03d}").unlink()
    assert_same(load(tmp_path / "a")[1], expected)


def test_a_stage_without_layers_is_read(tmp_path: Path) -> None:
    expected = random_model(LLAMA)
    save(tmp_path / "a", LLAMA, expected, pipeline_parallel_size=2)
    for pp in range(2):
        content = torch_load(tmp_path / "a", f"00_00{pp}")
        content[f"model{pp}"] = content.pop("model")  # stage 0 has a first chunk, and stage 1 a second
        torch.save(content, rank_file(tmp_path / "a", f"00_00{pp}"))
    assert_same(load(tmp_path / "a")[1], expected)


OLD_NAMES = {
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
}


def as_before_core(content: dict[str, Any]) -> None:
    """Names and nesting of the models that Megatron-LM had before megatron-core."""
    encoder: dict[str, Tensor] = {}
    language_model: dict[str, Any] = {"encoder": encoder}
    model: dict[str, Any] = {"language_model": language_model}
    for name, tensor in content["model"].items():
        part, _, rest = name.partition(".")
        if part == "decoder":
            for new, old in OLD_NAMES.items():
                rest = rest.replace(new, old)
            encoder[rest] = tensor
        elif part == "embedding":
            language_model.setdefault("embedding", {}).setdefault(rest.split(".")[0], {})["weight"] = tensor
        elif content["args"].untie_embeddings_and_output_weights:
            language_model["output_layer"] = {"weight": tensor}
        else:
            model["word_embeddings_for_head"] = {"weight": tensor}
    content["model"] = model
    content["args"].bias_gelu_fusion = False
    content["checkpoint_version"] = 2.0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_from_before_megatron_core_are_read(tmp_path: Path, name: str) -> None:
    expected = random_model(SHAPES[name])
    save(tmp_path / "a", SHAPES[name], expected, **LAYOUTS[0] | {"pipeline_parallel_size": 2})
    rewrite(tmp_path / "a", as_before_core)
    assert_same(load(tmp_path / "a")[1], expected)


@pytest.mark.parametrize("name", ["gpt2", "llama_3"])
def test_a_checkpoint_of_megatron_core_itself_has_its_logits(name: str) -> None:
    golden = GOLDEN / "megatron" / name
    description, tensors = load(golden)
    gpt = GPT(description.model, vocab_size=description.vocab_size, num_positions=description.num_positions)
    for parameter, values in ((parameter, tensors[name]) for name, parameter in gpt.named_parameters()):
        parameter.data.zero_()[: len(values)] = values
    expected = torch.load(golden / "logits.pt")
    tokens = expected["tokens"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = MicroBatch(tokens, tokens, torch.ones_like(tokens).bool(), positions, torch.arange(len(tokens)))
    with torch.no_grad():
        logits = gpt.logits(gpt.hidden(None, batch, step=None)).transpose(0, 1)[..., : description.vocab_size]
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=1e-5)


def test_a_tied_embedding_lies_on_the_first_and_on_the_last_stage(tmp_path: Path) -> None:
    save(tmp_path / "a", GPT2, random_model(GPT2), pipeline_parallel_size=2)
    first, last = (torch_load(tmp_path / "a", f"00_00{pp}")["model"] for pp in range(2))
    assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])
    save(tmp_path / "b", GPT2, random_model(GPT2))
    assert "output_layer.weight" not in torch_load(tmp_path / "b", "00")["model"]


def test_copies_of_a_tied_embedding_that_differ_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", GPT2, random_model(GPT2), pipeline_parallel_size=2)
    rewrite(tmp_path / "a", lambda content: content["model"].get("output_layer.weight", torch.ones(1)).add_(1))
    with pytest.raises(UserError, match="differs between the first and the last stage"):
        load(tmp_path / "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions_are_kept_and_told(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = random_model(LLAMA, dtype)
    save(tmp_path / "a", LLAMA, expected, tensor_parallel_size=2)
    assert_same(load(tmp_path / "a")[1], expected)
    args = torch_load(tmp_path / "a", "01")["args"]
    assert (args.params_dtype, args.bf16, args.fp16) == (dtype, dtype == torch.bfloat16, dtype == torch.float16)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gpt2", "--no-bias-gelu-fusion"),
        ("llama", "--norm-epsilon 1e-06 --use-rope-scaling --rope-scaling-factor 8.0"),
        ("qwen", "--qk-layernorm --window-size 4,0"),
        (
            "gpt-oss",
            "--window-size 3,0 --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7 "
            "--softmax-type learnable --window-attn-skip-freq '[1, 0, 1, 0]' --no-rope-freq '[0, 0, 0, 1]' "
            "--no-bias-gelu-fusion",
        ),
        ("nemotron", "--qk-layernorm --rotary-seq-len-interpolation-factor 4 --no-bias-gelu-fusion"),
    ],
)
def test_flags_that_megatron_does_not_take_from_a_checkpoint_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, flags: str
) -> None:
    save(tmp_path / "a", SHAPES[name], random_model(SHAPES[name]))
    assert f"--use-checkpoint-args leaves out {flags}; type that too" in caplog.text


def test_megatron_finds_a_release(tmp_path: Path) -> None:
    save(tmp_path / "a", GPT2, random_model(GPT2), tensor_parallel_size=2)
    assert (tmp_path / "a" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert sorted(path.name for path in (tmp_path / "a" / "release").iterdir()) == ["mp_rank_00", "mp_rank_01"]
    assert_same(load(tmp_path / "a" / "release")[1], random_model(GPT2))
    (tmp_path / "a" / "release").rename(tmp_path / "a" / "iter_0000120")
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_text("120\n")
    assert_same(load(tmp_path / "a")[1], random_model(GPT2))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    description, tensors = describe(GPT2), random_model(GPT2)
    theirs = from_ours({name: lazy(tensor) for name, tensor in tensors.items()}, megatron.rules(description)).tensors

    def fail() -> Tensor:
        raise OSError(28, "No space left on device")

    last = list(theirs)[-1]
    theirs[last] = LazyTensor(theirs[last].shape, theirs[last].dtype, fail)
    with pytest.raises(RunError, match="No space left on device; no partial file is left"):
        megatron.write(tmp_path / "a", Model(description, theirs), tensor_parallel_size=2)
    assert not list(tmp_path.iterdir())
    save(tmp_path / "a", GPT2, tensors)
    with pytest.raises(UserError, match=r"holds latest_checkpointed_iteration.txt already"):
        save(tmp_path / "a", GPT2, tensors)


def test_the_true_vocabulary_is_asked_for_then_told_then_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = random_model(LLAMA)
    save(tmp_path / "a", LLAMA, expected, **LAYOUTS[3])  # padded to 32
    caplog.clear()
    assert load(tmp_path / "a", vocab_size=29)[0].vocab_size == 29
    assert torch.equal(load(tmp_path / "a", vocab_size=29)[1]["head.weight"], expected["head.weight"][:29])
    rewrite(tmp_path / "a", change_args(vocab_size=28, tokenizer_type="NullTokenizer"))  # which adds a token
    assert load(tmp_path / "a")[0].vocab_size == 29
    assert not caplog.records
    rewrite(tmp_path / "a", without("vocab_size"))
    description, tensors = load(tmp_path / "a")
    assert description.vocab_size == 32 and tensors["embedding.tokens.weight"][30:].eq(0).all()
    assert "does not say its true vocabulary; all 32 rows are kept" in caplog.text
    for asked in (0, 33):
        with pytest.raises(UserError, match=f"vocab_size={asked} does not fit the 32 rows"):
            load(tmp_path / "a", vocab_size=asked)


BASE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}


@pytest.mark.parametrize(
    ("args", "before_core", "fields"),
    [
        ({}, False, {"openai_gelu": True, "disable_bias_linear": False, "position_embedding_type": "learned_absolute"}),
        ({"bias_gelu_fusion": False}, False, {"openai_gelu": False}),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, False, {"openai_gelu": False}),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, True, {"openai_gelu": True}),
        ({"add_bias_linear": False}, False, {"openai_gelu": False, "disable_bias_linear": True}),
        ({"disable_bias_linear": True}, False, {"disable_bias_linear": True}),
        ({"num_query_groups": 1}, False, {"num_kv_heads": 2}),
        ({"num_query_groups": 1, "group_query_attention": True}, False, {"num_kv_heads": 1}),
        ({"layernorm_epsilon": 1e-6}, False, {"norm_epsilon": 1e-6}),
        ({"norm_epsilon": 1e-3, "layernorm_epsilon": 1e-6}, False, {"norm_epsilon": 1e-3}),
        ({"use_rotary_position_embeddings": True}, False, {"position_embedding_type": "rope"}),
        ({"add_position_embedding": False}, False, {"position_embedding_type": "none"}),
        (
            {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 2},
            False,
            {"rope_scaling": "linear", "rope_scaling_factor": 2.0},
        ),
        (
            {"position_embedding_type": "rope", "use_rope_scaling": True},
            False,
            {"rope_scaling": "llama3", "rope_scaling_factor": 8.0},
        ),
        ({"window_size": (127, 0)}, False, {"window_size": 128}),
        ({"window_size": [-1, 0]}, False, {"window_size": None}),
        ({"ffn_hidden_size": None, "swiglu": True}, False, {"ffn_size": 0, "openai_gelu": False}),
        ({"window_size": (3, 0), "window_attn_skip_freq": 2}, False, {"windowed_layers": (True, False)}),
        (
            {"window_attn_skip_freq": 2, "no_rope_freq": [0, 1]},
            False,
            {"window_size": None, "no_rope_freq": "[0, 1]"},
        ),
        ({"swiglu": True, "activation_func_clamp_value": 7.0}, False, {"activation_func_clamp_value": None}),
        (
            {"swiglu": True, "bias_swiglu_fusion": False, "activation_func_clamp_value": 7},
            False,
            {"activation_func_clamp_value": 7.0},
        ),
        ({"quick_geglu": True, "glu_linear_offset": 1.0}, False, {"activation": "quick_geglu", "openai_gelu": False}),
        ({"softmax_type": "off-by-one"}, False, {"softmax_type": "off-by-one"}),
        ({"rotary_base": 1000000, "hidden_dropout": 0}, False, {"rotary_base": 1e6, "hidden_dropout": 0.0}),
    ],
)
def test_arguments_mean_what_they_mean_there(args: dict[str, Any], before_core: bool, fields: dict[str, Any]) -> None:
    model = model_of(BASE | args, before_core=before_core)
    assert {name: getattr(model, name) for name in fields} == fields
