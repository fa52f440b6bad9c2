"""Tests of fp16 training: the loss scale adapts, an overflow on one rank skips the step on all, resume restores it."""

import json
from pathlib import Path

import pytest
import torch
from jobs import steps_of, tiny, train_on_ranks
from ranks import run_ranks

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh

S, VOCABULARY = 16, 64
MODEL = ModelConfig(num_layers=2, hidden_size=24, num_attention_heads=4, make_vocab_size_divisible_by=8)


def overflow_on_one_rank(place: Place) -> tuple[list[bool], list[float], bool]:
    """Of three steps, in the second of which the last rank finds an infinite gradient."""
    mesh = Mesh.start(Layout(dp=2, tp=2), rank=place.rank, init_method=place.rendezvous)
    engine = build_engine(
        Config(
            model=MODEL,
            parallel=ParallelConfig(data_parallel_size=2, tensor_model_parallel_size=2),
            training=TrainingConfig(
                seq_length=S, micro_batch_size=1, global_batch_size=2, fp16=True, initial_loss_scale=256.0, hysteresis=1
            ),
            optimizer=OptimizerConfig(),
        ),
        mesh,
        vocab_size=VOCABULARY,
    )
    dataset = MockSamples(name="train", seq_length=S, seed=1, vocab_size=VOCABULARY, eod=0)
    skipped, scales, unchanged = [], [], False
    for step in range(3):
        batches = micro_batches(
            dataset,
            consumed_samples=2 * step,
            global_batch_size=2,
            share=BatchShare(mesh.dp.rank, 2, 1),
            collate=Collator(eod=0),
        )
        before = [parameter.detach().clone() for parameter in engine.stage.model.parameters()]
        handle = None
        if step == 1 and place.rank == 3:
            weight = next(iter(engine.stage.model.parameters()))
            handle = weight.register_hook(lambda gradient: gradient * torch.inf)
        result = engine.step(batches, num_steps_done=step, learning_rate=1e-2, weight_decay=0.0)
        if handle is not None:
            handle.remove()
        skipped.append(result.skipped)
        scales.append(result.loss_scale)
        if step == 1:
            after = engine.stage.model.parameters()
            unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert engine.optimizer.num_steps == 2
    return skipped, scales, unchanged


def test_an_overflow_on_one_rank_makes_all_skip_the_step_and_halve_the_scale() -> None:
    for answer in run_ranks(4, overflow_on_one_rank):
        assert answer == ([False, True, False], [256.0, 256.0, 128.0], True)


def scales_of(run_dir: Path) -> list[tuple[int, float, int]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss_scale"], line["skipped_iterations"]) for line in lines]


def test_a_run_finds_its_scale_and_a_resumed_one_goes_on_with_it(tmp_path: Path) -> None:
    flags = "--fp16 --hysteresis 1 --initial-loss-scale 4194304 --train-iters 9 --dp 2 --attention-dropout 0"
    train_on_ranks(tiny(tmp_path / "whole", flags), world_size=2)
    for part in ("4", "9"):
        train_on_ranks(tiny(tmp_path / "parts", f"{flags} --exit-interval {part}"), world_size=2)
    whole, parts = scales_of(tmp_path / "whole"), scales_of(tmp_path / "parts")
    assert whole == parts and whole[0][2] > 0  # it began too high
    assert whole[-1][2] < 9 and whole[-1][1] < 4194304
    assert steps_of(tmp_path / "whole")[9] == steps_of(tmp_path / "parts")[9]


def test_fp16_learns_what_fp32_does(tmp_path: Path) -> None:
    """Rounding in fp16 is 2^-11; a loss is a mean over many tokens, and six steps of it stay within a thousandth."""
    flags = "--train-iters 8 --attention-dropout 0 --hidden-dropout 0"
    train_on_ranks(tiny(tmp_path / "fp32", flags))
    train_on_ranks(tiny(tmp_path / "fp16", f"{flags} --fp16 --initial-loss-scale 1024"))
    exact, rounded = steps_of(tmp_path / "fp32"), steps_of(tmp_path / "fp16")
    for step, seen in exact.items():
        assert rounded[step].loss == pytest.approx(seen.loss, rel=2e-3)
        assert rounded[step].grad_norm == pytest.approx(seen.grad_norm, rel=2e-2)
