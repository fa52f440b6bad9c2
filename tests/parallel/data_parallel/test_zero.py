"""Tests of the ZeRO settings of a config: what the data axis sends, keeps, gathers and copies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import call_main, tiny, train_on_ranks
from ranks import run_ranks
from test_engine import MODEL, engine_of

from megatronish.config.read import read_config
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.optim.loss_scale import DynamicLossScale, loss_scale_of
from megatronish.parallel import comm
from megatronish.parallel.data_parallel.fully_sharded import FullySharded
from megatronish.parallel.data_parallel.zero import Zero


def reduced_in(place: Place, parallel: ParallelConfig, bf16: bool) -> set[torch.dtype]:
    """The precisions of what is summed over the data axis in large pieces."""
    engine, batches = engine_of(place, parallel, bf16=bf16)
    found: set[torch.dtype] = set()
    originals = {name: getattr(comm, name) for name in ("start_all_reduce", "start_reduce_scatter")}

    def noting(name: str) -> Any:
        def noted(x: torch.Tensor, axis: Any, *args: Any, **kwargs: Any) -> Any:
            if axis.size > 1 and axis.name in ("data", "shard", "replicate") and x.numel() > 100:
                found.add(x.dtype)
            return originals[name](x, axis, *args, **kwargs)

        return noted

    try:
        for name in originals:
            setattr(comm, name, noting(name))
        engine.gradients(batches, num_steps_done=0)
    finally:
        for name, original in originals.items():
            setattr(comm, name, original)
    return found


@pytest.mark.parametrize(("stage", "copies"), [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)])
def test_gradients_travel_in_the_precision_that_is_asked_for(stage: int, copies: int) -> None:
    plain = ParallelConfig(
        data_parallel_size=2 * copies,
        zero_stage=stage,  # type: ignore[arg-type]
        num_distributed_optimizer_instances=copies,
    )
    for seen in run_ranks(2 * copies, reduced_in, plain, True):
        assert seen == {torch.float32}
    for seen in run_ranks(2 * copies, reduced_in, replace(plain, grad_reduce_in_bf16=True), True):
        assert seen == {torch.bfloat16}


def zero_of(engine: Engine) -> Zero:
    assert isinstance(engine.data_parallel, Zero)
    return engine.data_parallel


def state_of_a_step(place: Place, parallel: ParallelConfig) -> tuple[list[bool], bool, int, bool]:
    """After a step: which buckets hold whole gradients, whether masters and what the optimizer reads lie apart from
    the model's buffers, and how many gathers are still under way."""
    engine, batches = engine_of(place, parallel)
    engine.step(batches, num_steps_done=0, learning_rate=0.1, weight_decay=0.0)
    sharing = zero_of(engine)
    whole = [bucket.flat is not None for bucket in sharing.buckets.buckets]
    flats = {flat.untyped_storage().data_ptr() for flat in sharing.parameters.flats}
    parts = {part.untyped_storage().data_ptr() for part in sharing.buckets.parts}
    masters = {shard.master.untyped_storage().data_ptr() for shard in sharing.shards.values()}
    seen = {gradient.untyped_storage().data_ptr() for gradient in sharing.gradients.values()}
    apart = masters.isdisjoint(flats) and seen.isdisjoint(parts)
    return whole, apart, len(sharing.parameters._gathering), masters <= flats


def test_stage_2_keeps_no_whole_gradients_and_the_others_do() -> None:
    for stage, keeps in ((0, True), (1, True), (2, False)):
        parallel = ParallelConfig(data_parallel_size=2, zero_stage=stage, ddp_bucket_size=500)  # type: ignore[arg-type]
        for whole, apart, _, in_place in run_ranks(2, state_of_a_step, parallel):
            assert len(whole) > 5 and set(whole) == {keeps}
            assert in_place and not apart


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_masters_and_their_gradients_lie_apart(stage: int) -> None:
    parallel = ParallelConfig(data_parallel_size=2, zero_stage=stage, optimizer_cpu_offload=True)  # type: ignore[arg-type]
    for _, apart, _, in_place in run_ranks(2, state_of_a_step, parallel):
        assert apart and not in_place


