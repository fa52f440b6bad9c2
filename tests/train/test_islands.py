"""Tests of runs with islands (DiLoCo): resumed between two outer steps, moved to other layouts, with fewer islands."""

import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from jobs import run_job, state_of, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from saved_runs import assert_holds, assert_same_bits, engine_of_run, read_whole
from sweeps import some_of
from torch import Tensor

from megatronish.checkpoint.folder import read_state
from megatronish.checkpoint.save import save_checkpoint
from megatronish.config.read import read_config
from megatronish.engine.engine import Engine
from megatronish.formats import native
from megatronish.launch.place import Place
from megatronish.optim.optimizer import Optimizer
from megatronish.parallel.mesh import leave
from megatronish.train.checkpoint_state import tensors_of
from megatronish.train.resume import resume
from megatronish.verify.verify import verify

OUTER = "--outer-optimizer nesterov --outer-interval 4 --global-batch-size 12"
TWO = f"{OUTER} --dp-replicate 2"
BETWEEN = 3
"""Steps after which the runs here stop: the islands have moved, and no outer step has joined them."""


def world_size(flags: str) -> int:
    return read_config(tiny(Path("never-written"), flags)).config.layout.world_size


def run(folder: Path, flags: str) -> str:
    return train_on_ranks(tiny(folder, flags), world_size=world_size(flags))


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


RESUMED = [
    "--dp 2",
    "--dp 4 --zero-stage 1 --bf16 --outer-move-dtype int8",
    "--dp 4 --zero-stage 3 --optimizer muon --outer-move-dtype int4",
    "--dp 2 --pp 2 --tp 2 --zero-stage 1 --optimizer-cpu-offload",
]


@pytest.mark.parametrize("flags", some_of(RESUMED, RESUMED[2:3]))
def test_a_run_that_stops_between_two_outer_steps_repeats_every_bit(tmp_path: Path, flags: str) -> None:
    flags = f"{TWO} {flags} --micro-batch-size 3"
    run(tmp_path / "whole", flags)
    for _ in range(2):
        run(tmp_path / "parts", f"{flags} --exit-interval {BETWEEN}")
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")
    one, other = (checkpoint(tmp_path / name, 6) for name in ("parts", "whole"))
    assert_same_bits(one, other)
    # The last step of the run is an outer one, whatever the interval: islands end as one model.
    found = read_whole(one)
    names = [name for name in found if name.startswith("model.")]
    assert names
    for name in names:
        assert torch.equal(found[name], found[f"island.0.{name}"])
        assert torch.equal(found[name], found[f"island.1.{name}"])
    saved = read_whole(checkpoint(tmp_path / "parts", BETWEEN))
    assert any(not torch.equal(saved[name], saved[f"island.1.{name}"]) for name in names)
    assert any(not torch.equal(saved[f"island.0.{name}"], saved[f"island.1.{name}"]) for name in names)


def load_and_save(place: Place, argv: list[str], source: Path, target: Path) -> None:
    _, engine = engine_of_run(place, argv)
    progress = resume(engine, checkpoint=source, weights_only=False, with_optimizer=True, check=lambda _: None)
    tensors = tensors_of(engine, with_optimizer=True)
    save_checkpoint(target, step=progress.step, tensors=tensors, state=read_state(source), mesh=engine.mesh)
    leave()


def test_islands_move_to_other_layouts_bit_by_bit(tmp_path: Path) -> None:
    run(tmp_path / "run", f"{TWO} --dp 2 --exit-interval {BETWEEN} --micro-batch-size 3")
    source = checkpoint(tmp_path / "run", BETWEEN)
    written = read_whole(source)
    layouts = ["--dp 4 --zero-stage 3", "--dp 2 --tp 2 --pp 2 --zero-stage 1 --bf16", "--dp 4 --zero-stage 2", "--dp 2"]
    for number, layout in enumerate(layouts):
        flags, target = f"{TWO} {layout}", tmp_path / str(number)
        run_ranks(world_size(flags), load_and_save, tiny(tmp_path / "run", flags), source, target)
        source = target / f"step_{BETWEEN:08d}"
        assert_holds(source, written)


class Loaded(NamedTuple):
    """Of an island of a rank that has one whole: masters, outer parameters, momentum, first moments of Adam."""

    island: int
    masters: dict[str, Tensor]
    outer: dict[str, Tensor]
    momentum: dict[str, Tensor]
    moments: dict[str, Tensor]
    model: dict[str, Tensor]


def load(place: Place, argv: list[str], source: Path, with_optimizer: bool = True) -> Loaded:
    _, engine = engine_of_run(place, argv)
    resume(engine, checkpoint=source, weights_only=False, with_optimizer=with_optimizer, check=lambda _: None)
    found = _held(engine)
    leave()
    return found


def _held(engine: Engine) -> Loaded:
    shapes = {name: sharding.shape for name, sharding in engine.stage.shardings.items()}

    def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.detach().clone().view(shapes[name]) for name, each in tensors.items()}

    outer = {} if engine.outer is None else engine.outer.state
    return Loaded(
        engine.mesh.islands.rank,
        whole({name: shard.master for name, shard in engine.data_parallel.shards.items()}),
        whole({name: both.parameter for name, both in outer.items()}),
        whole({name: both.momentum for name, both in outer.items()}),
        whole({name: state["exp_avg"] for name, state in engine.optimizer.state.items()}),
        whole(dict(engine.stage.model.named_parameters())),
    )


