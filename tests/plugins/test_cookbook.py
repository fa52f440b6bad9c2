"""Tests of the cookbook: every example trains the same model in parallel as in one process, and resumes.

Each run is a command line of pretrain_gpt.py with `--plugin examples/plugins/NAME.py`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import checkpoints_of, state_of, steps_of, tiny, train_on_ranks
from plugged import plug
from ranks import run_ranks
from sweeps import some_of
from torch import Tensor

from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.engine.build import build_engine
from megatronish.estimate.costs.layer_kinds import layer_kinds
from megatronish.estimate.costs.layer_memory import LayerMemory
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.launch.place import Place
from megatronish.layers.vocabulary import VocabParallelLogits
from megatronish.model.gpt import GPT
from megatronish.optim.masters import Masters
from megatronish.optim.optimizer import OPTIMIZERS
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.parallel.sharding import Sharding
from megatronish.specs.layers import LAYERS, LayerSpec, layer_specs

RTOL = 1e-5

LION = f"{plug('lion')} --optimizer lion --optimizer-args beta1=0.8 --lr 1e-3 --weight-decay 0.1"
SCHEDULE = f"{plug('reversed_gpipe')} --num-layers 4 --global-batch-size 8 --optimizer sgd"
Z_LOSS = f"{plug('z_loss')} --objective z_loss --objective-args coefficient=0.1 --optimizer sgd"
BLOCK = f"{plug('parallel_block')} --block parallel --block-args scale=0.5 --optimizer sgd --init-method-std 0.2"
EVERYTHING = (
    f"{plug('lion', 'reversed_gpipe', 'z_loss', 'parallel_block', 'early_stop')} --optimizer lion --lr 1e-3 "
    "--objective z_loss --block parallel --hook early_stop --num-layers 4"
)
RUNS = {
    "lion, dp 2 tp 2": (LION, "--dp 2 --tp 2", 4),
    "lion, ZeRO-1": (LION, "--dp 2 --zero-stage 1 --tp 2 --sequence-parallel", 4),
    "lion, ZeRO-2": (LION, "--dp 2 --zero-stage 2 --pp 2", 4),
    "lion, ZeRO-3": (LION, "--dp 2 --cp 2 --zero-stage 3", 4),
    "schedule, pp 2": (SCHEDULE, "--pipeline-schedule reversed-gpipe --pp 2 --dp 2", 4),
    "schedule, pp 4": (SCHEDULE, "--pipeline-schedule reversed-gpipe --pp 4", 4),
    "z-loss, tp 2 sp": (Z_LOSS, "--tp 2 --sequence-parallel --pp 2 --pipeline-schedule zb-h1", 4),
    "z-loss, cp 2": (Z_LOSS, "--cp 2 --dp 2 --zero-stage 2", 4),
    "block, tp 2 sp": (BLOCK, "--tp 2 --sequence-parallel --pp 2 --pipeline-schedule zb-h1", 4),
    "block, ZeRO-3": (BLOCK, "--dp 2 --cp 2 --zero-stage 3 --recompute-granularity full", 4),
    "block, tp 4": (BLOCK, "--tp 4 --pipeline-split auto", 4),
    "everything": (EVERYTHING, "--pp 2 --tp 2 --sequence-parallel --pipeline-schedule reversed-gpipe", 4),
}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_same_steps(one: Path, other: Path) -> None:
    """Every number of every step that does not depend on time, what an objective adds included."""
    timed = {"step_seconds", "data_seconds", "tokens_per_second", "model_tflops_per_device", "mfu", "goodput"}
    timed |= {"peak_memory_bytes"}
    for mine, theirs in zip(lines_of(other / "metrics.jsonl"), lines_of(one / "metrics.jsonl"), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - timed:
            assert mine[name] == pytest.approx(theirs[name], rel=RTOL), (mine["step"], name)


CHOSEN = ["lion, ZeRO-3", "everything"]


@pytest.mark.parametrize("name", some_of(RUNS, CHOSEN))
def test_what_a_plug_in_adds_trains_in_parallel_what_one_process_trains(tmp_path: Path, name: str) -> None:
    flags, layout, world_size = RUNS[name]
    train_on_ranks(tiny(tmp_path / "one", f"{flags} --train-iters 3 --micro-batch-size 4"))
    train_on_ranks(tiny(tmp_path / "many", f"{flags} --train-iters 3 {layout}"), world_size=world_size)
    assert_same_steps(tmp_path / "one", tmp_path / "many")


def test_a_run_with_plug_ins_goes_on_in_another_layout(tmp_path: Path) -> None:
    """With Lion, whose momentum is in the checkpoint, and a hook that keeps a state."""
    hook = f"{LION} {plug('early_stop')} --hook early_stop --micro-batch-size 2 --train-iters 4 --save-interval 2"
    for folder, layout, size in (
        ("whole", "", 1),
        ("parts", "--dp 2 --zero-stage 1 --exit-interval 2", 2),
        ("full", "--dp 2 --zero-stage 3 --exit-interval 2", 2),
    ):
        train_on_ranks(tiny(tmp_path / folder, f"{hook} {layout}"), world_size=size)
        assert state_of(tmp_path / folder, 2)["hooks"]["early_stop"]["best_step"] in (1, 2)
    for folder in ("parts", "full"):
        output = train_on_ranks(tiny(tmp_path / folder, f"{hook} --tp 2"), world_size=2)
        assert "continuing from" in output
        assert_same_steps(tmp_path / "whole", tmp_path / folder)
        mine, theirs = (lines_of(tmp_path / name / "best.jsonl") for name in (folder, "whole"))
        assert [pytest.approx(line, rel=RTOL) for line in theirs] == mine


def test_options_reach_what_is_built() -> None:
    assert run_ranks(1, _built_options)[0] == [0.8, 0.99, 0.5, 0.1]


def _built_options(_place: Place) -> list[float]:
    flags = f"{LION} {plug('z_loss', 'parallel_block')} --objective z_loss --objective-args coefficient=0.1"
    config = read_config(tiny(Path("never-written"), f"{flags} --block parallel --block-args scale=0.5"))[0]
    engine: Any = build_engine(config, Mesh.start(), vocab_size=101)
    (scale,) = set(engine.stage.model.layers["1"].scale.tolist())
    return [*engine.optimizer.updates["usual"].betas, scale, engine.objective.coefficient]


# the optimizer


def test_lion_steps_by_the_sign_of_its_interpolated_momentum() -> None:
    seen = run_ranks(1, _lion_step)[0]
    assert seen == pytest.approx([1.0 * (1 - 0.1 * 0.5) - 0.1, 1.0 + 0.1, 0.01 * 2.0], rel=1e-6)


def _lion_step(_place: Place) -> list[float]:
    """A weight and a bias of one, gradients 2 and -2: both after a step, and the momentum of the first."""
    config, _ = read_config(tiny(Path("never-written"), LION))
    parameters = {name: torch.nn.Parameter(torch.ones(1)) for name in ("weight", "bias")}
    for parameter, gradient in zip(parameters.values(), (2.0, -2.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    shardings = {"weight": Sharding((1, 1)), "bias": Sharding((1,))}
    masters = Masters(parameters, {}, shardings, {}, torch.device("cpu"))
    lion: Any = OPTIMIZERS["lion"]
    update = lion(masters, config.optimizer, beta1=0.9, beta2=0.99)
    update.step(learning_rate=0.1, weight_decay=0.5)
    return [
        parameters["weight"].item(),
        parameters["bias"].item(),
        update.state["weight"]["exp_avg"].item(),
    ]


# the objective


def test_losses_and_normalizers_have_the_gradients_of_their_formulas() -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(3, 2, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 6, (3, 2), generator=generator)  # the last two rows are padding
    weights = torch.rand(2, 3, 2, generator=generator, dtype=torch.float64)

    def ours(x: Tensor) -> tuple[Tensor, Tensor]:
        return VocabParallelLogits(x * 1.0, 6, Axis("tp")).losses_and_normalizers(labels)

    def theirs(x: Tensor) -> tuple[Tensor, Tensor]:
        normalizers = x[..., :6].logsumexp(-1)
        return normalizers - x.gather(-1, labels[..., None])[..., 0], normalizers

    for on_losses, on_normalizers in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        gradients = []
        for function in (ours, theirs):
            x = values.clone().requires_grad_()
            terms = zip(function(x), weights, (on_losses, on_normalizers), strict=True)
            sum((term.square() * weight).sum() for term, weight, on in terms if on).backward()  # type: ignore[union-attr]
            assert x.grad is not None
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-9)


def test_the_z_loss_is_written_beside_the_loss(tmp_path: Path) -> None:
    output = train_on_ranks(tiny(tmp_path, f"{Z_LOSS} --train-iters 1 --eval-iters 1"))
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert 0 < line["z_loss"] < line["loss"]
    assert "| z loss: " in output


# the block


def test_the_spec_of_a_block_counts_what_the_block_has_and_does() -> None:
    has, counted, flops, spec_flops, saved, spec_saved = run_ranks(1, _counted)[0]
    assert has == counted
    assert flops == spec_flops
    assert saved == pytest.approx(spec_saved, rel=0.03)


def _counted(_place: Place) -> list[float]:
    """Parameters of a model, FLOPs and saved bytes of a layer and token: counted, and computed from the specs."""
    from test_layer_costs import B, S, V, counted_flops, saved_by_a_layer

    flags = f"{BLOCK} --hidden-size 128 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0"
    model = read_config(tiny(Path("never-written"), flags))[0].model
    model = replace(model, num_layers=1)
    (spec,) = layer_specs(model)
    cost = spec.cost(model)
    training = TrainingConfig(seq_length=S, micro_batch_size=B, bf16=True)
    config = Config(model, ParallelConfig(), training=training)
    built = GPT(model, vocab_size=V, num_positions=S)
    return [
        sum(parameter.numel() for parameter in built.parameters()),
        num_parameters(model, vocab_size=V, seq_length=S),
        (counted_flops(model, 3) - counted_flops(model, 1)) / 2 / (S * B),
        cost.linear_flops + cost.score_flops(S, "full") + cost.value_flops(S, "full"),
        saved_by_a_layer(model, "flash", torch.bfloat16),
        LayerMemory(config, V, "cpu").kept(layer_kinds(config.model, config.adapter)[0]) / (S * B),
    ]


def test_a_spec_that_counts_other_parameters_is_refused_before_training() -> None:
    config = run_ranks(1, _with_wrong_spec)[0]
    assert config == [
        "block=parallel has 4,848 parameters in layer 0 of a rank, and its spec counts 4,872; correct the cost of the "
        "spec, which FLOPs and memory are computed from",
        "block=parallel gives 0 specs for num_layers=2; correct its `layers`",
    ]


def _with_wrong_spec(_place: Place) -> list[str]:
    found = []
    config = read_config(tiny(Path("never-written"), BLOCK))[0]
    right = LAYERS["parallel"]
    try:
        for wrong in (lambda model, **_: (LayerSpec.of(model),) * model.num_layers, lambda *_, **__: ()):
            LAYERS["parallel"] = wrong
            try:
                build_engine(config, Mesh.start(), vocab_size=101)
            except UserError as error:
                found.append(str(error))
    finally:
        LAYERS["parallel"] = right
    return found


# the hook


def test_a_hook_stops_a_run_which_is_saved_there(tmp_path: Path) -> None:
    flags = f"{plug('early_stop')} --hook early_stop --hook-args patience=1 --lr 5 --train-iters 30"
    output = train_on_ranks(tiny(tmp_path, flags), world_size=1)
    assert "the loss has not fallen for 1 steps; start again to resume" in output
    last = max(steps_of(tmp_path))
    assert 2 <= last < 30
    assert checkpoints_of(tmp_path) == ["latest", f"step_{last:08d}"]
    best = lines_of(tmp_path / "best.jsonl")
    assert [line["step"] for line in best] == list(range(1, last))
    assert all(line["params_norm"] > 0 for line in best)


def test_a_hook_is_called_before_the_step_is_saved(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path, f"{plug('early_stop')} --hook early_stop --train-iters 2 --save-interval 1"))
    assert state_of(tmp_path, 1)["hooks"]["early_stop"]["best_step"] == 1


# data


TEXT = "".join(f"line {number} of a text that is long enough to be cut into pieces.\n" for number in range(200))
OWN_TEXT = f"{plug('text_file')} --dataset-type text_file --tokenizer-type bytes --vocab-size 257"


def test_a_data_set_of_a_plug_in_trains_in_parallel_and_resumes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    data = f"{OWN_TEXT} --data-path 0.3 {text} 0.7 {text}"
    for folder, layout, world_size in (("one", "", 1), ("many", "--dp 2 --cp 2", 4)):
        argv = tiny(tmp_path / folder, f"--train-iters 2 --eval-iters 1 {layout}", data=data)
        assert "validation loss at" in train_on_ranks(argv, world_size=world_size)
    assert_same_steps(tmp_path / "one", tmp_path / "many")
    again = tiny(tmp_path / "one", "--train-iters 3", data=data)
    assert "continuing from" in train_on_ranks(again)
    text.write_text(TEXT.upper())
    with pytest.raises(AssertionError, match="this folder was started with other settings"):
        train_on_ranks(tiny(tmp_path / "one", "--train-iters 4", data=data))


def test_a_data_set_of_a_plug_in_refuses_its_files_itself(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"--data-path no-file.txt cannot be read: No such file"):
        train_on_ranks(tiny(tmp_path, "", data=f"{OWN_TEXT} --data-path no-file.txt"))
    with pytest.raises(AssertionError, match=r"no data is given; add --data-path PATH, or --mock-data"):
        train_on_ranks(tiny(tmp_path, "", data=OWN_TEXT))
