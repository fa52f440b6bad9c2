"""Tests of a run that starts from a foreign model: it computes with its weights, in every layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import MOCK, call_main, checkpoints_of, state_of, steps_of, tiny, train_on_ranks, write_tokens
from safetensors.torch import save_file
from saved_runs import read_whole
from sweeps import some_of
from test_bad_input import assert_told
from tokenizers import Tokenizer, models
from torch import Tensor

from megatronish.formats.convert import convert

ANEW = "step, optimizer and data order start from the beginning"
VOCABULARY, HIDDEN, FFN, LENGTH = 101, 24, 32, 16
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": False,
    "eos_token_id": 100,
    "bos_token_id": 1,
    "a_key_of_its_own": [1, 2],
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
    "eos_token_id": 100,
}


def llama_tensors() -> dict[str, Tensor]:
    """Under Hugging Face's names."""
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    table = (VOCABULARY, HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": table, "model.norm": (HIDDEN,), "lm_head": table}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    return drawn({f"{name}.weight": shape for name, shape in shapes.items()})


def gpt2_tensors() -> dict[str, Tensor]:
    layer: dict[str, tuple[int, ...]] = {
        "ln_1.weight": (HIDDEN,),
        "ln_1.bias": (HIDDEN,),
        "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
        "attn.c_attn.bias": (3 * HIDDEN,),
        "attn.c_proj.weight": (HIDDEN, HIDDEN),
        "attn.c_proj.bias": (HIDDEN,),
        "ln_2.weight": (HIDDEN,),
        "ln_2.bias": (HIDDEN,),
        "mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN),
        "mlp.c_fc.bias": (4 * HIDDEN,),
        "mlp.c_proj.weight": (4 * HIDDEN, HIDDEN),
        "mlp.c_proj.bias": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, HIDDEN), "wpe.weight": (LENGTH, HIDDEN)}
    shapes |= {"ln_f.weight": (HIDDEN,), "ln_f.bias": (HIDDEN,)}
    shapes |= {f"h.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    return drawn({f"transformer.{name}": shape for name, shape in shapes.items()})


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights that a model may have after some training: norms near 1, matrices far from their initial size."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name or "ln_" in name else 0.0)
        for name, shape in shapes.items()
    }


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A Hugging Face folder with a tokenizer of as many words."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = {f"w{n}": n for n in range(VOCABULARY - 1)} | {"</s>": VOCABULARY - 1}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", LLAMA, llama_tensors())


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpt2") / "model", GPT2, gpt2_tensors())


def run_of(run_dir: Path, flags: str = "", *, data: str = MOCK) -> list[str]:
    """A command line without a word about the model; `flags` take the place of those here."""
    base = {
        "--micro-batch-size": "1",
        "--global-batch-size": "4",
        "--train-iters": "2",
        "--lr": "1e-2",
        "--eval-iters": "0",
        "--device": "cpu",
    }
    others = flags.split()
    words = [word for name, value in base.items() if name not in others for word in (name, value)]
    return [*words, *data.split(), "--run-dir", str(run_dir), *others]


def unchanged(run_dir: Path, flags: str, *, world_size: int = 1) -> dict[str, Tensor]:
    """The weights of a run after a step that moves nothing, by our names without the prefix."""
    still = "--train-iters 1 --optimizer sgd --lr 1e-30 --weight-decay 0"
    train_on_ranks(run_of(run_dir, f"{flags} {still}"), world_size=world_size)
    whole = read_whole(run_dir / "checkpoints" / "step_00000001")
    return {name.removeprefix("model."): tensor for name, tensor in whole.items() if not name.startswith("optimizer.")}


# From a Hugging Face folder


