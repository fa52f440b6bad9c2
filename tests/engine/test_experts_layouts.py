"""Experts in every layout train the model that one process trains: losses, norms, gradients, counts and biases."""

import math
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from engines import NO_DROPOUT, in_few_micro_batches, world_size_of
from jobs import tiny
from ranks import run_ranks
from sweeps import some_of
from torch import Tensor

from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import save_checkpoint
from megatronish.config.read import read_config
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.train.checkpoint_state import tensors_of
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh
from megatronish.verify.verify import RoutingRecorder

STEPS = 2  # the second begins with what the first has made of weights and biases
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 24"
MODELS = {
    "softmax": f"{EXPERTS} --moe-router-topk 2 --swiglu --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001",
    "capacity": f"{EXPERTS} --moe-router-topk 2 --moe-expert-capacity-factor 0.75 --moe-router-pre-softmax "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
    "sigmoid": f"{EXPERTS} --moe-router-topk 3 --swiglu --disable-bias-linear --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01 --moe-router-num-groups 4 --moe-router-group-topk 3 "
    "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate --moe-layer-freq ([0]*1+[1]*3)",
}
# With this spread of weights and this seed no choice hangs on rounding.
COMMON = (
    f"--num-layers 4 --seq-length 24 --optimizer sgd --lr 1e-2 --global-batch-size 8 {NO_DROPOUT} "
    "--init-method-std 0.2 --seed 7"
)
SMALLEST_MARGIN = 1e-5


class Trained(NamedTuple):
    """Metrics, counts and biases of some steps on a rank, and the smallest margin of a choice."""

    metrics: list[dict[str, float]]
    tokens: list[Tensor]
    biases: dict[int, Tensor]
    margin: float


def train(place: Place, flags: str) -> Trained:
    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(config, mesh, vocab_size=job.vocab_size)
    batches = job.batches_of(job.datasets.train)
    routing = RoutingRecorder(engine.stage.model, {})
    metrics, tokens = [], []
    for step in range(STEPS):
        routing.step = step
        result = engine.step(batches(8 * step, 8), num_steps_done=step, learning_rate=1e-2, weight_decay=0.1)
        metrics.append({**result.metrics, "grad_norm": result.grad_norm})
        assert result.expert_load is not None
        tokens.append(result.expert_load.tokens)
    biases = {
        layer: router.state["bias"] for layer, router in engine.stage.model.routers().items() if "bias" in router.state
    }
    margin = min((margin for choices in routing.choices.values() for margin in choices.margins), default=math.inf)
    return Trained(metrics, tokens, biases, margin)


@cache
def alone(flags: str) -> Trained:
    (found,) = run_ranks(1, train, f"{flags} --micro-batch-size 8")
    return found


LAYOUTS = [
    "--pp 1",
    "--dp 2 --ep 2",
    "--tp 2 --etp 2",
    "--tp 2 --etp 1 --ep 2",
    "--tp 2 --etp 1 --ep 2 --sequence-parallel",
    "--tp 2 --etp 2 --sequence-parallel",
    "--cp 2 --ep 2",
    "--cp 2 --ep 2 --cp-comm-type a2a",
    "--dp 2 --tp 2 --ep 2 --etp 2 --sequence-parallel",
    "--dp 2 --tp 2 --ep 4 --etp 1",
    "--dp 4 --ep 2 --zero-stage 1",
    "--dp 4 --ep 2 --zero-stage 2",
    "--dp 4 --ep 2 --zero-stage 3",
    "--dp 2 --ep 2 --zero-stage 3 --recompute-granularity full",
    "--dp 2 --tp 2 --ep 2 --etp 1 --zero-stage 3 --sequence-parallel",
    "--pp 2 --dp 2 --ep 2",
    "--pp 2 --tp 2 --ep 2 --etp 1 --sequence-parallel --pipeline-schedule zb-h1",
    "--pp 2 --dp 2 --ep 2 --recompute-granularity full",
    "--cp 2 --tp 2 --ep 4 --etp 1 --sequence-parallel",
    "--cp 2 --tp 3 --ep 2 --etp 3 --sequence-parallel",
    "--cp 2 --tp 3 --ep 2 --etp 1 --sequence-parallel",
]


