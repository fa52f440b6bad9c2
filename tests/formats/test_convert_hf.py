"""Tests of Hugging Face conversion: equal logits, identical bits after a round trip, errors for unsupported models.

tests/golden/hf has tiny random models, and what transformers makes of some tokens; tests/peers/random_models.py wrote
it. The real transformers is asked in tests/peers/test_transformers.py.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of, to_hf, to_ours
from paths import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatronish.commands.main import run
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats import native
from megatronish.formats.convert import convert
from megatronish.formats.hf.family import HEAD
from megatronish.formats.safetensors import FILE, INDEX
from megatronish.formats.weights import Description, LazyTensor, Model
from megatronish.tokenizer.build import build_tokenizer

HF = GOLDEN / "hf"
FAMILIES = ("gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "bloom")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_on_one_rank_and_on_two(tmp_path: Path, name: str) -> None:
    expected = load_file(HF / name / "expected.safetensors")
    to_ours(HF / name, tmp_path / "ours")
    for tp in (1, 2):
        found = logits_of(tmp_path / "ours", expected["tokens"], tp=tp)
        torch.testing.assert_close(found, expected["logits"], rtol=1e-5, atol=1e-5)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_trip_keeps_every_bit_and_the_config(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    convert(
        HF / name,
        tmp_path / "theirs",
        source="hf",
        target="hf",
        dtype=dtype,
        writing={"max_shard_bytes": 3000},
    )
    assert (tmp_path / "theirs" / INDEX).is_file()
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    expected = {key: tensor.to(dtype) for key, tensor in load_file(HF / name / FILE).items()}
    assert_same(tensors_of(tmp_path / "back"), expected)
    config = json.loads((HF / name / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def copy_of(name: str, folder: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> Path:
    """A golden model with other tensors, and another config.json."""
    folder.mkdir()
    tensors = load_file(HF / name / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    told = json.loads((HF / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | config))
    return folder


def without(prefix: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
def test_a_model_saved_without_its_prefix_is_read(tmp_path: Path, name: str, prefix: str) -> None:
    to_ours(copy_of(name, tmp_path / "bare", without(prefix)), tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same(tensors_of(tmp_path / "back"), load_file(HF / name / FILE))


def test_a_tensor_under_its_name_with_and_without_the_prefix_is_refused(tmp_path: Path) -> None:
    twice = copy_of("gpt2", tmp_path / "twice", lambda tensors: tensors.update({"wte.weight": torch.ones(2)}))
    with pytest.raises(UserError, match=r"twice holds both wte.weight and transformer.wte.weight, which are one"):
        to_ours(twice, tmp_path / "never")


BUFFERS = {
    "gpt2": {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16).bool(), "h.1.attn.masked_bias": torch.tensor(-1e4)},
    "llama": {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.rotary_emb.inv_freq": torch.ones(2),
    },
}


@pytest.mark.parametrize("name", BUFFERS)
def test_masks_and_wavelengths_beside_the_weights_are_ignored(tmp_path: Path, name: str) -> None:
    folder = copy_of(name, tmp_path / "old", lambda tensors: tensors.update(BUFFERS[name]))
    report = to_ours(folder, tmp_path / "ours")
    assert report.tensors_in == len(load_file(HF / name / FILE))


def test_a_tied_head_may_be_stored_too_and_must_be_the_embedding(tmp_path: Path) -> None:
    table = "model.embed_tokens.weight"
    folder = copy_of("qwen2", tmp_path / "both", lambda tensors: tensors.update({HEAD: tensors[table].clone()}))
    to_ours(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same(tensors_of(tmp_path / "back"), load_file(HF / "qwen2" / FILE))
    alone = copy_of("qwen2", tmp_path / "alone", lambda tensors: tensors.update({HEAD: tensors.pop(table)}))
    to_ours(alone, tmp_path / "ours_alone")
    other = copy_of("qwen2", tmp_path / "other", lambda tensors: tensors.update({HEAD: tensors[table] + 1}))
    with pytest.raises(UserError, match=r"lm_head.weight is not model.embed_tokens.weight, although tie"):
        to_ours(other, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    half = copy_of("qwen2", tmp_path / "half", lambda tensors: tensors.update({HEAD: tensors[table].bfloat16()}))
    with pytest.raises(UserError, match=r"lm_head.weight is of type BF16 and model.embed_tokens.weight of F32,"):
        to_ours(half, tmp_path / "never")


def test_the_config_of_a_model_that_changed_its_type_says_so(tmp_path: Path) -> None:
    to_ours(copy_of("mistral", tmp_path / "theirs", lambda _: None, sliding_window=None), tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "mistral"


def refusal(folder: Path, save: Path) -> str:
    with pytest.raises(UserError) as caught:
        to_ours(folder, save)
    assert not save.exists()
    return str(caught.value)


def test_a_folder_that_cannot_be_read_is_refused_with_a_remedy(tmp_path: Path) -> None:
    save = tmp_path / "never"
    assert "is no folder; download the model" in refusal(tmp_path / "meta-llama", save)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "holds no config.json" in refusal(folder, save)
    shutil.copy(HF / "llama" / "config.json", folder)
    assert "holds no weights" in refusal(folder, save)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "only pytorch_model.bin, a pickle" in refusal(folder, save)
    assert "save_pretrained" in refusal(folder, save)
    other = copy_of("llama", tmp_path / "other", lambda _: None, model_type="mamba")
    assert "model_type" in refusal(other, save)
    assert "mamba" in refusal(other, save)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks model.norm.weight, which its model has"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "holds extra, of which the model knows nothing"),
        (lambda tensors: tensors.update({HEAD: torch.ones(3, 8)}), r"head.weight would be \[3, 8\], and its model"),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.ones(12, 7)}),
            r"up_proj.weight.* do not fit together .*; its config and its weights are of two models, fetch both again",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(8, dtype=torch.float64)}),
            "model.norm.weight is of type F64, and weights are read in F32, BF16, F16",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(8, dtype=torch.int8)}),
            "model.norm.weight is of type I8",
        ),
    ],
)
def test_weights_of_another_model_are_refused_by_name(tmp_path: Path, change: Any, why: str) -> None:
    folder = copy_of("llama", tmp_path / "theirs", change)
    with pytest.raises(UserError, match=why):
        to_ours(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_what_is_unmatched_is_left_out_where_that_is_allowed(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "theirs", lambda tensors: tensors.update(extra=torch.ones(2)))
    report = convert(folder, tmp_path / "ours", source="hf", target="megatronish", allow_unmatched=True)
    assert report.unmatched_in == ("extra",)
    assert "left out, without a counterpart of ours: extra" in str(report)
    assert re.search(r"^  unused +1\n  unset +0$", str(report), re.MULTILINE)


def test_only_what_is_named_may_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"extra.bias": torch.ones(2), "more.bias": torch.ones(2), "more.weight": torch.ones(2)}
    folder = copy_of("llama", tmp_path / "theirs", lambda tensors: tensors.update(more))
    words = ["convert", "--from", "hf", "--to", "megatronish", "--load", str(folder), "--save", str(tmp_path / "ours")]
    assert run([*words, "--allow-unmatched", "*.bias"]) == 2
    told = capsys.readouterr().err
    assert "holds more.weight, of which the model knows nothing" in told and "bias" not in told
    assert run([*words, "--allow-unmatched", "*.bias", "more.weight", "*.inv_freq"]) == 0
    told = capsys.readouterr().out
    assert re.search("^  unused +3$", told, re.MULTILINE)
    assert re.findall("left out nothing, as none is called so: (.*)", told) == ["*.inv_freq"]
    assert run([*words[:-1], str(tmp_path / "all"), "--allow-unmatched"]) == 0


def test_what_transformers_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    description = Description(
        ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, position_embedding_type="none"),
        vocab_size=19,
        seq_length=16,
    )
    zeros = {
        name: LazyTensor(sharding.shape, torch.float32, lambda shape=sharding.shape: torch.zeros(shape))
        for name, sharding in description.shardings().items()
    }
    native.write(tmp_path / "ours", Model(description, zeros))
    with pytest.raises(UserError, match="position_embedding_type=none"):
        to_hf(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_all_tokens_that_end_a_text_are_kept(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "theirs", lambda _: None, eos_token_id=[2, 5])
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    to_ours(folder, tmp_path / "ours")
    description = native.read(tmp_path / "ours").description
    assert (description.eod, description.stops) == (2, {2, 5, 7})
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert "generation_config.json: eos_token_id='</s>' must be a token id" in refusal(folder, tmp_path / "never")
    (folder / "generation_config.json").write_text("[]")
    assert "generation_config.json is not a JSON object" in refusal(folder, tmp_path / "never")


def write_tokenizer(folder: Path) -> None:
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    end = {"id": 0, "content": "<|endoftext|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [end | flags], "model": model})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def test_a_tokenizer_travels_along_and_is_found_wherever_the_folder_goes(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "theirs", lambda _: None)
    write_tokenizer(folder)
    to_ours(folder, tmp_path / "ours")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ours").rename(tmp_path / "elsewhere" / "ours")
    shutil.rmtree(folder)
    description = native.read(tmp_path / "elsewhere" / "ours").description
    tokenizer = build_tokenizer(description.data)
    assert tokenizer.encode("abba") == [1, 2, 2, 1]
    assert tokenizer.vocab_size == 19
    to_hf(tmp_path / "elsewhere" / "ours", tmp_path / "back")
    kept = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert kept == ["chat_template.jinja", "config.json", FILE, "tokenizer.json", "tokenizer_config.json"]


def test_a_model_without_a_tokenizer_works_on_numbers(tmp_path: Path) -> None:
    to_ours(HF / "llama", tmp_path / "ours")
    assert build_tokenizer(native.read(tmp_path / "ours").description.data).encode("3 4") == [3, 4]
