"""Tests of Megatron-LM's format torch_dist: both ways, the forms of older versions, errors, and untrusted files."""

import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from expert_models import write_family
from megatron_files import VOCAB_SIZE, assert_same, describe, lazy, load, random_model
from paths import GOLDEN
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner

from megatronish.checkpoint.foreign import BytesPlace, ListedTensor, Rectangle, write_listing
from megatronish.commands.convert import main
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import RunError, UserError
from megatronish.formats.convert import convert
from megatronish.formats.megatron import read as megatron
from megatronish.formats.megatron.torch_dist import write as torch_dist
from megatronish.formats.megatron.torch_dist.files import DistributedFiles
from megatronish.formats.safetensors import FILE
from megatronish.formats.start import of_another_format
from megatronish.formats.weights import Model, from_ours

GPT2 = ModelConfig(num_layers=3, hidden_size=16, num_attention_heads=4, make_vocab_size_divisible_by=4)
LLAMA = replace(
    GPT2,
    group_query_attention=True,
    num_query_groups=2,
    ffn_hidden_size=24,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    qk_layernorm=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
GATED_WITH_BIASES = replace(GPT2, quick_geglu=True, softmax_type="learnable")
EXPERTS = replace(
    LLAMA,
    num_experts=4,
    moe_ffn_hidden_size=8,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=12,
    moe_shared_expert_gate=True,
)
DENSE_FIRST = replace(EXPERTS, moe_layer_freq="[0, 1, 1]")
LATENT = replace(
    LLAMA,
    group_query_attention=False,
    num_query_groups=None,
    multi_latent_attention=True,
    q_lora_rank=8,
    kv_lora_rank=6,
    qk_head_dim=4,
    qk_pos_emb_head_dim=2,
    v_head_dim=6,
    rotary_interleaved=True,
)
YARN = replace(
    LATENT,
    q_lora_rank=None,
    rope_scaling_type="yarn",
    rope_scaling_factor=40.0,
    rope_original_max_positions=4096,
    rope_mscale=0.7,
    rope_mscale_all_dim=0.5,
    num_experts=4,
    moe_ffn_hidden_size=8,
    moe_layer_freq="[0, 1, 1]",
)
SHAPES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gated with biases": GATED_WITH_BIASES,
    "experts": EXPERTS,
    "dense first": DENSE_FIRST,
    "latent": LATENT,
    "latent with experts": YARN,
}


def save(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor], **how: Any) -> Path:
    description = describe(config)
    theirs = from_ours({name: lazy(tensor) for name, tensor in tensors.items()}, megatron.rules(description))
    assert not theirs.missing and not theirs.left_over
    torch_dist.write(folder, Model(description, theirs.tensors), **how)
    return folder / "release"


