"""Tests of runs with plug-ins from outside: resuming without them, and the tools that read their checkpoints.

Every command here is a process of its own, in which nothing is registered yet.
"""

import json
import pickle
from pathlib import Path

import pytest
import torch
from jobs import run_job, steps_of, tiny
from plugged import EXAMPLES, forgotten, plug
from saved_runs import read_whole
from torch import Tensor

from megatronish.commands import convert, draw, preprocess, verify
from megatronish.commands.main import COMMANDS
from megatronish.config.read import read_config
from megatronish.formats.safetensors import read_folder
from megatronish.launch.place import Place
from megatronish.train.run import train

BLOCK = f"{plug('parallel_block')} --block parallel"
HERE = "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --device cpu --eval-iters 0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with the block of a plug-in."""
    folder = tmp_path_factory.mktemp("run")
    ended = run_job(tiny(folder / "run", f"{BLOCK} --tp 2 --train-iters 2"), folder)
    assert ended.status == 0, ended
    assert f"plug-in {EXAMPLES / 'parallel_block.py'}: " in ended.output
    return folder / "run"


def test_a_run_goes_on_with_its_config_alone_and_not_without_its_plug_in(tmp_path: Path, run: Path) -> None:
    text = (run / "config.toml").read_text()
    assert f'plugin = ["{EXAMPLES / "parallel_block.py"}"]' in text
    again = run_job(["--config", str(run / "config.toml"), "--dp", "2", "--tp", "1", "--train-iters", "3"], tmp_path)
    assert again.status == 0, again
    assert sorted(steps_of(run)) == [1, 2, 3]
    without = run_job(tiny(run, "--train-iters 4"), tmp_path)
    assert without.status == 2
    assert f"it had --plugin {EXAMPLES / 'parallel_block.py'}, which is missing" in without.errors
    assert "model.block was parallel and is transformer" in without.errors
    named = run_job(tiny(run, "--block parallel --train-iters 4"), tmp_path)
    assert named.status == 2
    assert "block must be one of transformer; others are those of plug-ins (--plugin)" in named.errors


def test_a_plug_in_that_has_moved_is_the_same_plug_in(tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "early_stop.py"
    moved.parent.mkdir()
    moved.write_text((EXAMPLES / "early_stop.py").read_text())
    for number, plugin in enumerate((EXAMPLES / "early_stop.py", moved), start=1):
        flags = f"--plugin {plugin} --hook early_stop --train-iters {number}"
        ended = run_job(tiny(tmp_path / "run", flags), tmp_path)
        assert ended.status == 0, ended
    assert sorted(steps_of(tmp_path / "run")) == [1, 2]


def test_weights_of_a_plug_in_s_block_start_another_run(tmp_path: Path, run: Path) -> None:
    words = f"--load {run} --finetune --use-checkpoint-args --train-iters 1 --seq-length 16"
    flags = f"{words} --micro-batch-size 1 --lr 0.1 --mock-data --device cpu --eval-iters 0"
    without = run_job([*flags.split(), "--run-dir", str(tmp_path / "a")], tmp_path)
    assert without.status == 2
    told = f"is of a model with block=parallel, which a plug-in of its run registers; add --plugin {EXAMPLES}"
    assert told in without.errors
    ended = run_job([*flags.split(), *plug("parallel_block").split(), "--run-dir", str(tmp_path / "a")], tmp_path)
    assert ended.status == 0, ended


def test_generation_and_evaluation_need_the_plug_in_to_be_named(tmp_path: Path, run: Path) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " ".join(str(n % 90) for n in range(40))}))
    calls = {
        "generate": ["--load", str(run), "--prompt", "1 2 3", "--num-tokens", "4", "--device", "cpu", "--tp", "2"],
        "evaluate": ["--load", str(run), "--data-path", str(tmp_path / "text.jsonl"), "--device", "cpu", "--dp", "2"],
    }
    for tool, words in calls.items():
        without = run_job(words, tmp_path, main=COMMANDS[tool].main())
        assert without.status == 2
        assert f"add --plugin {EXAMPLES / 'parallel_block.py'}, which runs that code" in without.errors
        ended = run_job([*words, *plug("parallel_block").split()], tmp_path, main=COMMANDS[tool].main())
        assert ended.status == 0, ended


