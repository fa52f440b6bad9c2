"""Tests of the configs that come with megatronish: found by name in any folder, with the commands for their data."""

import shlex
from pathlib import Path

import pytest
from paths import ROOT

from megatronish.commands import collect_corpus, preprocess, train_tokenizer
from megatronish.config.check import missing_files
from megatronish.config.read import ConfigError, read_config
from megatronish.config.shipped import config_path, shipped_configs

MAINS = {
    "collect-corpus": collect_corpus.main,
    "train-tokenizer": train_tokenizer.main,
    "preprocess": preprocess.main,
}


def test_the_configs_of_a_checkout_are_shipped() -> None:
    assert list(shipped_configs().values()) == sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("name", ["demo", "demo.toml"])
def test_a_config_is_found_by_name_and_a_file_of_that_name_comes_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # the folder of its data is no file
    config = read_config(["--config", name, "--mock-data"]).config
    assert (config.model.num_layers, config.log.run_dir) == (8, "runs/demo")
    (tmp_path / "demo.toml").write_text("")
    assert config_path("demo.toml") == Path("demo.toml")
    assert config_path("elsewhere/demo.toml") == Path("elsewhere/demo.toml")


def test_the_demo_with_experts_is_found_by_name_and_asks_for_the_data_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config(["--config", "demo-moe", "--mock-data"]).config
    assert (config.model.num_experts, config.layout.world_size, config.log.run_dir) == (8, 8, "runs/demo-moe")
    with pytest.raises(ConfigError, match="make them in this folder with: megatronish collect-corpus"):
        read_config(["--config", "demo-moe"])


def test_an_unknown_name_is_refused_with_those_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text("")
    with pytest.raises(ConfigError, match=r"--config demmo does not exist; there are own.toml, demo-moe, demo, gpt2-"):
        read_config(["--config", "demmo"])


@pytest.mark.long
@pytest.mark.parametrize(("name", "files"), [("demo", 2), ("quick", 1)])
def test_missing_data_of_a_demo_is_made_by_the_commands_that_the_message_names(
    name: str, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        read_config(["--config", name])
    problems = error.value.problems
    assert len([problem for problem in problems if "in this folder with: megatronish " in problem]) == files
    commands = problems[0].partition("make them in this folder with: ")[2].partition("; or use --mock-data")[0]
    for command in commands.split(" && "):
        program, which, *flags = shlex.split(command)
        assert program == "megatronish"
        few = {"collect-corpus": ["--max-bytes", "300000"], "train-tokenizer": ["--vocab-size", "600"]}
        assert MAINS[which]([*flags, *few.get(which, [])]) == 0
    assert missing_files(read_config(["--config", name]).config.data) == []
