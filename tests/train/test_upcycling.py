"""Tests of upcycling: experts that are copies of a dense model's MLPs start with its loss, in every layout alike."""

from pathlib import Path

import pytest
from engines import NO_DROPOUT
from expert_models import write_family
from jobs import call_main, steps_of, tiny, train_on_ranks
from saved_runs import read_whole
from sweeps import some_of
from test_bad_input import assert_told
from test_load_hf import LLAMA, llama_tensors, run_of, write_model

from megatronish.formats.convert import convert

DENSE = f"--swiglu --disable-bias-linear --ffn-hidden-size 32 --normalization RMSNorm {NO_DROPOUT} --micro-batch-size 2"
MIXTURE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
UPCYCLED = f"{MIXTURE} --moe-use-upcycling --train-iters 4"
LAYOUTS = [
    ("--dp 2 --ep 2", 2),
    ("--dp 2 --tp 2 --ep 4 --etp 1 --zero-stage 1", 4),
    ("--pp 2 --tp 2 --etp 2 --sequence-parallel", 4),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("dense") / "run"
    train_on_ranks(tiny(run_dir, f"{DENSE} --train-iters 2"))
    return run_dir


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", LLAMA, llama_tensors())


@pytest.mark.parametrize("layouts", some_of([LAYOUTS, LAYOUTS[1:2]], [LAYOUTS[1:2]]), ids=len)
def test_the_first_loss_is_that_of_the_dense_model_and_layouts_agree(
    tmp_path: Path, dense: Path, layouts: list[tuple[str, int]]
) -> None:
    train_on_ranks(tiny(tmp_path / "dense", f"{DENSE} --load {dense} --finetune --train-iters 1"))
    flags = f"{DENSE} --load {dense} {UPCYCLED}"
    output = train_on_ranks(tiny(tmp_path / "one", flags))
    assert f"made experts of the MLPs of {dense / 'checkpoints' / 'step_00000002'}, routers are drawn" in output
    serial = steps_of(tmp_path / "one")
    assert serial[1].loss == pytest.approx(steps_of(tmp_path / "dense")[1].loss, rel=1e-6)
    for number, (layout, size) in enumerate(layouts):
        train_on_ranks(tiny(tmp_path / str(number), f"{flags} {layout}"), world_size=size)
        for step, seen in steps_of(tmp_path / str(number)).items():
            assert seen == pytest.approx(serial[step], rel=1e-5), (layout, step)


def test_a_model_of_hugging_face_becomes_a_mixtral(tmp_path: Path, llama: Path) -> None:
    train_on_ranks(run_of(tmp_path / "dense", f"--load-hf {llama} --train-iters 1"))
    still = f"--load-hf {llama} {MIXTURE} --moe-use-upcycling --optimizer sgd --lr 1e-30 --weight-decay 0"
    train_on_ranks(run_of(tmp_path / "run", f"{still} --train-iters 1 --dp 2 --ep 2"), world_size=2)
    losses = [steps_of(tmp_path / name)[1].loss for name in ("dense", "run")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    theirs, ours = llama_tensors(), read_whole(tmp_path / "run" / "checkpoints" / "step_00000001")
    for expert in range(4):
        gate_up = ours["model.layers.1.mlp.experts.gate_up.weight"][expert]
        assert gate_up[0].equal(theirs["model.layers.1.mlp.gate_proj.weight"])
        assert gate_up[1].equal(theirs["model.layers.1.mlp.up_proj.weight"])
        down = ours["model.layers.1.mlp.experts.down.weight"][expert]
        assert down.equal(theirs["model.layers.1.mlp.down_proj.weight"])
    routers = [ours[f"model.layers.{layer}.mlp.router.weight"] for layer in (0, 1)]
    assert routers[0].std() > 0 and not routers[0].equal(routers[1])


def test_an_upcycled_run_goes_on_with_its_own_checkpoints_and_to_hugging_face(tmp_path: Path, llama: Path) -> None:
    argv = run_of(tmp_path / "run", f"--load-hf {llama} {UPCYCLED} --exit-interval 1")
    assert "made experts" in train_on_ranks(argv)
    output = train_on_ranks(argv)
    assert "continuing from" in output and "made experts" not in output
    convert(tmp_path / "run", tmp_path / "theirs", source="megatronish", target="hf")
    assert '"model_type": "mixtral"' in (tmp_path / "theirs" / "config.json").read_text()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-experts 4 --moe-use-upcycling", "moe_use_upcycling starts from a dense model, and none is given"),
        ("--moe-use-upcycling --load DENSE", "moe_use_upcycling makes experts of a dense model; add --num-experts"),
        (f"{UPCYCLED} --load DENSE --moe-ffn-hidden-size 16", "moe_ffn_hidden_size=16 must be ffn_hidden_size=32"),
        (f"{UPCYCLED} --load DENSE --no-disable-bias-linear", "cannot keep the biases of an MLP"),
        (f"{UPCYCLED} --load DENSE --moe-shared-expert-intermediate-size 8", "would be experts without weights"),
        (f"{UPCYCLED} --load DENSE --norm-epsilon 1e-3", "computes something else: norm_epsilon=1e-05 there"),
        (f"{UPCYCLED} --load DENSE --moe-aux-loss-coeff 0", "a router would follow rounding alone; add --moe-aux-loss"),
        (f"{UPCYCLED} --load DENSE --moe-router-load-balancing-type global_aux_loss", "would follow rounding alone"),
        (f"{UPCYCLED} --load DENSE --moe-upcycling-granularity 2", "each expert is a copy of the whole MLP; use 1"),
    ],
)
def test_what_cannot_be_upcycled_is_told(tmp_path: Path, dense: Path, flags: str, told: str) -> None:
    argv = tiny(tmp_path / "run", f"{DENSE} {flags}".replace("DENSE", str(dense)))
    assert_told(call_main(argv), told)


def test_a_model_that_has_experts_is_not_upcycled(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "mixtral", "mixtral")
    argv = run_of(tmp_path / "run", f"--load-hf {folder} {MIXTURE} --moe-use-upcycling")
    assert_told(call_main(argv), "has num_experts=4, and --moe-use-upcycling makes experts of a dense model")