def test_parameters_are_gathered_while_the_run_goes_on_or_at_once() -> None:
    for overlap in (True, False):
        parallel = ParallelConfig(data_parallel_size=2, zero_stage=1, overlap_param_gather=overlap, ddp_bucket_size=500)
        for whole, _, gathering, _ in run_ranks(2, state_of_a_step, parallel):
            assert gathering == (len(whole) if overlap else 0)


def prefetched(place: Place) -> list[int]:
    """How many units each one of a stage is told to gather next in a backward."""
    engine, batches = engine_of(place, ParallelConfig(data_parallel_size=2, zero_stage=3))
    engine.gradients(batches, num_steps_done=0)
    assert isinstance(engine.data_parallel, FullySharded)
    units = [engine.stage.model, *engine.stage.model.get_submodule("layers").children()]
    return [len(unit._get_fsdp_state()._states_to_backward_prefetch) for unit in units]  # type: ignore[operator, union-attr]


def test_a_backward_is_told_which_layer_comes_next() -> None:
    """The stage its last layer, each layer the one before it, the first one none."""
    assert run_ranks(2, prefetched)[0] == [1, 0, *[1] * (MODEL.num_layers - 1)]


def test_every_setting_of_the_loss_scale_arrives() -> None:
    settings = {"initial_loss_scale": 8.0, "min_loss_scale": 2.0, "loss_scale_window": 3, "hysteresis": 5}
    scale = loss_scale_of(TrainingConfig(fp16=True, **settings))  # type: ignore[arg-type]
    assert isinstance(scale, DynamicLossScale)
    assert (scale.scale, scale.minimum, scale.window, scale.hysteresis) == (8.0, 2.0, 3, 5)
    for _ in range(3000):
        scale.update(overflow=False)
    assert scale.scale == 2.0**120  # and not infinite


def test_settings_that_nobody_reads_are_told() -> None:
    base = tiny(Path("/nowhere"), "--dp 2")
    for flags, note in {
        "--zero-stage 3 --no-overlap-grad-reduce": "overlap_grad_reduce and overlap_param_gather are idle",
        "--zero-stage 3 --param-cpu-offload --optimizer-cpu-offload": "optimizer_cpu_offload is idle",
        "--muon-momentum 0.5": "muon_momentum=0.5: idle with optimizer=adam",
        "--optimizer sgd --adam-beta1 0.5": "adam_beta1=0.5: idle with optimizer=sgd",
    }.items():
        assert any(note in told for told in read_config([*base, *flags.split()]).notes), flags


def test_another_optimizer_cannot_go_on_with_the_states_of_one(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path, "--train-iters 1"))
    ended = call_main(tiny(tmp_path, "--train-iters 2 --optimizer sgd"))
    assert ended.status == 2
    assert (
        "was written with optimizer=adam, and this run has optimizer=sgd; resume with --optimizer adam" in ended.errors
    )
    train_on_ranks(tiny(tmp_path, "--train-iters 2 --optimizer sgd --no-load-optim"))


def test_a_loss_scale_beyond_fp32_is_refused(tmp_path: Path) -> None:
    ended = call_main(tiny(tmp_path, "--fp16 --initial-loss-scale 1e300"))
    assert ended.status == 2 and "initial_loss_scale=1e+300 must be at most 2^120" in ended.errors


def first_weight(**settings: Any) -> torch.Tensor:
    engine, batches = engine_of(Place(), ParallelConfig(), optimizer=OptimizerConfig(optimizer="muon", **settings))
    engine.step(batches, num_steps_done=0, learning_rate=0.1, weight_decay=0.0)
    return zero_of(engine).shards["layers.0.mlp.fc1.weight"].master.clone()


def test_settings_of_muon_arrive() -> None:
    usual = first_weight()
    for name, value in {"muon_num_ns_steps": 2, "muon_coefficient_type": "simple", "muon_nesterov": False}.items():
        other = value if OptimizerConfig().__dict__[name] != value else not value
        assert not torch.equal(first_weight(**{name: other}), usual), name
