"""Tests of models that write no text: every command that runs a model says so, and ends with status 2."""

from pathlib import Path

import pytest
from conversions import to_hf
from jobs import tiny, train_on_ranks

from megatronish.commands.main import COMMANDS
from megatronish.commands.pretrain_bert import with_bert
from megatronish.core.errors import UserError
from megatronish.inference.load import load_model

RUNS_A_MODEL = tuple(name for name, command in COMMANDS.items() if command.arguments)
FLAGS = {"evaluate": ("--data-path README.md", "--tasks never-read")}
CALLS = [(name, flags) for name in RUNS_A_MODEL for flags in FLAGS.get(name, ("",))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of BERT, and its folder of Hugging Face."""
    folder = tmp_path_factory.mktemp("bert")
    train_on_ranks(with_bert(tiny(folder / "run", "--train-iters 1")))
    to_hf(folder / "run", folder / "hf")
    return {"run": folder / "run", "hf": folder / "hf"}


@pytest.mark.parametrize("kind", ["run", "hf"])
@pytest.mark.parametrize(("name", "flags"), CALLS, ids=[f"{name} {flags}".strip() for name, flags in CALLS])
def test_a_command_that_runs_a_model_refuses_a_bert(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str, flags: str, kind: str
) -> None:
    assert COMMANDS[name].main()([*flags.split(), "--load", str(models[kind]), "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(models[kind])) and line.endswith(
        "is model_type=bert, which sees both sides of a token and so writes no text; name a GPT, or measure the loss "
        "of this one with --eval-iters of pretrain_bert.py"
    )


def test_a_program_that_loads_a_model_for_text_gets_the_same_error(models: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="is model_type=bert, which sees both sides of a token and so writes no text"):
        load_model(models["hf"])
