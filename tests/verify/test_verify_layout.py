"""Tests of verify_layout: agreement for a correct layout, the first difference for a wrong one."""

import dataclasses
import math
from pathlib import Path

import torch.distributed as dist
from jobs import Finished, run_job, tiny
from torch import Tensor

from megatronish.commands import verify as verify_layout
from megatronish.layers.norm import Norm
from megatronish.model.block import TransformerBlock
from megatronish.model.context import Context
from megatronish.parallel.sharding import Sharding
from megatronish.verify.verify import Trace, compare


def verify(folder: Path, flags: str, **options: object) -> Finished:
    argv = tiny(folder / "run", f"--steps 2 {flags}")
    return run_job(argv, folder, main=verify_layout.main, **options)


def test_a_good_layout_is_shown_step_by_step(tmp_path: Path) -> None:
    ended = verify(tmp_path, "--tp 2 --pp 2 --sequence-parallel")
    assert ended.status == 0, ended
    titles, *rows = [line.split() for line in ended.output.splitlines() if line.split()[0] in ("step", "1", "2")]
    assert titles[:4] == ["step", "loss", "of", "one"]
    for number, (step, loss, other, apart, norm, norm_too, norm_apart) in enumerate(rows, start=1):
        assert int(step) == number and float(loss) > 4 and float(norm) > 0
        assert abs(float(loss) - float(other)) < 1e-4 and abs(float(norm) - float(norm_too)) < 1e-4
        assert float(apart) < 1e-5 and float(norm_apart) < 1e-5
    assert "trains the same model: every difference is at most 1e-05 relative" in ended.output
    assert not (tmp_path / "run").exists()


def scale_layer_one() -> None:
    """Planted: in a layout, and not in one process, layer 1 computes something else."""
    forward = TransformerBlock.forward

    def wrong(self: TransformerBlock, x: Tensor, context: Context) -> Tensor:
        out = forward(self, x, context)
        return out * 1.01 if self.layer == 1 and dist.is_initialized() else out

    TransformerBlock.forward = wrong  # type: ignore[method-assign]


def forget_partial_gradients() -> None:
    """Planted: nobody sums over tp what norms learn from 1/tp of the sequence."""
    shardings = Norm.shardings

    def wrong(self: Norm) -> dict[str, Sharding]:
        return {name: dataclasses.replace(found, partial_over=frozenset()) for name, found in shardings(self).items()}

    Norm.shardings = wrong  # type: ignore[method-assign]


def test_the_first_layer_that_differs_is_named(tmp_path: Path) -> None:
    ended = verify(tmp_path, "--dp 2", plant=scale_layer_one)
    assert ended.status == 1
    assert "does NOT train the same model: the output of layers.1 is the first to differ, in step 1" in ended.output


def test_it_is_named_where_layers_are_computed_again_for_micro_batches_of_before(tmp_path: Path) -> None:
    flags = "--dp 2 --pp 2 --pipeline-schedule zb-v --num-layers 4 --recompute-granularity full"
    ended = verify(tmp_path, flags, plant=scale_layer_one)
    assert ended.status == 1
    assert "does NOT train the same model: the output of layers.1 is the first to differ, in step 1" in ended.output


def test_a_wrong_gradient_is_named_by_its_parameter(tmp_path: Path) -> None:
    ended = verify(tmp_path, "--tp 2 --sequence-parallel", plant=forget_partial_gradients)
    assert ended.status == 1
    assert "outputs agree, and the gradient of final_norm." in ended.output
    assert "is the first to differ, in step 1" in ended.output


def test_what_is_not_a_number_agrees_with_nothing() -> None:
    trace = Trace.empty()._replace(steps=[(math.nan, 1.0)], gradients={"0/a": 1.0})
    assert compare(trace, trace, layout="tp 2").difference is not None


def test_mistakes_are_told_and_ranks_that_fail_end_it(tmp_path: Path) -> None:
    for flags, sentence in {
        "--tp 5": "num_attention_heads=12 must be divisible by",
        "--bf16": "add --no-bf16",
        "--steps 0": "steps=0 must be at least 1",
    }.items():
        ended = run_job(tiny(tmp_path / "run", flags), tmp_path, main=verify_layout.main)
        assert ended.status == 2 and sentence in ended.errors and "Traceback" not in ended.errors
