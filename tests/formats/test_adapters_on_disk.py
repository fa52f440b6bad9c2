"""Adapters of a run on disk: merged, exported, applied by generation and evaluation, and refused with another base."""

import json
from pathlib import Path

import pytest
import torch
from conversions import logits_of
from jobs import tiny, train_on_ranks, write_tokens

from megatronish.commands.convert import main as convert
from megatronish.commands.main import COMMANDS
from megatronish.formats import native
from megatronish.formats.adapters import read_native
from megatronish.formats.peft import folder as peft

evaluate = COMMANDS["evaluate"].main()
generate = COMMANDS["generate"].main()

TOKENS = torch.arange(24).view(2, 12) % 100
KINDS = {
    "lora": "--adapter-type lora --lora-rank 2 --use-rslora",
    "ia3": "--adapter-type ia3",
    "experts": "--adapter-type lora --lora-rank 2 --adapter-targets q v layers.*.experts.*",
}


@pytest.fixture(scope="module", params=KINDS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a run with adapters of it at a rate that moves the logits."""
    folder = tmp_path_factory.mktemp(request.param)
    data = f"--tokenizer-type bytes --split 1,0,0 --data-path {write_tokens(folder / 'bytes', vocab_size=257)}"
    model = "--vocab-size 257"
    if request.param == "experts":
        model += " --swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2"
    train_on_ranks(tiny(folder / "base", f"{model} --train-iters 1", data=data))
    flags = f"{model} {KINDS[request.param]} --load {folder / 'base'} --train-iters 3 --lr 0.1"
    train_on_ranks(tiny(folder / "adapted", flags, data=data))
    return folder / "base", folder / "adapted"


def test_merged_weights_compute_what_base_and_adapter_compute(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    base, adapted = runs
    expected = logits_of(base, TOKENS, tp=1, adapter=adapted)
    assert (expected - logits_of(base, TOKENS, tp=1)).abs().max() > 1e-2
    flags = f"--from megatronish --to megatronish --load {base} --adapter {adapted} --save {tmp_path / 'merged'}"
    assert convert(flags.split()) == 0
    torch.testing.assert_close(logits_of(tmp_path / "merged", TOKENS, tp=1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(base, TOKENS, tp=2, adapter=adapted), expected, rtol=1e-5, atol=1e-5)


def test_an_exported_adapter_is_the_same_adapter(
    tmp_path: Path, runs: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    base, adapted = runs
    if native.read(base).description.model.num_experts is not None:
        assert convert(f"--from megatronish --to peft --load {adapted} --save {tmp_path / 'peft'}".split()) == 2
        return  # GPT-2's family has no experts; tests/peers/test_peft.py has those that do
    flags = f"--from megatronish --to peft --load {adapted} --save {tmp_path / 'peft'}"
    assert convert(flags.split()) == 0
    back, own = peft.read(tmp_path / "peft", native.read(base).description), read_native(adapted)
    assert back.tensors.keys() == own.tensors.keys()
    assert all(torch.equal(back.tensors[name].read(), each.read()) for name, each in own.tensors.items())
    merged = f"--from megatronish --to megatronish --load {base} --adapter {tmp_path / 'peft'} --save {tmp_path / 'm'}"
    assert convert(merged.split()) == 0
    assert (
        f"does not record the weights that it was trained with, and they cannot be compared with those of {base}"
        in (caplog.text)
    )


def test_evaluation_and_generation_apply_it(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    base, adapted = runs
    (tmp_path / "text.jsonl").write_text('{"text": "one two three four five six seven eight nine ten eleven"}\n' * 4)
    losses = []
    for more in ("", f"--adapter {adapted}", f"--adapter {adapted} --tp 2"):
        words = f"--load {base} --data-path {tmp_path / 'text.jsonl'} --output {tmp_path / 'found.json'} {more}"
        assert evaluate(words.split()) == 0
        losses.append(json.loads((tmp_path / "found.json").read_text())["loss"])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert generate(f"--load {base} --adapter {adapted} --num-tokens 3 --prompt w".split()) == 0


def test_another_base_is_refused(tmp_path: Path, runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    base, adapted = runs
    assert convert(f"--from megatronish --to hf --load {adapted} --save {tmp_path / 'x'}".split()) == 2
    assert "holds the adapters of" in capsys.readouterr().err
    merged = tmp_path / "merged"
    assert (
        convert(f"--from megatronish --to megatronish --load {base} --adapter {adapted} --save {merged}".split()) == 0
    )
    assert (
        convert(f"--from megatronish --to hf --load {merged} --adapter {adapted} --save {tmp_path / 'y'}".split()) == 2
    )
    error = capsys.readouterr().err
    assert "was trained with the weights" in error and "name the model that it was trained with" in error