def test_conversion_keeps_the_block_or_refuses_it(tmp_path: Path, run: Path) -> None:
    plugin = plug("parallel_block").split()
    words = ["--from", "megatronish", "--load", str(run), "--save"]
    without = run_job([*words, str(tmp_path / "none"), "--to", "megatronish"], tmp_path, main=convert.main)
    assert (without.status, "block=parallel, which a plug-in" in without.errors) == (2, True)
    for target, told in (("hf", "gpt2 not block=parallel"), ("megatron", "no counterpart for block=parallel")):
        refused = run_job([*words, str(tmp_path / target), "--to", target, *plugin], tmp_path, main=convert.main)
        assert (refused.status, told in refused.errors) == (2, True), refused
    done = run_job([*words, str(tmp_path / "ours"), "--to", "megatronish", *plugin], tmp_path, main=convert.main)
    assert done.status == 0, done
    before = {
        name: each for name, each in read_whole(max((run / "checkpoints").glob("step_*"))).items() if "model." in name
    }
    after = read_whole(tmp_path / "ours" / "step_00000000")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    asked = run_job(["--load", str(tmp_path / "ours"), "--device", "cpu"], tmp_path, main=COMMANDS["generate"].main())
    assert f"add --plugin {EXAMPLES / 'parallel_block.py'}, which runs that code" in asked.errors


def test_a_schedule_of_a_plug_in_is_verified_and_drawn(tmp_path: Path) -> None:
    flags = f"{plug('reversed_gpipe')} --pipeline-schedule reversed-gpipe --pp 2 --steps 2"
    verified = run_job(tiny(tmp_path / "run", flags), tmp_path, main=verify.main)
    assert verified.status == 0, verified
    assert "trains the same model" in verified.output
    words = ["--schedule", "reversed-gpipe", "--stages", "2", "--microbatches", "2"]
    drawn = run_job([*words, *plug("reversed_gpipe").split()], tmp_path, main=draw.main)
    assert drawn.status == 0, drawn
    assert drawn.output.splitlines()[:2] == [
        "stage 0:  F0  F1   .   .   .  B1  --  B0  --",
        "stage 1:   .  F0  F1  B1  --  B0  --   .   .",
    ]


def test_a_schedule_that_hangs_is_refused_with_its_picture(tmp_path: Path) -> None:
    text = (EXAMPLES / "reversed_gpipe.py").read_text().replace("return forwards + backwards", "return forwards")
    (tmp_path / "no_backward.py").write_text(text)
    flags = f"--plugin {tmp_path / 'no_backward.py'} --pipeline-schedule reversed-gpipe --pp 2"
    ended = run_job(tiny(tmp_path / "run", flags), tmp_path)
    assert ended.status == 2, ended
    assert "pipeline_schedule=reversed-gpipe cannot run 4 micro-batches on 2 stages" in ended.errors


def train_from_file(argv: list[str]) -> int:
    """A rank that was spawned and not forked: it has a pickled config, and imported no plug-in."""
    return train(pickle.loads(Path(argv[0]).read_bytes()), [], Place())


def test_a_spawned_rank_imports_the_plug_ins_itself(tmp_path: Path) -> None:
    with forgotten():
        config = read_config(tiny(tmp_path / "run", f"{BLOCK} --train-iters 1")).config
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    ended = run_job([str(tmp_path / "config")], tmp_path, main=train_from_file)
    assert ended.status == 0, ended