def test_a_run_begins_with_the_weights_of_the_folder(tmp_path: Path, llama: Path) -> None:
    theirs, ours = llama_tensors(), unchanged(tmp_path / "run", f"--load-hf {llama}")
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    stacked = torch.cat([theirs[f"{attention}.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(ours["layers.1.attention.qkv.weight"], stacked)
    gated = torch.cat([theirs[f"{mlp}.gate_proj.weight"], theirs[f"{mlp}.up_proj.weight"]])
    assert torch.equal(ours["layers.1.mlp.fc1.weight"], gated)
    assert torch.equal(ours["head.weight"], theirs["lm_head.weight"])
    assert sum(map(torch.numel, ours.values())) == sum(map(torch.numel, theirs.values()))


LAYOUTS = [
    ("llama", "--tp 2 --sequence-parallel", 2),
    ("llama", "--dp 2 --zero-stage 3", 2),
    ("llama", "--pp 2 --zero-stage 1", 2),
    ("llama", "--tp 2 --dp 2 --zero-stage 2 --optimizer-cpu-offload", 4),
    ("gpt2", "--tp 2 --pp 2", 4),
    ("gpt2", "--dp 2 --zero-stage 3 --param-cpu-offload", 2),
]


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory, llama: Path, gpt2: Path) -> dict[str, Path]:
    """A run of each model in one process."""
    found = {}
    for name, folder in (("llama", llama), ("gpt2", gpt2)):
        found[name] = tmp_path_factory.mktemp(name) / "run"
        output = train_on_ranks(run_of(found[name], f"--load-hf {folder}"))
        assert f"took the weights of {folder}: {ANEW}" in output
    return found


@pytest.mark.parametrize(
    ("name", "layout", "world_size"), some_of(LAYOUTS, LAYOUTS[3:]), ids=lambda value: str(value).replace(" ", "")
)
def test_every_layout_starts_from_the_same_model(
    tmp_path: Path, request: pytest.FixtureRequest, serial: dict[str, Path], name: str, layout: str, world_size: int
) -> None:
    folder = request.getfixturevalue(name)
    train_on_ranks(run_of(tmp_path / "run", f"--load-hf {folder} {layout}"), world_size=world_size)
    here, there = steps_of(tmp_path / "run"), steps_of(serial[name])
    for step, seen in there.items():
        assert here[step] == pytest.approx(seen, rel=1e-5), f"step {step}"


@pytest.mark.parametrize("flags", ["--bf16 --tp 2 --zero-stage 0", "--fp16 --loss-scale 16 --dp 2 --zero-stage 3"])
def test_masters_keep_what_sixteen_bits_cannot(tmp_path: Path, gpt2: Path, flags: str) -> None:
    ours = unchanged(tmp_path / "run", f"--load-hf {gpt2} {flags}", world_size=2)
    assert torch.equal(ours["layers.0.mlp.fc2.weight"], gpt2_tensors()["transformer.h.0.mlp.c_proj.weight"].t())


def test_a_run_that_has_begun_goes_on_with_its_own_checkpoints(tmp_path: Path, llama: Path) -> None:
    """The same launch script, started twice."""
    argv = run_of(tmp_path / "run", f"--load-hf {llama} --train-iters 3 --exit-interval 2")
    assert ANEW in train_on_ranks(argv)
    output = train_on_ranks(argv)
    assert "continuing from" in output and ANEW not in output and "changed since" not in output
    assert checkpoints_of(tmp_path / "run") == ["latest", "step_00000002", "step_00000003"]
    refused = call_main([*argv, "--seed", "7"])
    assert_told(refused, "training.seed was 1234 and is 7")


def test_a_run_goes_back_to_hugging_face_with_the_config_it_came_with(tmp_path: Path, llama: Path) -> None:
    data = f"--data-path {write_tokens(tmp_path / 'data')} --split 1,0,0"
    for part in ("--exit-interval 1", ""):  # a resumed run still knows
        train_on_ranks(run_of(tmp_path / "run", f"--load-hf {llama} {part} --seq-length 8", data=data))
    assert state_of(tmp_path / "run", 2)["origin"] == {"hf": LLAMA}
    convert(tmp_path / "run", tmp_path / "back", source="megatronish", target="hf")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: value for key, value in back.items() if key not in ("dtype", "torch_dtype")} == LLAMA
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()


def test_a_dry_run_shows_the_model_of_the_folder(tmp_path: Path, llama: Path) -> None:
    shown = call_main(run_of(tmp_path / "run", f"--load-hf {llama} --dry-run"))
    assert shown.status == 0
    count = sum(map(torch.numel, llama_tensors().values()))
    assert f"parameters: {count:,}, vocabulary 101" in shown.output
    assert "a step: 4 samples of 16" in shown.output


def test_what_training_alone_asks_may_be_set(tmp_path: Path, llama: Path) -> None:
    flags = "--attention-dropout 0.1 --hidden-dropout 0.2 --init-method-std 0.5 --make-vocab-size-divisible-by 7"
    output = train_on_ranks(run_of(tmp_path / "run", f"--load-hf {llama} {flags} --num-layers 2 --seq-length 32"))
    assert f"note: seq_length=32 is longer than the 16 tokens that --load-hf {llama} was made for" in output
    config = state_of(tmp_path / "run", 2)["config"]
    assert (config["model"]["hidden_dropout"], config["model"]["rotary_base"]) == (0.2, 5000.0)
    assert config["training"]["seq_length"] == 32


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-layers 4", "--num-layers 4 contradicts --load-hf .*, which has num_layers=2; leave it out"),
        ("--rotary-base 10000", "--rotary-base 10000 contradicts .*, which has rotary_base=5000.0; leave it out"),
        ("--use-rope-scaling", "--use-rope-scaling contradicts .*, which has rope_scaling_type=linear"),
        ("--squared-relu", "--squared-relu contradicts .*, which has squared_relu=false"),
        ("--vocab-size 50", "--vocab-size 50 contradicts .*, which has vocab_size=101; leave it out"),
        ("--num-attention-heads 0", "--num-attention-heads 0 contradicts .*, which has num_attention_heads=4"),
        ("--load /else/where", "--load /else/where contradicts --load-hf .*: a run starts from one model"),
        ("--use-checkpoint-args", "use_checkpoint_args takes the model's settings from a checkpoint, and none is"),
        ("--ckpt-step 3", "ckpt_step=3 is not in .*; the steps there: none"),
    ],
)
def test_what_contradicts_the_model_is_refused_with_both_values(
    tmp_path: Path, llama: Path, flags: str, told: str
) -> None:
    assert_told(call_main(run_of(tmp_path / "run", f"--load-hf {llama} {flags}")), told)


