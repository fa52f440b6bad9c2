"""Tests of the files of a chat: a model that is converted has the template of its run, and stops at its ends."""

import json
from pathlib import Path

from chat_models import IM, write_chat_model
from chat_tokenizers import said, write_lines
from jobs import call_main

from megatronish.config.sections.data import ChatConfig
from megatronish.data.chat.template import built_in_template
from megatronish.formats.chat_files import trained_with, with_chat_files
from megatronish.formats.convert import convert
from megatronish.formats.hf.tensors import describe
from megatronish.inference.load import find_trained

STOP, NEW = 257, 259


def trained(folder: Path, flags: str) -> Path:
    """A run of two steps on chats."""
    write_lines(folder / "chats.jsonl", [said("a", "b")] * 8)
    run = f"--load-hf {folder}/base --dataset-type chat --data-path {folder}/chats.jsonl --seq-length 64 --split 1,0,0"
    sizes = "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0.001 --eval-iters 0"
    done = call_main([*run.split(), *sizes.split(), *flags.split(), "--run-dir", str(folder / "run")])
    assert done.status == 0, done.errors
    return folder / "run"


def test_a_model_is_written_with_the_template_that_its_run_named(tmp_path: Path) -> None:
    base = write_chat_model(tmp_path / "base", template=None)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP, "top_p": 0.5}))
    run = trained(tmp_path, "--chat-template chatml")
    convert(run, tmp_path / "out", source="megatronish", target="hf")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == built_in_template("chatml")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [STOP, NEW], "top_p": 0.5}
    assert set(find_trained(tmp_path / "out").description.stops) == {STOP, NEW}


def test_an_adapter_brings_its_template_along(tmp_path: Path) -> None:
    base = write_chat_model(tmp_path / "base", template=None)
    run = trained(tmp_path, "--chat-template chatml --adapter-type lora")
    for target, files in (("hf", tmp_path / "hf"), ("megatronish", tmp_path / "ours" / "step_00000000" / "tokenizer")):
        save = tmp_path / ("ours" if target == "megatronish" else target)
        convert(base, save, source="hf", target=target, adapter=run)
        assert (files / "chat_template.jinja").read_text() == built_in_template("chatml")
        assert json.loads((files / "generation_config.json").read_text()) == {"eos_token_id": [STOP, NEW]}
    assert not (base / "chat_template.jinja").exists()


def test_a_model_with_its_own_template_keeps_its_files(tmp_path: Path) -> None:
    base = write_chat_model(tmp_path / "base")
    description = describe(base)
    with with_chat_files(description, trained_with([base])) as described:
        assert described == description
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [STOP, NEW]}))
    with with_chat_files(describe(base), ChatConfig(chat_template="chatml")) as described:
        assert described.tokenizer_files["generation_config.json"] == base / "generation_config.json"
        assert IM[1] in described.tokenizer_files["chat_template.jinja"].read_text()