# Two layouts with each of the models. Pairs of routers and features of layouts are in the theorem's array
# (theorem/test_experts_equal_serial.py), which compares more than numbers.
CHOSEN = [
    ("softmax", "--tp 2 --etp 1 --ep 2"),
    ("softmax", "--dp 2 --tp 2 --ep 4 --etp 1"),
    ("capacity", "--dp 2 --tp 2 --ep 2 --etp 2 --sequence-parallel"),
    ("capacity", "--pp 2 --dp 2 --ep 2 --recompute-granularity full"),
    ("sigmoid", "--cp 2 --ep 2 --cp-comm-type a2a"),
    ("sigmoid", "--pp 2 --tp 2 --ep 2 --etp 1 --sequence-parallel --pipeline-schedule zb-h1"),
]


@pytest.mark.parametrize(("model", "layout"), some_of(product(MODELS, LAYOUTS), CHOSEN))
def test_experts_train_the_same_in_every_layout(model: str, layout: str) -> None:
    flags = f"{COMMON} {MODELS[model]}"
    expected = alone(flags)
    assert expected.margin >= SMALLEST_MARGIN, "rounding could choose other experts; name another --seed"
    flags = in_few_micro_batches(f"{flags} {layout}")
    for found in run_ranks(world_size_of(flags), train, flags):
        for step, (mine, theirs) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
            assert torch.equal(found.tokens[step], expected.tokens[step]), step
            assert mine == pytest.approx(theirs, rel=1e-5), step
        for layer, bias in found.biases.items():
            assert torch.equal(bias, expected.biases[layer])


def save_or_load(place: Place, flags: str, folder: Path, saves: bool) -> tuple[list[dict[str, float]], list[Tensor]]:
    """A step, then a checkpoint and two more steps; or these two after the checkpoint."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(config, mesh, vocab_size=job.vocab_size)
    batches = job.batches_of(job.datasets.train)
    seen, tokens = [], []
    if not saves:
        load_tensors(folder / "step_00000001", tensors_of(engine, with_optimizer=True), mesh=mesh)
        engine.data_parallel.gather_parameters(frozen=True)
        engine.optimizer.num_steps = 1
    for step in range(3):
        if saves and step == 1:
            save_checkpoint(folder, step=1, tensors=tensors_of(engine, with_optimizer=True), state={}, mesh=mesh)
        if not saves and step < 1:
            continue
        result = engine.step(batches(8 * step, 8), num_steps_done=step, learning_rate=1e-2, weight_decay=0.1)
        seen.append({**result.metrics, "grad_norm": result.grad_norm})
        assert result.expert_load is not None
        tokens.append(result.expert_load.tokens)
    return seen[-2:], tokens[-2:]


MOVES = [
    ("--dp 2 --ep 2", "--dp 4 --ep 4 --zero-stage 1"),
    ("--tp 2 --dp 2 --etp 2 --ep 2 --zero-stage 2", "--pp 2 --dp 2 --ep 1"),
    ("--dp 4 --ep 2 --zero-stage 1", "--cp 2 --ep 2"),
]
# Muon where experts are cut; SGD has fewer states than both.
MOVED = [("adam", 2), ("muon", 1)]


@pytest.mark.parametrize(
    ("saving", "loading", "optimizer"),
    some_of(
        [(*move, name) for name in ("adam", "muon", "sgd") for move in MOVES],
        [(*MOVES[number], name) for name, number in MOVED],
    ),
)
def test_a_checkpoint_of_experts_loads_in_any_layout(tmp_path: Path, saving: str, loading: str, optimizer: str) -> None:
    flags = f"{COMMON} {MODELS['sigmoid']}".replace("--optimizer sgd", f"--optimizer {optimizer}")
    saving, loading = (in_few_micro_batches(f"{flags} {layout}") for layout in (saving, loading))
    expected, tokens = run_ranks(world_size_of(saving), save_or_load, saving, tmp_path, True)[0]
    for found, counts in run_ranks(world_size_of(loading), save_or_load, loading, tmp_path, False):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        assert all(map(torch.equal, counts, tokens))