def test_a_key_of_the_config_file_that_contradicts_the_model_is_named_as_it_stands_there(
    tmp_path: Path, gpt2: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'[model]\nnum_layers = 4\nhidden_dropout = 0.0\n[checkpoint]\nload_hf = "{gpt2}"\n')
    ended = call_main(run_of(tmp_path / "run", f"--config {path}"))
    assert_told(ended, rf"\[model\] num_layers = 4 contradicts --load-hf {gpt2}, which has num_layers=2; leave it out")
    assert "hidden_dropout" not in ended.errors
    path.write_text("[model]\nnum_layers = 2\nhidden_dropout = 0.0\nkv_channels = 6\n")
    train_on_ranks(run_of(tmp_path / "run", f"--config {path} --load-hf {gpt2} --train-iters 1"))


def test_sequences_longer_than_the_learned_positions_are_refused(tmp_path: Path, gpt2: Path) -> None:
    ended = call_main(run_of(tmp_path / "run", f"--load-hf {gpt2} --seq-length 32"))
    assert_told(ended, "seq_length=32 exceeds the 16 positions that the model has learned; use --seq-length 16 or less")


def test_a_tokenizer_of_ones_own_must_fit(tmp_path: Path, llama: Path) -> None:
    data = f"--data-path {write_tokens(tmp_path / 'data')} --split 1,0,0"
    train_on_ranks(run_of(tmp_path / "theirs", f"--load-hf {llama}", data=data))
    train_on_ranks(run_of(tmp_path / "null", f"--load-hf {llama} --tokenizer-type null", data=data))
    assert steps_of(tmp_path / "theirs") == steps_of(tmp_path / "null")
    ended = call_main(run_of(tmp_path / "bytes", f"--load-hf {llama} --tokenizer-type bytes", data=data))
    assert_told(ended, "101 is smaller than the bytes tokenizer's vocabulary of 257; .*of the model that the run")


