"""Tests of proofs: a conversion that lost or changed something is not proved, and rules must be one to one."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_models import write_adapter, write_chat_model
from conversions import to_ours
from expert_models import write_family
from paths import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatronish.commands.convert import main
from megatronish.core.errors import UserError
from megatronish.formats import load_sharded
from megatronish.formats.convert import convert
from megatronish.formats.prove import compare_logits, compare_tensors, our_logits
from megatronish.formats.safetensors import FILE
from megatronish.formats.tensor_rule import TensorRule
from megatronish.formats.weights import LazyTensor, Translated, from_ours
from megatronish.formats.weights import to_ours as rename

HF = GOLDEN / "hf"


@pytest.mark.parametrize("target", ["megatronish", "megatron", "hf"])
def test_what_was_written_is_read_again_and_compared(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    words = ["--from", "hf", "--to", target, "--load", str(HF / "llama"), "--save", str(tmp_path / "out"), "--prove"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert f"proved: the 15 tensors read from {tmp_path / 'out'} are those of {HF / 'llama'}, bit for bit" in output
    assert "logits were not compared: transformers is not installed; pip install transformers" in output


@pytest.mark.parametrize("name", ["gpt2", "llama3", "bloom"])
def test_our_side_of_the_comparison_has_the_logits_of_transformers(name: str) -> None:
    expected = load_file(HF / name / "expected.safetensors")
    torch.testing.assert_close(our_logits(HF / name, expected["tokens"]), expected["logits"], rtol=1e-5, atol=1e-5)


def test_a_folder_that_transformers_cannot_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_keywords: Any) -> None:
        raise KeyError("rope_type")

    model = SimpleNamespace(from_pretrained=refuse)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=model, __version__="4.0"))
    with pytest.raises(UserError, match=r"llama is not proved: transformers 4.0 cannot load it \('rope_type'\); fetch"):
        compare_logits(HF / "llama")


def say_of_transformers(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    """From now on this is what is known of an installed transformers."""
    look_up = importlib.util.find_spec

    def said(name: str, *more: Any) -> Any:
        return spec if name == "transformers" else look_up(name, *more)

    monkeypatch.setattr("importlib.util.find_spec", said)


def test_logits_are_compared_of_a_folder_with_tensors_that_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(HF / "llama", folder)
    tensors = load_file(folder / "model.safetensors") | {"odd.thing": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors")

    def there(path: Path, **_keywords: Any) -> Any:
        def logits(tokens: torch.Tensor, **_more: Any) -> SimpleNamespace:
            return SimpleNamespace(logits=our_logits(path, tokens, allow_unmatched=True))

        return SimpleNamespace(float=lambda: SimpleNamespace(eval=lambda: logits))

    model = SimpleNamespace(from_pretrained=there)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=model, __version__="4.0"))
    say_of_transformers(monkeypatch, True)
    words = ["--from", "hf", "--to", "megatronish", "--load", str(folder), "--save", str(tmp_path / "out"), "--prove"]
    assert main([*words, "--allow-unmatched", "odd.*"]) == 0
    assert "random tokens differ from those of transformers 4.0 by 0.0e+00" in capsys.readouterr().out


def test_a_conversion_that_merges_an_adapter_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say_of_transformers(monkeypatch, None)
    folder, adapter = write_chat_model(tmp_path / "base"), write_adapter(tmp_path / "adapter", seed=1)
    words = ["--from", "hf", "--to", "megatronish", "--load", str(folder), "--save", str(tmp_path / "out"), "--prove"]
    assert main([*words, "--adapter", str(adapter)]) == 0
    told = capsys.readouterr().out
    assert "proved: the 15 tensors read" in told and f"are those of {folder} with {adapter}, bit for bit" in told


def test_a_target_with_one_other_bit_is_not_proved(tmp_path: Path) -> None:
    theirs = write_family(tmp_path / "theirs", "olmoe")
    to_ours(theirs, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", source="megatronish", target="hf")
    how = {"source": "megatronish", "target": "hf", "reading": {}, "dtype": None}
    assert "bit for bit" in compare_tensors(tmp_path / "ours", tmp_path / "back", **how)  # type: ignore[arg-type]
    tensors = load_file(tmp_path / "back" / FILE)
    tensors["model.layers.1.mlp.experts.3.down_proj.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "back" / FILE)
    with pytest.raises(UserError, match=r"is not proved: its layers\.1\.mlp.experts.down.weight is not that of"):
        compare_tensors(tmp_path / "ours", tmp_path / "back", **how)  # type: ignore[arg-type]


def lazy(*shape: int) -> LazyTensor:
    def read() -> Tensor:
        raise AssertionError("nothing is read")

    return LazyTensor(shape, torch.float32, read)


@pytest.mark.parametrize(
    "rules",
    [
        [TensorRule("a", ("x",)), TensorRule("b", ("x",))],
        [TensorRule("a", ("x",)), TensorRule("a", ("y",))],
        [TensorRule("a", ("x",), row=0), TensorRule("a", ("y",), row=2)],
        [TensorRule("a", ("x",), row=0), TensorRule("a", ("y",), row=0)],
    ],
    ids=["one of theirs twice", "one of ours twice", "a row left out", "a row twice"],
)
def test_rules_that_are_not_one_to_one_are_refused(rules: list[TensorRule]) -> None:
    for translate in (rename, from_ours):
        with pytest.raises(UserError, match=r"the rules of the format do not make (x|a) exactly once"):
            translate({}, rules)


def test_a_target_without_all_its_tensors_is_refused() -> None:
    converted = from_ours({"a": lazy(2)}, [TensorRule("a", ("x",)), TensorRule("b", ("y",))])
    assert isinstance(converted, Translated)
    with pytest.raises(UserError, match="hf needs b, which the model does not have; it is of another family"):
        load_sharded.check_target("hf", converted, allow_unmatched=True)


def test_what_is_left_out_on_purpose_has_a_reason(tmp_path: Path) -> None:
    tensors = load_file(HF / "llama" / FILE) | {"model.rotary_emb.inv_freq": torch.ones(2)}
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / FILE)
    (tmp_path / "theirs" / "config.json").write_text((HF / "llama" / "config.json").read_text())
    report = to_ours(tmp_path / "theirs", tmp_path / "ours")
    reason = "a buffer that follows from config.json"
    assert report.left_out == {"model.rotary_emb.inv_freq": reason}
    assert f"left out on purpose: model.rotary_emb.inv_freq, {reason}" in str(report)
