"""Text from a checkpoint of any layout: the same by the same seed, and greedy text is what the model likes best."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import call_main, tiny, train_on_ranks, write_tokens

from megatronish.errors import UserError
from megatronish.model.batch import MicroBatch
from megatronish.tokenizer import BytesTokenizer
from megatronish.train.generate import generate, load_model
from tools.generate import Arguments, main

PROMPT = "def "
FLAGS = "--vocab-size 300 --exit-interval 3"  # more than bytes have: such tokens are left out of text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags that name random bytes."""
    prefix = write_tokens(tmp_path_factory.mktemp("data") / "bytes", vocab_size=257)
    return f"--tokenizer-type bytes --split 1,0,0 --data-path {prefix}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """A run on four ranks, with a padded vocabulary."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    train_on_ranks(tiny(run_dir, f"{FLAGS} --tp 2 --pp 2 --make-vocab-size-divisible-by 128", data=data), world_size=4)
    return run_dir


def written(capsys: pytest.CaptureFixture[str], load: Path, **arguments: Any) -> str:
    assert main(Arguments(load=load, prompt=PROMPT, **arguments)) == 0
    return capsys.readouterr().out


def test_the_same_seed_writes_the_same_text(capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    first = written(capsys, trained, num_tokens=12, seed=3)
    assert first.startswith(PROMPT)
    assert written(capsys, trained / "checkpoints", num_tokens=12, seed=3, ckpt_step=3) == first
    assert written(capsys, trained / "checkpoints" / "step_00000003", num_tokens=12, seed=4) != first


def test_greedy_text_is_what_the_whole_model_finds_likeliest(
    capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path, data: str
) -> None:
    model = load_model(trained).model
    prompt = list(PROMPT.encode())
    with torch.no_grad():
        tokens = list(prompt)
        for _ in range(8):
            ids = torch.tensor([tokens])
            places = torch.arange(len(tokens))[None]
            batch = MicroBatch(ids, ids, torch.ones_like(ids, dtype=torch.bool), places, torch.zeros(1).long())
            tokens.append(int(model.logits(model.hidden(None, batch, step=None))[-1, 0, :300].argmax()))
    assert list(generate(model, prompt, num_tokens=8, seq_length=16, eod=None, temperature=0)) == tokens[4:]
    expected = BytesTokenizer().decode(tokens) + "\n"
    assert written(capsys, trained, num_tokens=8, temperature=0.0) == expected
    # As likely is only the likeliest.
    assert written(capsys, trained, num_tokens=8, top_k=1) == expected
    assert written(capsys, trained, num_tokens=8, top_p=1e-6) == expected
    for temperature in (1e-42, 1e-300):
        assert written(capsys, trained, num_tokens=8, temperature=temperature) == expected
    # One process, trained alike, has learned the same.
    train_on_ranks(tiny(tmp_path / "one", FLAGS, data=data))
    assert written(capsys, tmp_path / "one", num_tokens=8, temperature=0.0) == expected


def test_text_can_be_longer_than_what_the_model_sees_and_ends_with_a_document(trained: Path) -> None:
    model = load_model(trained).model
    prompt = list(b"0123456789")
    long = list(generate(model, prompt, num_tokens=20, seq_length=16, eod=None, temperature=0))
    assert len(long) == 20
    again = generate(model, [*prompt, *long[:15]], num_tokens=5, seq_length=16, eod=None, temperature=0)
    assert list(again) == long[15:]  # of what lies before the last 16 tokens nothing is known
    assert (
        list(generate(model, prompt, num_tokens=20, seq_length=16, eod=long[4], temperature=0))
        == long[: long.index(long[4])]
    )


def test_mistakes_are_told(tmp_path: Path, trained: Path) -> None:
    for arguments, sentence in (
        (Arguments(load=tmp_path / "none"), f"{tmp_path}/none holds no checkpoint"),
        (Arguments(load=trained, ckpt_step=4), "ckpt_step=4 is not in .*; the steps there: 3"),
        (Arguments(load=trained, prompt="\ud800"), "the prompt '.ud800' cannot be turned into tokens"),
        (Arguments(load=trained, temperature=-1.0), "--temperature -1.0 must be a number from 0 on"),
        (Arguments(load=trained, temperature=math.nan), "--temperature nan must be a number from 0 on"),
        (Arguments(load=trained, temperature=math.inf), "--temperature inf must be a number from 0 on"),
        (Arguments(load=trained, top_p=0.0), "--top-p 0.0 must be above 0"),
        (Arguments(load=trained, top_p=math.nan), "--top-p nan must be above 0"),
        (Arguments(load=trained, top_k=-1), "--top-k -1 and --num-tokens 200 must not be negative"),
    ):
        with pytest.raises(UserError, match=sentence):
            main(arguments)


@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_a_run_ends_with_a_sample(tmp_path: Path, data: str, prompt: str) -> None:
    argv = [*tiny(tmp_path / "run", f"{FLAGS} --sample-tokens 5", data=data), "--sample-prompt", prompt]
    stopped = call_main(argv)
    assert "stopped after step 3" in stopped.output
    assert "a sample after" not in stopped.output
    ended = call_main([*tiny(tmp_path / "run", f"{FLAGS} --sample-tokens 5 --train-iters 3", data=data), *argv[-2:]])
    assert ended.status == 0, ended
    assert f"\na sample after step 3, from {prompt!r}:\n\n{prompt}" in ended.output


def test_made_up_tokens_are_no_text_and_have_no_sample(tmp_path: Path) -> None:
    ended = call_main(tiny(tmp_path / "run", "--sample-prompt hello --exit-interval 1"))
    assert ended.status == 0 and "a sample" not in ended.output
