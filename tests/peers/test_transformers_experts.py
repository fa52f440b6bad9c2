"""Tests of families with experts against transformers: equal logits on ep 1, 2 and 4, both forms of the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of, to_hf, to_ours
from expert_models import CONFIGS, write_family
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatronish.commands.convert import main
from megatronish.core.errors import UserError
from megatronish.formats.hf.families import FAMILIES
from megatronish.formats.hf.llama import llama_tensors_with
from megatronish.formats.prove import compare_logits
from megatronish.formats.safetensors import FILE

pytestmark = pytest.mark.peers("transformers")
peer: Any = pytest.importorskip(
    "random_models",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
MIXTURES = tuple(CONFIGS)
KNOWN_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers has under another name alone."""


def tokens() -> Tensor:
    return torch.randint(0, 100, (4, 12), generator=torch.Generator().manual_seed(1))


def random_mixture(name: str) -> Any:
    """Transformers' model of a family, every path of which counts; tp 4 needs as many heads of keys."""
    kind = KNOWN_AS.get(name, name)
    config = peer.transformers.AutoConfig.for_model(**CONFIGS[name] | {"num_key_value_heads": 4, "model_type": kind})
    model = peer.transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3, generator=generator)
    return model.float().eval()


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_those_of_transformers_on_one_rank_and_on_many(tmp_path: Path, name: str) -> None:
    model = random_mixture(name)
    model.save_pretrained(tmp_path / "theirs")
    expected = peer.logits_of(model, tokens())
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    for tp, ep in ((1, 1), (2, 1), (2, 2), (4, 4)):
        found = logits_of(tmp_path / "ours", tokens(), tp=tp, ep=ep)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = peer.load(tmp_path / "back")
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", MIXTURES)
def test_the_form_in_memory_is_read_as_the_published_one(tmp_path: Path, name: str) -> None:
    model = random_mixture(name)
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "packed", save_original_format=False)
    for form in ("published", "packed"):
        to_ours(tmp_path / form, tmp_path / f"{form} here")
        to_hf(tmp_path / f"{form} here", tmp_path / f"{form} back")
        back = peer.load(tmp_path / f"{form} back")
        for key, tensor in model.state_dict().items():
            assert torch.equal(back.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", [name for name in MIXTURES if name not in KNOWN_AS])
def test_a_conversion_proves_itself(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = write_family(tmp_path / "theirs", name)
    assert main(f"--from hf --to megatronish --load {theirs} --save {tmp_path / 'ours'} --prove".split()) == 0
    words = f"--from megatronish --to hf --load {tmp_path / 'ours'} --save {tmp_path / 'back'} --prove"
    assert main(words.split()) == 0
    output = capsys.readouterr().out
    assert output.count("bit for bit") == output.count("proved: logits of 2 x 16 random tokens differ from those") == 2


def test_a_conversion_of_weights_in_fp8_proves_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = write_family(tmp_path / "theirs", "qwen3_moe")
    path = theirs / FILE
    tensors = load_file(path)
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight"):  # each is one block
            scale = tensor.abs().max() / 448
            tensors |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.view(1, 1)}
    save_file(tensors, path, metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((theirs / "config.json").read_text()) | {"quantization_config": settings}
    (theirs / "config.json").write_text(json.dumps(config))
    assert main(f"--from hf --to megatronish --load {theirs} --save {tmp_path / 'ours'} --prove".split()) == 0
    output = capsys.readouterr().out
    assert "bit for bit" in output and f"of the weights of {theirs} as they are read" in output


def test_a_wrong_rule_of_names_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up-projection exchanged: every bit comes back, and the logits are others."""
    theirs = write_family(tmp_path / "theirs", "qwen3_moe")
    compare_logits(theirs)
    family = FAMILIES["qwen3_moe"]
    names = family.tensors.experts
    assert names is not None
    swapped = llama_tensors_with(names._replace(gate=names.up, up=names.gate))
    monkeypatch.setitem(FAMILIES, "qwen3_moe", family._replace(tensors=swapped))
    with pytest.raises(UserError, match="is not proved: logits of 2 x 16 random tokens differ"):
        compare_logits(theirs)
