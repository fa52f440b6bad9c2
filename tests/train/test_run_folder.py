"""Tests of run folders that stand alone: used from other folders, moved, copied, without the files they began with."""

import os
import shutil
import tomllib
from pathlib import Path

import pytest
from chat_tokenizers import said, save_tokenizer, write_lines
from jobs import Finished, call_main, checkpoints_of, run_job, state_of, steps_of, tiny, train_on_ranks, write_tokens

from megatronish.commands.main import run
from megatronish.config.config import Config
from megatronish.config.portable import HERE, absolute
from megatronish.config.settings import read_file
from megatronish.formats.start import read_arguments
from megatronish.train.folder import differences

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
CHATS = "--vocab-size 300 --dataset-type chat --seq-length 64"


def called(folder: Path, scratch: Path, *words: str | Path) -> Finished:
    """`megatronish WORDS` started in `folder`."""
    return run_job([str(word) for word in words], scratch, main=run, plant=os.chdir, plant_args=(folder,))


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that was given everything by relative paths, moved; what it began with has gone."""
    home = tmp_path_factory.mktemp("home")
    save_tokenizer(home / "tok", ["<|user|>", "<|assistant|>"])
    (home / "mine.jinja").write_text(TEMPLATE)
    write_lines(home / "chats.jsonl", [said("How are you?", "Well.")] * 40)
    flags = f"{CHATS} --tokenizer-model tok --chat-template mine.jinja --train-iters 2 --save-interval 1"
    argv = tiny(Path("runs/mine"), flags, data="--train-data-path chats.jsonl")
    ended = called(home, home, "pretrain", *argv)
    assert ended.status == 0, ended
    shutil.move(home / "runs/mine", home / "moved")
    shutil.rmtree(home / "tok")
    (home / "mine.jinja").unlink()
    return home / "moved"


def test_a_moved_run_generates_chats_and_is_evaluated_from_anywhere(moved: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "text.jsonl", [{"text": "a little text to be read"}] * 20)
    for words in (
        ("generate", "--load", moved, "--prompt", "ab", "--num-tokens", "3"),
        ("evaluate", "--load", moved, "--data-path", "text.jsonl"),
        ("convert", "--from", "megatronish", "--load", moved, "--to", "hf", "--save", tmp_path / "hf"),
    ):
        ended = called(tmp_path, tmp_path, *words)
        assert ended.status == 0, ended
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (moved / "tokenizer" / "tokenizer.json").read_bytes()


def test_the_template_of_a_moved_run_is_its_copy(moved: Path) -> None:
    from megatronish.inference.chat import ChatPrompts
    from megatronish.inference.load import find_trained
    from megatronish.tokenizer.build import build_tokenizer

    found = find_trained(moved)
    tokenizer = build_tokenizer(found.description.data)
    prompts = ChatPrompts.of(found, tokenizer, template=None, seq_length=64)
    assert len(prompts.encode([{"role": "user", "content": "ab"}])) == 4


def test_a_moved_run_goes_on_with_its_config_from_another_folder(moved: Path, tmp_path: Path) -> None:
    shutil.copytree(moved, tmp_path / "copy")
    text = (tmp_path / "copy" / "config.toml").read_text()
    data = tomllib.loads(text)
    assert (data["log"]["run_dir"], data["data"]["tokenizer_model"]) == (HERE, f"{HERE}/tokenizer")
    assert data["data"]["train_data_path"] == [str(moved.parent / "chats.jsonl")]
    ended = called(Path("/"), tmp_path, "pretrain", "--config", tmp_path / "copy" / "config.toml", "--train-iters", "3")
    assert ended.status == 0, ended
    assert "continuing from" in ended.output and "data.tokenizer_model" not in ended.output
    assert sorted(steps_of(tmp_path / "copy")) == [1, 2, 3]
    assert sorted(steps_of(moved)) == [1, 2]
    assert (tmp_path / "copy" / "config.toml").read_text() == text.replace("train_iters = 2", "train_iters = 3")


def test_a_model_to_start_from_brings_its_tokenizer_from_its_run(moved: Path) -> None:
    assert read_arguments(moved, None).tokenizer["tokenizer_model"] == str(moved / "tokenizer")


def test_another_tokenizer_at_a_resume_is_told_and_takes_no_ones_place(tmp_path: Path) -> None:
    for name, controls in (("one", ["<a>"]), ("two", ["<b>"])):
        save_tokenizer(tmp_path / name, controls)
    data = f"--data-path {write_tokens(tmp_path / 'd', vocab_size=200)}"
    flags = "--vocab-size 300 --split 1,0,0 --save-interval 1 --train-iters"
    run_dir = tmp_path / "run"
    train_on_ranks(tiny(run_dir, f"{flags} 1 --tokenizer-model {tmp_path}/one", data=data))
    output = train_on_ranks(tiny(run_dir, f"{flags} 2 --tokenizer-model {tmp_path}/two", data=data))
    first, second = (state_of(run_dir, step) for step in (1, 2))
    assert f"the tokenizer {tmp_path}/two (sha256 {second['tokenizer'][:12]}) is not the one" in output
    assert f"{run_dir}/tokenizer (sha256 {first['tokenizer'][:12]})" in output
    assert (run_dir / "tokenizer" / "tokenizer.json").read_bytes() == (tmp_path / "one/tokenizer.json").read_bytes()
    other = run_dir / second["copies"]["data.tokenizer_model"]
    assert (other / "tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()


def test_checkpoints_that_lie_elsewhere_have_the_tokenizer_beside_them(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tok", [])
    data = f"--data-path {write_tokens(tmp_path / 'd', vocab_size=200)} --tokenizer-model {tmp_path}/tok/tokenizer.json"
    train_on_ranks(
        tiny(tmp_path / "run", f"--vocab-size 300 --split 1,0,0 --train-iters 1 --save {tmp_path}/save", data=data)
    )
    shutil.rmtree(tmp_path / "tok")
    shutil.rmtree(tmp_path / "run")
    assert called(Path("/"), tmp_path, "generate", "--load", tmp_path / "save", "--prompt", "a").status == 0


def test_here_is_the_folder_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        f'[log]\nrun_dir = "{HERE}/run"\n[data]\ndata_path = ["1", "{HERE}/d", "x{HERE}"]\n'
    )
    settings = {setting.field: setting.values for setting in read_file(tmp_path / "mine.toml").settings}
    assert settings == {"run_dir": (f"{tmp_path}/run",), "data_path": ("1", f"{tmp_path}/d", f"x{HERE}")}


def test_what_is_no_path_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.idx").touch()
    named = {"run_dir": "s3://bucket/run", "save": "runs/x", "chat_template": "chatml", "plugin": ("my.module",)}
    config = absolute(Config().with_fields(data_path=("0.3", "d[0:0.5]", "0.7", "gone"), **named))
    assert config.data.data_path == ("0.3", f"{tmp_path}/d[0:0.5]", "0.7", "gone")
    assert config == config.with_fields(**named | {"save": f"{tmp_path}/runs/x"})


def test_a_file_in_the_way_of_the_copy_is_left_alone(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tok", [])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer").write_text("mine")
    data = f"--data-path {write_tokens(tmp_path / 'd', vocab_size=200)} --tokenizer-model {tmp_path}/tok"
    ended = call_main(tiny(tmp_path / "run", "--vocab-size 300 --split 1,0,0 --train-iters 1", data=data))
    assert ended.status == 0, ended
    assert (tmp_path / "run" / "tokenizer").read_text() == "mine"
    assert checkpoints_of(tmp_path / "run")


def test_no_layers_of_further_predictions_are_none_in_two_spellings() -> None:
    none, zero, one = ({"model": {"mtp_num_layers": value}} for value in (None, 0, 1))
    assert differences(none, zero) == differences(zero, none) == {}
    assert differences(zero, one) == {"model.mtp_num_layers": (0, 1)}
    assert differences({"model": {"num_layers": 0}}, {"model": {"num_layers": None}}) != {}