def test_a_tokenizer_of_a_plug_in_goes_all_the_way(tmp_path: Path) -> None:
    alphabet, texts = tmp_path / "alphabet.txt", tmp_path / "texts.jsonl"
    alphabet.write_text("abcdefghijklmnopqrstuvwxyz .")
    texts.write_text("".join(json.dumps({"text": f"text number {'abc'[n % 3]}."}) + "\n" for n in range(60)))
    tokenizer = ["--tokenizer-type", "characters", "--tokenizer-model", alphabet, *plug("characters").split()]
    prefix = tmp_path / "data"
    words = ["--input", texts, "--output-prefix", prefix, "--append-eod", "--workers", "2", *tokenizer]
    made = run_job(list(map(str, words)), tmp_path, main=preprocess.main)
    assert made.status == 0, made
    flags = [*HERE.split(), "--micro-batch-size", "2", "--train-iters", "2", "--lr", "1e-2"]
    argv = [*flags, "--run-dir", tmp_path / "run", "--data-path", f"{prefix}_text_document", *tokenizer]
    trained = run_job([*map(str, argv), "--sample-prompt", "abc", "--sample-tokens", "3"], tmp_path)
    assert trained.status == 0, trained
    assert "vocabulary 30 padded to" in trained.output
    asked = ["--load", str(tmp_path / "run"), "--prompt", "text", "--num-tokens", "5", "--device", "cpu"]
    without = run_job(asked, tmp_path, main=COMMANDS["generate"].main())
    assert without.status == 2
    assert "--tokenizer-type characters is not known; use one of" in without.errors
    assert "or name the plug-in that registers it with --plugin" in without.errors
    written = run_job([*asked, *plug("characters").split()], tmp_path, main=COMMANDS["generate"].main())
    assert written.status == 0, written
    assert written.output.startswith("text")


def test_a_family_of_a_plug_in_is_written_read_and_trained(tmp_path: Path) -> None:
    kind = "--normalization RMSNorm --apply-layernorm-1p --geglu --position-embedding-type rope --disable-bias-linear"
    kind = f"{kind} --softmax-scale 0.5 --attn-logit-softcapping 5 --embedding-multiplier {24**0.5}"
    model = f"{kind} --hidden-dropout 0 --attention-dropout 0"
    assert run_job(tiny(tmp_path / "run", f"{model} --train-iters 1"), tmp_path).status == 0
    plugin = plug("vaultgemma").split()
    words = ["--from", "megatronish", "--to", "hf", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "hf")]
    without = run_job(words, tmp_path, main=convert.main)
    assert (without.status, "gemma2 not norm_placement=pre" in without.errors) == (2, True), without
    done = run_job([*words, *plugin], tmp_path, main=convert.main)
    assert done.status == 0, done
    keys = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (keys["model_type"], keys["query_pre_attn_scalar"]) == ("vaultgemma", 4)
    theirs: dict[str, Tensor] = {name: each.read() for name, each in read_folder(tmp_path / "hf").items()}
    ours = read_whole(max((tmp_path / "run" / "checkpoints").glob("step_*")))
    norm, down = ours["model.layers.1.mlp_norm.weight"], ours["model.layers.1.mlp.fc2.weight"]
    assert torch.equal(theirs["model.layers.1.pre_feedforward_layernorm.weight"], norm)
    assert torch.equal(theirs["model.layers.1.mlp.down_proj.weight"], down)
    # What is loaded computes what was saved: its first loss is that of a run that goes on from the same weights.
    common = "--train-iters 1 --vocab-size 101 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    losses = []
    for folder, source in (("a", f"--load-hf {tmp_path / 'hf'}"), ("b", f"--load {tmp_path / 'run'} --finetune")):
        flags = f"{common} {source} {'--tp 2' if folder == 'a' else model}"
        argv = [*flags.split(), *plugin, *["--mock-data", "--device", "cpu", "--eval-iters", "0"]]
        sizes = ["--num-layers", "2", "--hidden-size", "24", "--num-attention-heads", "12", "--ffn-hidden-size", "48"]
        ended = run_job([*argv, *(sizes if folder == "b" else ()), "--run-dir", str(tmp_path / folder)], tmp_path)
        assert ended.status == 0, ended
        losses.append(steps_of(tmp_path / folder)[1].loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    unknown = run_job([*f"{common} --load-hf {tmp_path / 'hf'} --mock-data --device cpu".split()], tmp_path)
    assert "model_type 'vaultgemma' is not supported; supported are gpt2, llama" in unknown.errors
