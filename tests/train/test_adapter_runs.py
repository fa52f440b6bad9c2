"""Runs with adapters: what they print, save and refuse, and their continuation in another layout."""

from pathlib import Path

import pytest
from conversions import to_ours
from jobs import call_main, steps_of, tiny, train_on_ranks
from saved_runs import read_whole
from sweeps import some_of
from test_bad_input import assert_told
from test_load_hf import LLAMA, llama_tensors, run_of, write_model

from megatronish.checkpoint.folder import read_state

LORA = "--adapter-type lora --lora-rank 2 --lora-dropout 0.1"
ADAPTED = f"{LORA} --train-iters 4 --save-interval 2"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", LLAMA, llama_tensors())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("base") / "run"
    train_on_ranks(tiny(run_dir, "--train-iters 1"))
    return run_dir


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[Path, str]:
    """A run with adapters in one process, and what it printed."""
    run_dir = tmp_path_factory.mktemp("adapted") / "run"
    return run_dir, train_on_ranks(tiny(run_dir, f"{ADAPTED} --load {base}"))


def test_the_first_lines_say_what_learns(adapted: tuple[Path, str], base: Path) -> None:
    _, output = adapted
    assert f"lora of the frozen model {base}:" in output
    # q, k, v, o, up and down of two layers: rank 2 times (24 + 24), (24 + 48) and (48 + 24)
    assert [line.split() for line in output.splitlines() if line.split()[:1] in (["q"], ["down"])] == [
        ["q", "2", "192"],
        ["down", "2", "288"],
    ]
    assert "1,344 parameters learn" in output


def test_a_checkpoint_holds_the_adapters_alone_and_names_their_base(adapted: tuple[Path, str], base: Path) -> None:
    checkpoint = adapted[0] / "checkpoints" / "step_00000004"
    names = read_whole(checkpoint).keys()
    assert names and all(".adapters.default." in name for name in names)
    assert {name.split(".")[0] for name in names} == {"model", "optimizer"}
    said = read_state(checkpoint)["base"]
    assert said["source"] == str(base) and len(said["identity"]) == 64


def test_a_checkpoint_of_adapters_takes_less_than_a_fiftieth_of_its_base(tmp_path: Path) -> None:
    large = "--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 2048 --train-iters 1"
    train_on_ranks(tiny(tmp_path / "base", f"{large} --no-save-optim"))
    train_on_ranks(tiny(tmp_path / "adapted", f"{large} --adapter-type lora --lora-rank 1 --load {tmp_path / 'base'}"))
    base, adapted = (
        sum(path.stat().st_size for path in (tmp_path / name / "checkpoints").rglob("*") if path.is_file())
        for name in ("base", "adapted")
    )
    assert 0 < adapted < 0.02 * base


def test_a_step_of_the_base_may_be_named_and_a_run_with_adapters_is_no_base(tmp_path: Path) -> None:
    base, identities = tmp_path / "base", []
    train_on_ranks(tiny(base, "--train-iters 2 --save-interval 1"))
    for name, more in (
        ("first", f"--load {base} --ckpt-step 1"),
        ("path", f"--load {base / 'checkpoints' / 'step_00000001'}"),
        ("last", f"--load {base}"),
    ):
        train_on_ranks(tiny(tmp_path / name, f"{LORA} --train-iters 1 {more}"))
        identities.append(read_state(tmp_path / name / "checkpoints" / "step_00000001")["base"]["identity"])
    assert identities[0] == identities[1] != identities[2]
    assert "continuing from" in train_on_ranks(
        tiny(tmp_path / "first", f"{LORA} --train-iters 2 --load {base} --ckpt-step 1")
    )
    for flags in (LORA, "--finetune"):
        seen = call_main(tiny(tmp_path / "again", f"{flags} --load {tmp_path / 'last'}"))
        assert_told(seen, "holds the adapters of", "start that run again to continue it", "convert --adapter")


MOVES = [("--tp 2 --sequence-parallel", 2), ("--pp 2 --dp 2 --zero-stage 2", 4)]


@pytest.mark.parametrize(("layout", "size"), some_of(MOVES, MOVES[1:]))
def test_a_run_goes_on_in_another_layout(
    tmp_path: Path, adapted: tuple[Path, str], base: Path, layout: str, size: int
) -> None:
    run_dir = tmp_path / "run"
    flags = f"{ADAPTED} --load {base}"
    train_on_ranks(tiny(run_dir, f"{flags} --exit-interval 2"))
    output = train_on_ranks(tiny(run_dir, f"{flags} {layout}"), world_size=size)
    assert "continuing from" in output
    for step, expected in steps_of(adapted[0]).items():
        assert steps_of(run_dir)[step] == pytest.approx(expected, rel=1e-5), step


def test_a_converted_base_is_the_same_base_and_another_one_is_refused(tmp_path: Path, llama: Path, base: Path) -> None:
    to_ours(llama, tmp_path / "ours")
    flags = f"{LORA} --train-iters 2"
    train_on_ranks(run_of(tmp_path / "run", f"{flags} --load-hf {llama} --dp 2"), world_size=2)
    more = f"{LORA} --train-iters 3"
    output = train_on_ranks(run_of(tmp_path / "run", f"{more} --load {tmp_path / 'ours'} --use-checkpoint-args"))
    assert "continuing from" in output
    # one weight is another one: the same model in shape and config
    other = llama_tensors()
    other["model.norm.weight"] = other["model.norm.weight"] + 1e-3
    changed = write_model(tmp_path / "other" / "model", LLAMA, other)
    seen = call_main(run_of(tmp_path / "run", f"{LORA} --train-iters 4 --load-hf {changed}"))
    assert_told(seen, "were trained with", str(changed), "name that model with --load-hf or --load")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--adapter-type lora", ("is for a trained model", "--load-hf DIR")),
        (
            "--adapter-type lora --adapter-targets W_pack --load BASE",
            ("W_pack matches no linear layer", "q k v o up"),
        ),
        ("--adapter-type ia3 --adapter-targets up --load BASE", ("no IA3", "name down instead")),
        ("--lora-rank 4", ("lora_rank=4 belongs to LoRA", "--adapter-type lora")),
        ("--adapter-type ia3 --loraplus-lr-ratio 16 --load BASE", ("belongs to LoRA, not to adapter_type=ia3",)),
        (
            "--adapter-type lora --norm-epsilon 1e-3 --load BASE",
            ("of a model that computes something else: norm_epsilon=1e-05 there and 0.001 here",),
        ),
        ("--adapter-targets q", ("adapter_targets are for a run with adapters",)),
    ],
)
def test_what_a_user_does_wrong_is_one_sentence(tmp_path: Path, base: Path, flags: str, words: tuple[str, ...]) -> None:
    assert_told(call_main(tiny(tmp_path / "run", flags.replace("BASE", str(base)))), *words)


def test_other_adapters_do_not_continue_a_run(adapted: tuple[Path, str], base: Path) -> None:
    flags = ADAPTED.replace("--lora-rank 2", "--lora-rank 3")
    seen = call_main(tiny(adapted[0], f"{flags} --train-iters 5 --load {base}"))
    assert_told(seen, "adapter.lora_rank was 2 and is 3")
    assert_told(call_main(tiny(adapted[0], "--train-iters 5")), "holds adapters alone")