def stored(iteration: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by their names there."""
    files, tensors = DistributedFiles(iteration), {}
    for name, (shape, dtype, _) in files.tensors.items():
        tensors[name] = torch.empty(shape, dtype=dtype)
        files.fill(tensors[name], name, ())
    return tensors


def store(iteration: Path, tensors: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Replace the tensors of a folder, each cut into equal rectangles, so many in each dim, in files of two ranks."""
    for path in iteration.glob("*.distcp"):
        path.unlink()
    listed = {}
    with (iteration / "__0_0.distcp").open("wb") as one, (iteration / "__1_0.distcp").open("wb") as other:
        for name, (tensor, cuts) in tensors.items():
            sizes = tuple(size // cut for size, cut in zip(tensor.shape, cuts, strict=True))
            rectangles = []
            for number, at in enumerate(product(*map(range, cuts))):
                file = (one, other)[number % 2]
                offsets = tuple(place * size for place, size in zip(at, sizes, strict=True))
                where = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
                start = file.tell()
                torch.save(tensor[where].clone(), file)
                place = BytesPlace(Path(file.name).name, start, file.tell() - start)
                rectangles.append(Rectangle(offsets, sizes, place))
            listed[name] = ListedTensor(tuple(tensor.shape), tensor.dtype, tuple(rectangles))
    write_listing(iteration, listed, {})


# Both ways.


@pytest.mark.parametrize("transformer_impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_comes_back(tmp_path: Path, name: str, transformer_impl: str) -> None:
    expected = random_model(SHAPES[name], torch.bfloat16)
    save(tmp_path / "a", SHAPES[name], expected, transformer_impl=transformer_impl)
    description, found = load(tmp_path / "a")
    assert_same(found, expected)
    assert (description.vocab_size, description.seq_length) == (VOCAB_SIZE, 8)
    assert_same(load(tmp_path / "a" / "release")[1], expected)  # by its own name


def test_names_are_those_of_the_implementation(tmp_path: Path) -> None:
    names = {}
    for impl in ("local", "transformer_engine"):
        files = DistributedFiles(save(tmp_path / impl, EXPERTS, random_model(EXPERTS), transformer_impl=impl))
        names[impl] = {*files.tensors, *files.objects}
    layer = "decoder.layers.2"
    both = names["local"] & names["transformer_engine"]
    assert {
        "embedding.word_embeddings.weight",
        f"{layer}.self_attention.linear_qkv.layer_norm_weight",
        f"{layer}.self_attention.linear_qkv._extra_state/shard_0_1",
        f"{layer}.mlp.experts.experts.3.linear_fc1.weight_w",
        f"{layer}.mlp.experts.experts.3.linear_fc1.weight_v",
        f"{layer}.mlp.experts.experts.3.linear_fc2._extra_state/shard_0_1",
        f"{layer}.mlp.shared_experts.gate_weight",
    } <= both
    assert f"{layer}.mlp.linear_fc1.layer_norm_weight" in names["local"] - both
    assert f"{layer}.pre_mlp_layernorm.weight" in names["transformer_engine"] - both
    assert f"{layer}.self_attention.core_attention._extra_state/shard_0_1" in names["transformer_engine"] - both
    assert "decoder.final_layernorm._extra_state/shard_0_1" in names["transformer_engine"] - both


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    """Its own reader, which megatron-core uses, on a part of a tensor, too."""
    expected = random_model(LLAMA)
    iteration = save(tmp_path, LLAMA, expected)
    found = {"decoder.layers.1.mlp.linear_fc1.weight_v": torch.zeros(24, 16)}
    torch.distributed.checkpoint.load(found, checkpoint_id=iteration, no_dist=True)
    assert torch.equal(found["decoder.layers.1.mlp.linear_fc1.weight_v"], expected["layers.1.mlp.fc1.weight"][24:])
    common = torch.load(iteration / "common.pt", weights_only=False)
    assert common["content_metadata"] == {"singleton_local_shards": True, "chained_optim_avoid_prefix": True}
    assert common["args"].ckpt_format == "torch_dist" and common["args"].padded_vocab_size == 32
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"


def as_before(tensors: Mapping[str, Tensor], *, layers_apart: bool) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """As versions before 0.14 save them, with gates joined, experts and layers stacked, on two tensor ranks."""
    joined = {}
    for name, tensor in tensors.items():
        if name.endswith("_w"):
            tensor = torch.cat((tensor, tensors[f"{name.removesuffix('w')}v"]))
        if not name.endswith("_v"):
            joined[name.removesuffix("_w")] = tensor
    by_experts = {name.replace(".experts.0.", "."): name for name in joined if ".experts.experts.0." in name}
    for name, first in by_experts.items():
        of_experts = [joined.pop(first.replace("experts.experts.0.", f"experts.experts.{n}.")) for n in range(4)]
        joined[name.replace("mlp.experts.", "mlp.experts.experts.")] = torch.stack(of_experts)
    if not layers_apart:
        for first in [name for name in joined if name.startswith("decoder.layers.0.")]:
            stack = torch.stack([joined.pop(first.replace(".0.", f".{n}.", 1)) for n in range(3)])
            joined[first.replace("layers.0.", "layers.")] = stack
    return {name: (tensor, cuts_of(tuple(tensor.shape))) for name, tensor in joined.items()}


def cuts_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Each layer and expert by itself, and the last two dims in halves where they can be."""
    return tuple(size if dim < len(shape) - 2 else 2 - size % 2 for dim, size in enumerate(shape))


@pytest.mark.parametrize("layers_apart", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_stacks_of_older_versions_are_read_rectangle_by_rectangle(
    tmp_path: Path, name: str, layers_apart: bool
) -> None:
    expected = random_model(SHAPES[name])
    iteration = save(tmp_path, SHAPES[name], expected)
    layers_apart |= name in ("dense first", "latent with experts")  # layers that differ never stack
    older = as_before(stored(iteration), layers_apart=layers_apart)
    assert layers_apart or "decoder.layers.self_attention.linear_proj.weight" in older
    store(iteration, older)
    assert_same(load(tmp_path)[1], expected)


@pytest.mark.parametrize("rows", [31, 32, 64])
def test_a_vocabulary_of_any_padding_is_cut_to_the_true_one(tmp_path: Path, rows: int) -> None:
    expected = random_model(LLAMA)
    iteration = save(tmp_path, LLAMA, expected)
    tensors = stored(iteration)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensors[name] = torch.cat((tensors[name][:VOCAB_SIZE], torch.full((rows - VOCAB_SIZE, 16), 7.0)))
    store(iteration, {name: (tensor, (1,) * tensor.dim()) for name, tensor in tensors.items()})
    assert_same(load(tmp_path)[1], expected)
    with pytest.raises(UserError, match=f"vocab_size=65 does not fit the {rows} rows"):
        megatron.read(tmp_path, vocab_size=65)


def test_conversions_between_all_formats_are_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = GOLDEN / "megatron" / "llama_3"
    for source, target, here, there in (
        ("megatron", "megatron-dist", theirs, tmp_path / "dist"),
        ("megatron", "megatronish", tmp_path / "dist", tmp_path / "ours"),
        ("megatronish", "megatron-dist", tmp_path / "ours", tmp_path / "again"),
        ("megatron-dist", "megatron", tmp_path / "again", tmp_path / "ranks"),
    ):
        words = ["--from", source, "--to", target, "--load", str(here), "--save", str(there), "--prove"]
        assert main(words) == 0
        assert f"tensors read from {there} are those of {here}, bit for bit" in capsys.readouterr().out
    assert main([*words[:4], "--load", str(tmp_path / "again"), "--save", "x", "--max-shard-bytes", "1"]) == 2
    for path in (tmp_path / "dist").rglob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(tmp_path / "dist")).read_bytes()


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_families_of_experts_go_there_and_come_back(tmp_path: Path, name: str) -> None:
    """From Hugging Face over both of Megatron-LM's formats, in which every argument that the model needs is kept."""
    theirs = write_family(tmp_path / "theirs", name, rms_norm_eps=1e-6)
    for source, target, here, there in (
        ("hf", "megatron-dist", theirs, tmp_path / "dist"),
        ("megatron", "megatron", tmp_path / "dist", tmp_path / "ranks"),
        ("megatron", "hf", tmp_path / "ranks", tmp_path / "back"),
    ):
        assert not convert(here, there, source=source, target=target).unmatched_in
    assert_same(load_file(tmp_path / "back" / FILE), load_file(theirs / FILE))


def test_large_models_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "FILE_BYTES", 10_000)
    expected = random_model(GPT2)
    assert len(list(save(tmp_path, GPT2, expected).glob("__0_*.distcp"))) > 3
    assert_same(load(tmp_path)[1], expected)


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise RuntimeError("basic_ios::clear") from OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match="could not be written: No space left on device"):
        save(tmp_path / "a", GPT2, random_model(GPT2))
    assert not list(tmp_path.iterdir())


def test_listings_in_classes_of_megatron_core_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions before 0.16 have them, with the plans of all ranks."""
    expected = random_model(GPT2)
    iteration = save(tmp_path, GPT2, expected)
    module = ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name, base in (("MCoreMetadata", metadata.Metadata), ("MCoreSavePlan", planner.SavePlan)):
        setattr(module, name, type(name, (base,), {"__module__": module.__name__}))
    parents = module.__name__.split(".")
    for number in range(1, len(parents)):
        monkeypatch.setitem(sys.modules, ".".join(parents[:number]), ModuleType(parents[number - 1]))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    written = pickle.loads((iteration / ".metadata").read_bytes())
    item = planner.WriteItem(metadata.MetadataIndex("a"), planner.WriteItemType.BYTE_IO)
    listing = module.MCoreMetadata(**vars(written))
    listing.all_local_plans, listing.mcore_data = [module.MCoreSavePlan([item])], {"a": {"shape": torch.Size([2])}}
    (iteration / ".metadata").write_bytes(pickle.dumps(listing))
    assert_same(load(tmp_path)[1], expected)


# What is left out, and what is unknown.


def test_states_are_left_out_with_a_reason_and_unknown_tensors_are_told(tmp_path: Path) -> None:
    iteration = save(tmp_path / "a", GPT2, random_model(GPT2))
    tensors = stored(iteration)
    states = {
        "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight": torch.ones(64, 16),
        "chained_0.optimizer.state.fp32_param.decoder.final_layernorm.weight": torch.ones(16),
        "mtp.layers.0.enorm.weight": torch.ones(16),
    }
    store(iteration, {name: (t, (1,) * t.dim()) for name, t in (tensors | states).items()})
    report = convert(tmp_path / "a", tmp_path / "ours", source="megatron", target="megatronish")
    assert report.left_out.keys() == states.keys()
    assert "left out on purpose: optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight and 1 more" in str(
        report
    )
    tensors["decoder.layers.1.mlp.gate.weight"] = torch.ones(3)
    store(iteration, {name: (t, (1,) * t.dim()) for name, t in tensors.items()})
    with pytest.raises(UserError, match=r"holds decoder.layers.1.mlp.gate.weight, of which the model knows nothing"):
        convert(tmp_path / "a", tmp_path / "b", source="megatron", target="megatronish")


# Errors.


def change_common(**values: Any) -> Callable[[Path], None]:
    def change(iteration: Path) -> None:
        content = torch.load(iteration / "common.pt", weights_only=False)
        vars(content["args"]).update(values)
        torch.save(content, iteration / "common.pt")

    return change


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(iteration: Path) -> None:
        tensors = stored(iteration)
        change(tensors)
        store(iteration, {name: (tensor, (1,) * tensor.dim()) for name, tensor in tensors.items()})

    return apply


def cut_short(iteration: Path) -> None:
    path = iteration / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:9000])


def without_a_rectangle(iteration: Path) -> None:
    files = DistributedFiles(iteration)
    name = "decoder.final_layernorm.weight"
    shape, dtype, (rectangle,) = files.tensors[name]
    files.tensors[name] = ListedTensor((2 * shape[0],), dtype, (rectangle,))
    write_listing(iteration, files.tensors, {})


FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
WRONG: dict[str, Callable[[Path], object]] = {
    "__0_0.distcp is missing, and .metadata says that tensors lie in it; fetch": lambda folder: (
        folder / "__0_0.distcp"
    ).unlink(),
    r"__0_0.distcp has \d+ bytes, and .metadata says \d+; it is cut short, fetch it again": cut_short,
    "says sharded_backend 'zarr', and only torch_dist and the format torch are read": lambda folder: (
        folder / "metadata.json"
    ).write_text('{"sharded_backend": "zarr"}'),
    "metadata.json cannot be read": lambda folder: (folder / "metadata.json").write_text("{"),
    "no metadata.json: its save was not finished, or it is in .* fsdp_dtensor.*format torch_dist": lambda folder: (
        folder / "metadata.json"
    ).unlink(),
    ".metadata is missing, and only it says where tensors lie": lambda folder: (folder / ".metadata").unlink(),
    "common.pt is missing, which holds the arguments": lambda folder: (folder / "common.pt").unlink(),
    r"common.pt holds no arguments \(args\)": lambda folder: torch.save({"iteration": 3}, folder / "common.pt"),
    "common.pt cannot be converted: it was trained with onnx_safe": change_common(onnx_safe=True),
    "linear_fc1.weight_w is .*arguments say|arguments ask for": change_common(ffn_hidden_size=28),
    "16 elements of it are there; its save was not finished": without_a_rectangle,
    rf"holds {FC1}_w and lacks {FC1}_v": change_tensors(lambda tensors: tensors.pop(f"{FC1}_v")),
    rf"holds {FC1} twice, as": change_tensors(lambda tensors: tensors.update({FC1: torch.ones(48, 16)})),
    r"layers.mlp.linear_fc2.weight is of 2 layers, and its arguments say 3": change_tensors(
        lambda tensors: tensors.update({"decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 16, 24)})
    ),
    "holds no embedding.word_embeddings.weight": change_tensors(
        lambda tensors: tensors.pop("embedding.word_embeddings.weight")
    ),
    "holds a T5 of Megatron-LM": change_tensors(
        lambda tensors: tensors.update({"decoder.layers.0.cross_attention.linear_q.weight": torch.ones(2)})
    ),
}


@pytest.mark.parametrize("told", WRONG)
def test_what_is_wrong_is_told(tmp_path: Path, told: str) -> None:
    WRONG[told](save(tmp_path, LLAMA, random_model(LLAMA)))
    with pytest.raises(UserError, match=told):
        megatron.read(tmp_path)


def test_a_layer_that_is_missing_is_told(tmp_path: Path) -> None:
    iteration = save(tmp_path / "a", LLAMA, random_model(LLAMA))
    change_tensors(lambda tensors: tensors.pop("decoder.layers.1.mlp.linear_fc2.weight"))(iteration)
    with pytest.raises(UserError, match=r"lacks decoder.layers.1.mlp.linear_fc2.weight, which its model has"):
        convert(tmp_path / "a", tmp_path / "b", source="megatron", target="hf")


def test_a_run_that_loads_the_folder_is_told_to_convert_it(tmp_path: Path) -> None:
    iteration = save(tmp_path, GPT2, random_model(GPT2))
    for folder in (tmp_path, iteration):
        assert "convert it with megatronish convert --from megatron" in (of_another_format(folder) or "")


# Untrusted files.


class Call:
    """Object whose pickle calls os.system."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / 'pwned'}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (self.command,)


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_pickles_that_call_a_function_are_refused(tmp_path: Path) -> None:
    iteration = save(tmp_path / "a", GPT2, random_model(GPT2))
    whole = {path: path.read_bytes() for path in iteration.iterdir()}
    # The listing itself, and the arguments.
    for name, data, told in (
        (".metadata", pickle.dumps(Call(tmp_path)), r"\.metadata is refused \(it names posix.system"),
        (".metadata", pickle.dumps([Call(tmp_path)])[:-4], r"\.metadata is refused"),
        ("common.pt", saved({"args": Call(tmp_path)}), "common.pt is refused: it names posix.system"),
    ):
        (iteration / name).write_bytes(data)
        with pytest.raises(UserError, match=told):
            megatron.read(tmp_path / "a")
        (iteration / name).write_bytes(whole[iteration / name])
    # What lies where a tensor should be.
    files = DistributedFiles(iteration)
    name = "decoder.final_layernorm.weight"
    for value, told in (
        (Call(tmp_path), "is refused: it names posix.system"),
        ([1, 2], r"holds no torch.float32 \[16\] where decoder.final_layernorm.weight lies"),
        (torch.ones(17), r"holds no torch.float32 \[16\]"),
        (torch.ones(16, dtype=torch.float64), r"holds no torch.float32 \[16\]"),
    ):
        (iteration / "__7_0.distcp").write_bytes(saved(value))
        place = BytesPlace("__7_0.distcp", 0, len(saved(value)))
        forged = ListedTensor((16,), torch.float32, (Rectangle((0,), (16,), place),))
        write_listing(iteration, files.tensors | {name: forged}, {})
        with pytest.raises(UserError, match=told):
            megatron.read(tmp_path / "a").tensors[name].read()
    assert not list(tmp_path.rglob("pwned"))


def test_a_listing_names_files_of_its_own_folder_alone(tmp_path: Path) -> None:
    iteration = save(tmp_path / "a", GPT2, random_model(GPT2))
    files = DistributedFiles(iteration)
    forged = ListedTensor((16,), torch.float32, (Rectangle((0,), (16,), BytesPlace("../x", 0, 10)),))
    write_listing(iteration, files.tensors | {"decoder.final_layernorm.weight": forged}, {})
    with pytest.raises(UserError, match="it names a file in another folder"):
        megatron.read(tmp_path / "a")
