"""Tests of muP: no activation grows with the width, and factors, initial weights and rates are those of the paper."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from jobs import state_of, steps_of, tiny, train_on_ranks
from problem import Problem
from theorem import VOCABULARY, batches_of

from megatronish.commands.configuration import read_config
from megatronish.config.config import Config
from megatronish.config.model_source import function_of
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.data.loader import BatchShare
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.optim.optimizer import Optimizer
from megatronish.parallel.mesh import Axis, Mesh, dense_domain
from megatronish.parallel.sharding import Shard, Sharding

BASE = 32
WIDTHS = (32, 64, 128, 256)
RATE, NUM_STEPS = 1e-2, 6
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": BASE, "mup_base_head_dim": BASE / 4}


class Sizes(NamedTuple):
    """Mean absolute values after some steps."""

    hidden: float
    logits: float


def sizes_after_steps(width: int, more: dict[str, Any], optimizer: str) -> Sizes:
    """Sizes of activations of a model of this width, trained for a few steps."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=4,
        position_embedding_type="rope",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.1,
        make_vocab_size_divisible_by=4,
    )
    problem = Problem(replace(model, **more).written_out, seq_length=32, global_batch_size=4)
    config = Config(
        model=problem.model,
        parallel=ParallelConfig(data_parallel_size=1),
        training=TrainingConfig(seq_length=32, micro_batch_size=4, global_batch_size=4),
        optimizer=OptimizerConfig(lr=RATE, optimizer=optimizer, adam_eps=1e-12, clip_grad=0.0),
    )
    engine = build_engine(config, Mesh.of(config.parallel, Place()), vocab_size=VOCABULARY)
    batches = batches_of(problem, BatchShare(0, 1, 4), 0)
    for step in range(NUM_STEPS):
        engine.step(batches, num_steps_done=step, learning_rate=RATE, weight_decay=0.0)
    gpt: Any = engine.stage.model
    with torch.no_grad():
        hidden = gpt.hidden(None, batches[0], step=None)
        logits = gpt.logits(hidden)[..., :VOCABULARY]
    return Sizes(float(hidden.abs().mean()), float(logits.abs().mean()))


@pytest.mark.parametrize("tied", [True, False])
def test_no_activation_grows_with_the_width(tied: bool) -> None:
    """The coordinate check of the paper, appendix D.1: it does grow without muP."""
    tied_or_not = {"untie_embeddings_and_output_weights": not tied}
    scaled = [sizes_after_steps(width, MUP | tied_or_not, "adam") for width in WIDTHS]
    usual = [sizes_after_steps(width, tied_or_not, "adam") for width in WIDTHS]
    for kind in Sizes._fields:
        assert getattr(scaled[-1], kind) < 1.3 * getattr(scaled[0], kind), (kind, scaled)
        assert getattr(usual[-1], kind) > 2 * getattr(usual[0], kind), (kind, usual)


# Values

SHARDINGS: dict[str, Sharding] = {
    "embedding": Sharding((4, 3), role="embedding"),
    "head": Sharding((4, 3), role="head"),
    "positions": Sharding((5, 3), role="positions"),
    "matrix": Sharding((4, 3)),
    "router": Sharding((4, 3), role="router"),
    "norm": Sharding((3,)),
}


@pytest.mark.parametrize(("name", "divided"), [("adam", {"matrix", "router"}), ("muon", {"router"})])
def test_hidden_matrices_have_the_rate_over_w_and_those_of_muon_do_not(name: str, divided: set[str]) -> None:
    config, cpu = OptimizerConfig(optimizer=name), torch.device("cpu")

    def moved(width_mult: float) -> dict[str, torch.Tensor]:
        masters = {name: torch.ones(sharding.shape) for name, sharding in SHARDINGS.items()}
        gradients = {name: torch.ones_like(master) for name, master in masters.items()}
        shards = {name: Shard(master, ()) for name, master in masters.items()}
        alone = dense_domain(Axis("tp"))
        stepped = Optimizer(shards, gradients, SHARDINGS, alone, config, device=cpu, width_mult=width_mult)
        stepped.step(learning_rate=0.1, weight_decay=0.0)
        return {name: 1 - master for name, master in masters.items()}

    wide, base = moved(4.0), moved(1.0)
    for parameter, distance in base.items():
        torch.testing.assert_close(wide[parameter], distance / 4 if parameter in divided else distance)


WIDE = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, use_mup=True)