def assert_same(tensors: dict[str, Tensor], saved: dict[str, Tensor], prefix: str) -> None:
    assert tensors
    for name, tensor in tensors.items():
        assert torch.equal(tensor, saved[f"{prefix}{name}"]), f"{prefix}{name}"


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of two islands between two outer steps, after one."""
    folder = tmp_path_factory.mktemp("islands")
    run(folder, f"{TWO} --dp 2 --outer-interval 2 --exit-interval {BETWEEN} --micro-batch-size 3")
    return checkpoint(folder, BETWEEN)


def test_an_island_that_is_new_takes_the_outer_parameters_and_states_of_another(of_two: Path) -> None:
    saved = read_whole(of_two)
    argv = tiny(of_two.parent.parent, f"{OUTER} --dp 3 --dp-replicate 3")
    for rank in run_ranks(3, load, argv, of_two):
        assert_same(rank.masters, saved, "model." if rank.island == 2 else f"island.{rank.island}.model.")
        assert_same(rank.model, saved, "model." if rank.island == 2 else f"island.{rank.island}.model.")
        assert_same(rank.moments, saved, f"island.{rank.island % 2}.optimizer.exp_avg.")
        assert_same(rank.outer, saved, "model.")
        assert_same(rank.momentum, saved, "outer.momentum.")


def test_fewer_islands_and_none_resume_from_the_outer_parameters(of_two: Path) -> None:
    saved, folder = read_whole(of_two), of_two.parent.parent
    (one,) = run_ranks(1, load, tiny(folder, f"{OUTER} --dp 1"), of_two)
    assert_same(one.masters, saved, "island.0.model.")
    assert_same(one.outer, saved, "model.")
    (none,) = run_ranks(1, load, tiny(folder, "--global-batch-size 12 --dp 1"), of_two)
    assert_same(none.masters, saved, "model.")
    assert_same(none.moments, saved, "island.0.optimizer.exp_avg.")
    for rank in run_ranks(2, load, tiny(folder, f"{TWO} --dp 2"), of_two, False):
        assert_same(rank.masters, saved, "model.")  # --no-load-optim: islands have nothing of their own


def test_what_is_exported_are_the_outer_parameters(of_two: Path) -> None:
    saved, model = read_whole(of_two), native.read(of_two)
    assert_same({name: each.read() for name, each in model.tensors.items()}, saved, "model.")
    told = {why for name, why in model.description.left_out.items() if name.startswith(("island.", "outer."))}
    assert told == {"state of islands: the model is that of their last outer step"}


def test_islands_begin_with_a_run_that_had_none(tmp_path: Path) -> None:
    run(tmp_path, "--global-batch-size 12 --micro-batch-size 6 --train-iters 2")
    source = checkpoint(tmp_path, 2)
    saved = read_whole(source)
    for rank in run_ranks(2, load, tiny(tmp_path, f"{TWO} --dp 2"), source):
        assert_same(rank.masters, saved, "model.")
        assert_same(rank.outer, saved, "model.")
        assert_same(rank.moments, saved, "optimizer.exp_avg.")
        assert not any(bool(each.any()) for each in rank.momentum.values())


def plant_death() -> None:
    """Planted in a job: rank 1, an island, dies in its fourth step."""
    step = Optimizer.step

    def stepped(self: Optimizer, **options: float) -> None:
        if self.num_steps == BETWEEN and os.environ.get("RANK", _rank()) == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, **options)  # type: ignore[arg-type]

    Optimizer.step = stepped  # type: ignore[method-assign, assignment]


def _rank() -> str:
    return str(torch.distributed.get_rank())


def test_a_run_whose_island_died_resumes_with_the_other_and_takes_it_back(tmp_path: Path) -> None:
    """The remaining island continues with what it was at; the one that comes back starts from the outer parameters."""
    flags = f"{OUTER} --save-interval 1 --micro-batch-size 3"
    argv = tiny(tmp_path / "run", f"{flags} --dp 2 --dp-replicate 2")
    died = run_job(argv, tmp_path, plant=plant_death)
    assert died.status != 0
    assert "rank 1" in died.errors
    assert state_of(tmp_path / "run", BETWEEN)["islands"] == 2
    output = run(tmp_path / "run", f"{flags} --dp 1 --exit-interval 5")
    assert f"continuing from {checkpoint(tmp_path / 'run', BETWEEN)}" in output
    assert "1 of 2 islands are left out" in output
    output = run(tmp_path / "run", f"{flags} --dp 2 --dp-replicate 2")
    assert "1 of 2 islands are new, and start from the outer parameters" in output
    assert sorted(steps_of(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert state_of(tmp_path / "run", 6)["islands"] == 2


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["--dp 4 --zero-stage 1"])
def test_verify_compares_islands_with_as_many_of_one_process(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = read_config(tiny(tmp_path, f"{TWO} --outer-interval 2 --lr 1e-3 {layout}"))
    assert verify(config, num_steps=3) == 0, capsys.readouterr().out
