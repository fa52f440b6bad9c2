"""Adapters against PEFT: files of each are read by the other, logits and gradients are equal, round trips keep bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of, to_ours
from torch import Tensor

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.formats import native
from megatronish.formats.adapters import INFIX, SavedAdapter, under_names_of_checkpoints
from megatronish.formats.convert import convert
from megatronish.formats.peft import folder as ours
from megatronish.formats.weights import Description, LazyTensor
from megatronish.inference.load import LoadedModel, load_model
from megatronish.model.adapters import is_adapter
from megatronish.model.batch import MicroBatch
from megatronish.specs.adapter_targets import adapted_sections

pytestmark = pytest.mark.peers("peft")
peer: Any = pytest.importorskip(
    "random_models",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
peft: Any = pytest.importorskip("peft", reason="PEFT is not installed here; see `make test-peers`")
mixtures: Any = pytest.importorskip("test_transformers_experts", exc_type=ImportError)

DENSE = ("llama-biases", "qwen2", "qwen3", "gpt2", "bloom", "falcon-groups", "mpt", "glm4", "phi3")
EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "minimax_m2",
    "granitemoe",
    "granitemoeshared",
    "phimoe",
    "llama4_text",
    "gpt_oss",
)
LATENT = ("deepseek_v3", "deepseek_v2")
LORA = AdapterConfig(adapter_type="lora", lora_rank=3, lora_alpha=5.0)
KINDS = {
    "lora": LORA,
    "rslora": AdapterConfig(
        adapter_type="lora", lora_rank=2, lora_alpha=3.0, use_rslora=True, adapter_targets=("q", "v")
    ),
    "ia3": AdapterConfig(adapter_type="ia3"),
    "experts": replace(LORA, adapter_targets=("q", "k", "v", "o", "layers.*.experts.*")),
    "latent": replace(
        LORA, lora_alpha=3.0, adapter_targets=("q_down", "q", "kv_down", "kv_up", "o", "layers.*.experts.*")
    ),
}


def model_of(name: str) -> Any:
    return peer.random_model(name) if name in DENSE else mixtures.random_mixture(name)


def tokens_of(name: str) -> Tensor:
    return peer.tokens() if name in DENSE else mixtures.tokens()


def random_adapter(description: Description, config: AdapterConfig) -> SavedAdapter:
    """Adapter with random values in every tensor."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for section in adapted_sections(description.model, config):
        stack = (section.copies,) if section.copies > 1 else ()
        size = section.in_features if section.section == "down" else section.out_features
        shapes = {"l": (*stack, size)}
        if config.adapter_type == "lora":
            rank = config.lora_rank
            shapes = {"A": (*stack, rank, section.in_features), "B": (*stack, section.out_features, rank)}
        for part, shape in shapes.items():
            values = 0.2 * torch.randn(shape, generator=generator) + (part == "l")
            tensors[f"{section.name}.{part}"] = LazyTensor(shape, values.dtype, values.clone)
    return SavedAdapter(Path("random"), config, tensors)


@pytest.fixture(
    params=[
        *((name, kind) for name in DENSE for kind in list(KINDS)[:3]),
        *((name, "experts") for name in EXPERTS),
        *((name, "latent") for name in LATENT),
    ]
)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, SavedAdapter]:
    """Name of a model, a folder with it in both formats and an adapter of PEFT's, and this adapter."""
    name, kind = request.param
    model_of(name).save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    description = native.read(tmp_path / "ours").description
    adapter = random_adapter(description, KINDS[kind])
    ours.write(tmp_path / "adapter", adapter, description, base=str(tmp_path / "theirs"))
    return name, tmp_path, adapter


def logits_with(folder: Path, tokens: Tensor, *, tp: int) -> Tensor:
    return logits_of(folder / "ours", tokens, tp=tp, adapter=folder / "adapter")


