"""Tests of the recipes: each fits its machine with the memory that it names, and its dry run says the same."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from paths import ROOT
from recipe_heads import GIB, WIDTH, Machine, body_of, config_of, flags_of, head_of, memory_of, vocab_size
from sweeps import some_of

from megatronish.commands.main import run
from megatronish.commands.recipes import listed, read_recipe, recipes
from megatronish.config.sections.model import ModelConfig
from megatronish.config.shipped import shipped_recipes
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.formats.hf.config import read_hf_config

RECIPES = shipped_recipes()
FILLED = 0.87
"""Part of a device that is filled at most, as in a plan."""
PARAMETERS = {
    "gpt2": 124_439_808,
    "pythia-1.4b": 1_414_647_808,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "smollm3-3b": 3_075_098_624,
}
"""Parameters of the models as they are published: the hub counts them in the weights."""


def test_every_model_has_a_recipe_and_the_published_number_of_parameters() -> None:
    assert {path.parent.name for path in RECIPES.values()} == PARAMETERS.keys()
    for path in RECIPES.values():
        shape = read_hf_config(path.parent)
        count = num_parameters(ModelConfig(**shape.model), vocab_size=shape.vocab_size, seq_length=shape.seq_length)
        assert count == PARAMETERS[path.parent.name], path


def test_every_task_and_every_machine_has_a_recipe() -> None:
    kinds = [path.stem.split("-") for path in RECIPES.values()]
    assert {task for task, _ in kinds} == {"pretrain", "sft", "lora", "qlora", "dpo"}
    assert {machine for _, machine in kinds} == {"1x24gb", "1x80gb", "8x80gb", "64x80gb"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_sound_fits_its_machine_and_says_what_it_takes(name: str) -> None:
    path = RECIPES[name]
    config, machine = config_of(path), Machine.of(path)
    assert config.layout.world_size == machine.gpus
    assert memory_of(path, config).total < FILLED * machine.gib * GIB
    assert path.read_text(encoding="utf-8") == head_of(path) + body_of(path), "python tests/support/recipe_heads.py"
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= WIDTH
    recipe = read_recipe(name, path)
    assert ("one GPU" if machine.gpus == 1 else f"{machine.gpus} GPUs") in recipe.machine
    assert f'{recipe.hub}"' in body_of(path), "the model of the first line is that of the config"


@pytest.mark.parametrize("name", [name for name in RECIPES if "/pretrain-" in name])
def test_a_pretraining_recipe_has_the_shape_of_its_model(name: str) -> None:
    model = config_of(RECIPES[name]).model
    told = {
        field: value for field, value in read_hf_config(RECIPES[name].parent).model.items() if "dropout" not in field
    }
    assert {field: getattr(model, field) for field in told} == told


MOST_LAYERS = 16  # of a dry run in `make test`, which takes half a second of CPU for each
STEPPED = [name for name in RECIPES if "/dpo-" not in name]  # a rank is stepped on made-up texts, not on pairs


def in_turn() -> str:
    """The recipe whose turn it is, of those of few layers: another one whenever the package is changed."""
    sources = sorted((ROOT / "megatronish").rglob("*.py"))
    few = [name for name in STEPPED if config_of(RECIPES[name]).model.num_layers <= MOST_LAYERS]
    return few[zlib.crc32(b"".join(source.read_bytes() for source in sources)) % len(few)]


@pytest.mark.processes
@pytest.mark.parametrize("name", some_of(STEPPED, [in_turn()]))
def test_the_dry_run_of_a_recipe_takes_the_memory_that_it_names(name: str, tmp_path: Path) -> None:
    path, report = RECIPES[name], tmp_path / "report.json"
    flags = [*flags_of(path), "--dry-run", "--rank", "0", "--dry-run-report", str(report)]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(report.read_text())["ranks"]
    assert rank["peak_bytes"] == pytest.approx(rank["expected_memory"]["total"], rel=0.05)
    assert rank["peak_bytes"] < 1.05 * memory_of(path, config_of(path)).total


def test_recipes_are_listed_and_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(RECIPES) + 1
    assert run(["recipes", "--search", "Mixtral"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        name for name in RECIPES if name.startswith("mixtral")
    ]
    assert run(["recipes", "--search", "nothing"]) == 2
    assert "--search nothing is in no recipe" in capsys.readouterr().err


def test_a_recipe_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["recipes", "--copy", "llama-3.1-8b/lora-1x24gb"]) == 0
    copy = tmp_path / "llama-3.1-8b-lora-1x24gb.toml"
    assert copy.read_bytes() == RECIPES["llama-3.1-8b/lora-1x24gb"].read_bytes()
    mistakes = {
        "--copy llama-3.1-8b/lora-1x24gb": "exists and is not replaced",
        "--copy llama": "--copy llama is no recipe",
        "--output x.toml": "--output x.toml is the file of a copy",
    }
    for flags, complaint in mistakes.items():
        assert run(["recipes", *flags.split()]) == 2
        assert complaint in capsys.readouterr().err


def test_the_page_of_recipes_has_what_the_command_lists() -> None:
    page = (ROOT / "docs" / "RECIPES.md").read_text(encoding="utf-8")
    for recipe in recipes():
        assert f"| [{recipe.name}](../recipes/{recipe.name}.toml) | {' | '.join(recipe[1:])} |\n" in page
    assert len(listed()) == len(RECIPES) + 1
    assert page.count("](../recipes/") == len(RECIPES)
    assert f"{len(RECIPES)} for {len(PARAMETERS)} named models" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_vocabularies_are_those_of_the_models() -> None:
    assert vocab_size(RECIPES["llama-3.1-8b/lora-1x24gb"]) == 128_256