def test_a_folder_or_a_json_file_is_enough_to_name_a_tokenizer(tmp_path: Path, llama: Path) -> None:
    data = f"--data-path {write_tokens(tmp_path / 'data')} --split 1,0,0"
    for n, path in enumerate((llama, llama / "tokenizer.json")):
        flags = f"--load-hf {llama} --dry-run --tokenizer-model {path}"
        assert call_main(run_of(tmp_path / str(n), flags, data=data)).status == 0
    flags = f"--load-hf {llama} --tokenizer-model {llama} --tokenizer-type sentencepiece"
    assert_told(
        call_main(run_of(tmp_path / "run", flags, data=data)),
        f"tokenizer_model={llama} is a folder; name the SentencePiece file in it, or use --tokenizer-type huggingface",
    )
    shutil.copytree(llama, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.json"))
    ended = call_main(run_of(tmp_path / "run", f"--load-hf {tmp_path}/bare", data=data))
    assert_told(ended, f"--load-hf {tmp_path}/bare holds no tokenizer that is known here .*--tokenizer-model")


@pytest.mark.parametrize("dry_run", ["", "--dry-run"])
def test_weights_that_are_not_there_are_named(tmp_path: Path, llama: Path, dry_run: str) -> None:
    folder = tmp_path / "model"
    tensors = llama_tensors()
    del tensors["model.norm.weight"]
    write_model(folder, LLAMA, tensors)
    assert_told(
        call_main(run_of(tmp_path / "run", f"--load-hf {folder} {dry_run}")), f"{folder} lacks model.norm.weight"
    )
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    assert_told(
        call_main(run_of(tmp_path / "run", f"--load-hf {folder} {dry_run}")),
        r"final_norm.weight would be \[3\], and its model says \[24\]",
    )
    save_file(llama_tensors() | {"score.weight": torch.ones(3)}, folder / "model.safetensors")
    assert_told(
        call_main(run_of(tmp_path / "run", f"--load-hf {folder} {dry_run}")),
        "holds .*score.weight, of which the model knows nothing; megatronish convert --allow-unmatched",
    )


def test_a_folder_that_is_no_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    ended = call_main(run_of(tmp_path / "run", f"--load-hf {tmp_path}/none"))
    assert_told(ended, f"1 problem in .*\n  {tmp_path}/none does not exist as a folder; name the folder of a Hugging")


def test_a_model_of_another_format_is_told_apart_from_a_checkpoint(tmp_path: Path, llama: Path) -> None:
    ended = call_main(tiny(tmp_path / "run", f"--load {llama}"))
    assert_told(ended, f"--load {llama} holds no checkpoint; it holds a Hugging Face model: use --load-hf {llama}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    for words in (tiny(tmp_path / "run", f"--load {llama}"), run_of(tmp_path / "run", f"--load {llama}")):
        assert call_main(words).errors.startswith("1 problem ")
    flags = f"--load {llama} --use-checkpoint-args"
    assert_told(call_main(run_of(tmp_path / "run", flags)), f"1 problem (.|\n)*: use --load-hf {llama}")
    ended = call_main(tiny(tmp_path / "run", f"--load {tmp_path}"))
    assert_told(ended, "it holds Megatron-LM's: convert it with megatronish convert --from megatron")


# From a checkpoint that was converted


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "checkpoints"
    convert(llama, folder, source="hf", target="megatronish")
    return folder


def test_a_converted_checkpoint_is_taken_as_weights_alone(
    tmp_path: Path, serial: dict[str, Path], converted: Path
) -> None:
    for place in ("tp", "own"):
        flags = f"--load {converted} --use-checkpoint-args --tp 2"
        if place == "own":
            shutil.copytree(converted, tmp_path / "own" / "checkpoints")
            flags = f"--use-checkpoint-args --load {tmp_path / 'own'} --dp 2 --zero-stage 3"
        output = train_on_ranks(run_of(tmp_path / place, flags), world_size=2)
        assert f"step_00000000: {ANEW}" in output
        for step, seen in steps_of(serial["llama"]).items():
            assert steps_of(tmp_path / place)[step] == pytest.approx(seen, rel=1e-5), f"{place}, step {step}"
        assert state_of(tmp_path / place, 2)["origin"] == {"hf": LLAMA}
        assert "finished already: 2 steps" in train_on_ranks(run_of(tmp_path / place, flags), world_size=2)


def test_the_tokenizer_of_a_converted_checkpoint_is_found_in_its_folder(tmp_path: Path, converted: Path) -> None:
    argv = run_of(tmp_path / "run", f"--load {converted} --use-checkpoint-args", data=f"--data-path {tmp_path}/none")
    ended = call_main(argv)
    assert_told(ended, "none.bin and .* do not exist")
    assert ended.errors.startswith("1 problem ")


def test_a_checkpoint_alone_says_how_its_model_is_taken_from_it(tmp_path: Path, converted: Path) -> None:
    ended = call_main(run_of(tmp_path / "run", f"--load {converted}"))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        assert_told(ended, f"{name} is not given; add --use-checkpoint-args, which takes it from --load {converted}")


# --use-checkpoint-args, and --finetune


ODD = "--hidden-dropout 0.3 --openai-gelu --norm-epsilon 1e-4"


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("two") / "run"
    train_on_ranks(tiny(run_dir, f"{ODD} --train-iters 3 --exit-interval 2"))
    return run_dir


def test_a_run_goes_on_with_the_arguments_of_its_checkpoint(tmp_path: Path, two_steps: Path) -> None:
    train_on_ranks(tiny(tmp_path / "whole", f"{ODD} --train-iters 3"))
    flags = f"--load {two_steps} --use-checkpoint-args --train-iters 3"
    assert "continuing from" in train_on_ranks(run_of(tmp_path / "run", flags))
    assert steps_of(tmp_path / "run")[3] == steps_of(tmp_path / "whole")[3]


def test_fewer_positions_of_a_learned_table_can_be_used(tmp_path: Path, two_steps: Path) -> None:
    flags = f"--load {two_steps} --use-checkpoint-args --finetune --seq-length 8"
    train_on_ranks(run_of(tmp_path / "run", flags))
    assert state_of(tmp_path / "run", 2)["config"]["model"]["max_position_embeddings"] == 16


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--norm-epsilon 1e-5",
            "--norm-epsilon 1e-5 contradicts --use-checkpoint-args of .*, which has norm_eps",
        ),
        ("--no-openai-gelu", "--no-openai-gelu contradicts .*, which has openai_gelu=true; leave it out"),
        (
            "--load /nowhere",
            "--load /nowhere holds no checkpoint; correct the path, or leave --use-ch",
        ),
        ("--ckpt-step 5", "ckpt_step=5 is not in .*; the steps there: 2"),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused(tmp_path: Path, two_steps: Path, flags: str, told: str) -> None:
    load = "" if "--load" in flags else f"--load {two_steps}"
    assert_told(call_main(run_of(tmp_path / "run", f"{load} --use-checkpoint-args {flags}")), told)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", "norm_epsilon=0.0001 there and 1e-05 here \\(--norm-epsilon\\); openai_gelu=True there and False here"),
        ("--openai-gelu --norm-epsilon 1e-4 --window-size 4", "window_size=None there and 4 here \\(--window-size\\)"),
        ("--openai-gelu --norm-epsilon 1e-4 --num-attention-heads 6", "num_attention_heads=12 there and 6 here"),
    ],
)
def test_weights_that_would_compute_something_else_are_refused(
    tmp_path: Path, two_steps: Path, flags: str, told: str
) -> None:
    ended = call_main(tiny(tmp_path / "run", f"--load {two_steps} --finetune {flags}"))
    assert_told(ended, f"the weights of .* are of a model that computes something else: .*{told}")
    assert "--use-checkpoint-args" in ended.errors


def test_finetuning_may_change_what_training_alone_asks(tmp_path: Path, two_steps: Path) -> None:
    flags = "--openai-gelu --norm-epsilon 1e-4 --hidden-dropout 0 --init-method-std 1 --train-iters 1"
    assert ANEW in train_on_ranks(tiny(tmp_path / "run", f"--load {two_steps} --finetune {flags}"))