def test_factors_and_initial_weights_are_those_of_the_width() -> None:
    model = replace(WIDE, mup_base_hidden_size=16, mup_base_head_dim=4.0, mup_output_mult=2.0, mup_embedding_mult=3.0)
    scaled = model.written_out
    assert (scaled.width_mult, scaled.hidden_std, scaled.output_std) == (4.0, 0.01, 0.005)
    assert (scaled.embedding_multiplier, scaled.logits_multiplier, scaled.softmax_scale) == (3.0, 0.5, 2 / 16)
    assert replace(model, mup_base_hidden_size=None, mup_width_mult=4.0).written_out.logits_multiplier == 0.5
    assert replace(model, mup_attn_scale_power=0.5, mup_base_head_dim=None).written_out.softmax_scale == 0.25
    assert replace(WIDE, use_mup=False, mup_width_mult=4.0).written_out.hidden_std == WIDE.init_method_std


def test_what_is_written_out_stays_as_it_is() -> None:
    scaled = replace(WIDE, mup_width_mult=4.0, mup_embedding_mult=2.0).written_out
    assert scaled.written_out == scaled
    assert function_of(scaled, seq_length=8) == function_of(replace(scaled, use_mup=False), seq_length=8)


# Runs

FLAGS = "--use-mup --mup-base-hidden-size 12 --mup-output-mult 2"


def read(more: str) -> ModelConfig:
    return read_config(tiny(Path("run"), f"{FLAGS} {more}")).config.model


def test_flags_become_factors() -> None:
    model = read("")
    assert (model.logits_multiplier, model.softmax_scale, model.embedding_multiplier) == (1.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--optimizer sgd", "use_mup has the learning rates of adam, muon, and those of optimizer=sgd differ; use"),
        ("--logits-multiplier 3", "logits_multiplier=3.0 contradicts use_mup, which makes it 1; leave --logits-mul"),
        ("--softmax-scale 3", "softmax_scale=3.0 contradicts use_mup, which makes it 0.5; leave --softmax-scale out"),
        ("--mup-width-mult 2", "--mup-base-hidden-size 12 contradicts --mup-width-mult 2: both say how much wider"),
        ("--adapter-type lora", "use_mup is about the rates of whole matrices, which are frozen"),
        (
            "--model-type bert --objective masked_lm",
            "use_mup knows the layers of a GPT, and model_type=bert has others",
        ),
        ("--mup-width-mult 0", "mup_width_mult=0.0 must be greater than 0"),
    ],
)
def test_what_does_not_go_with_a_width_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        read(flags)
    assert sentence in str(caught.value)


def test_a_base_without_mup_is_idle() -> None:
    notes = read_config(tiny(Path("run"), "--mup-base-hidden-size 12 --mup-output-mult 2")).notes
    assert "mup_base_hidden_size=12, mup_output_mult=2.0: idle, as --use-mup is not given" in notes


def test_a_run_resumes_in_another_layout_and_starts_others(tmp_path: Path) -> None:
    flags = f"{FLAGS} --save-interval 3"
    train_on_ranks(tiny(tmp_path / "whole", flags))
    saved = state_of(tmp_path / "whole", 6)["config"]["model"]
    assert (saved["logits_multiplier"], saved["use_mup"]) == (1.0, True)
    # Its resolved config is read, and scaled no second time.
    train_on_ranks(tiny(tmp_path / "first", f"{flags} --train-iters 6 --exit-interval 3"))
    more = f"{flags} --load {tmp_path / 'first' / 'checkpoints'} --use-checkpoint-args --tp 2"
    train_on_ranks(tiny(tmp_path / "second", more), world_size=2)
    whole, second = steps_of(tmp_path / "whole"), steps_of(tmp_path / "second")
    assert [second[step].loss for step in (4, 5, 6)] == pytest.approx(
        [whole[step].loss for step in (4, 5, 6)], rel=1e-5
    )
    assert json.loads(json.dumps(saved)) == state_of(tmp_path / "second", 6)["config"]["model"]


def test_a_model_that_has_no_width_is_given_none(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path / "plain", "--save-interval 6"))
    start = f"--load {tmp_path / 'plain' / 'checkpoints'} --use-checkpoint-args --finetune"
    with pytest.raises(UserError, match=r"--use-mup contradicts --use-checkpoint-args of .*, which has use_mup=false"):
        read_config(tiny(tmp_path / "next", f"{start} --use-mup --mup-base-hidden-size 12"))


def test_adapters_of_a_model_with_a_width_are_trained_without_its_rates(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path / "wide", f"{FLAGS} --mup-embedding-mult 3 --save-interval 6"))
    start = f"--load {tmp_path / 'wide' / 'checkpoints'} --use-checkpoint-args --finetune"
    train_on_ranks(tiny(tmp_path / "next", f"{start} --adapter-type lora --no-use-mup"))
    assert len(steps_of(tmp_path / "next")) == 6