def test_peft_computes_what_we_compute(written: tuple[str, Path, SavedAdapter]) -> None:
    name, folder, _ = written
    model, tokens = model_of(name), tokens_of(name)
    before = peer.logits_of(model, tokens)
    theirs = peft.PeftModel.from_pretrained(model, folder / "adapter").eval()
    expected = peer.logits_of(theirs, tokens)
    assert (expected - before).abs().max() > 0.01 * before.abs().max()
    for tp in (1, 2):
        torch.testing.assert_close(logits_with(folder, tokens, tp=tp), expected, rtol=1e-5, atol=1e-5)
    convert(folder / "ours", folder / "merged", source="megatronish", target="hf", adapter=folder / "adapter")
    merged = peer.logits_of(peer.load(folder / "merged"), tokens)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


def test_import_and_export_keep_every_bit(written: tuple[str, Path, SavedAdapter]) -> None:
    _, folder, adapter = written
    description = native.read(folder / "ours").description
    back = ours.read(folder / "adapter", description)
    assert back.tensors.keys() == adapter.tensors.keys()
    for name, tensor in adapter.tensors.items():
        assert torch.equal(back.tensors[name].read(), tensor.read()), name
    ours.write(folder / "again", back, description, base=str(folder / "theirs"))
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folder / "again" / file).read_bytes() == (folder / "adapter" / file).read_bytes(), file


def gradients_of(trained: LoadedModel, tokens: Tensor) -> dict[str, Tensor]:
    """Gradients of our adapter's tensors of the sum of squares of the logits."""
    learning = {name: each for name, each in trained.model.named_parameters() if is_adapter(name)}
    for parameter in learning.values():
        parameter.requires_grad_(True)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = MicroBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), positions, torch.arange(len(tokens)))
    logits = trained.model.logits(trained.model.hidden(None, batch, step=None))
    logits[..., : trained.description.vocab_size].square().mean().backward()
    found = {name: each.grad for name, each in learning.items() if each.grad is not None}
    return {name.replace(".adapters.0.", INFIX): grad for name, grad in found.items()}


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
@pytest.mark.parametrize("kind", list(KINDS)[:3])
def test_gradients_are_equal(tmp_path: Path, name: str, kind: str) -> None:
    model, tokens = model_of(name), tokens_of(name)
    model.save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    description = native.read(tmp_path / "ours").description
    adapter = random_adapter(description, KINDS[kind])
    ours.write(tmp_path / "adapter", adapter, description, base="theirs")
    found = gradients_of(load_model(tmp_path / "ours", adapter=tmp_path / "adapter"), tokens)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True).eval()
    theirs(tokens, use_cache=False).logits.square().mean().backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): each.grad
        for name, each in theirs.named_parameters()
        if each.requires_grad
    }
    assert expected.keys() == {name for module in ours.modules_of(description) for name in names_in(module, found)}
    for module in ours.modules_of(description):
        for theirs_name, our_name in names_in(module, found).items():
            gradient = expected[theirs_name]
            assert gradient is not None
            torch.testing.assert_close(found[our_name], gradient.view_as(found[our_name]), rtol=1e-5, atol=1e-5)


def names_in(module: Any, found: dict[str, Tensor]) -> dict[str, str]:
    """{name of PEFT: our name} of the tensors of a module."""
    (section,) = module.sections
    parts = {"A": "lora_A.weight", "B": "lora_B.weight", "l": "ia3_l"}
    names = {f"{module.name}.{parts[part]}": f"{module.layer}.adapters.default.{section}.{part}" for part in parts}
    return {theirs: our for theirs, our in names.items() if our in found}


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS, *LATENT])
def test_an_adapter_that_peft_has_made_is_read(tmp_path: Path, name: str) -> None:
    model, tokens = model_of(name), tokens_of(name)
    model.save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    part = "block_sparse_moe" if name.startswith("granite") else "feed_forward" if name == "llama4_text" else "mlp"
    parameters = None if name in DENSE else [f"{part}.experts.{kind}_proj" for kind in ("gate_up", "down")]
    targets = "all-linear" if name in DENSE else ["q_proj", "v_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, target_parameters=parameters, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    theirs.save_pretrained(tmp_path / "adapter")
    found = logits_with(tmp_path, tokens, tp=1)
    torch.testing.assert_close(found, peer.logits_of(theirs, tokens), rtol=1e-5, atol=1e-5)
    assert len(under_names_of_checkpoints(ours.read(tmp_path / "adapter", native.read(tmp_path / "ours").description)))
