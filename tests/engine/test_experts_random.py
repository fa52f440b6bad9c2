"""What is random in routers, the jitter of their input and forced choices: functions of names in every layout."""

from pathlib import Path

import pytest
import torch
from engines import evaluated, in_few_micro_batches, open_job, world_size_of
from jobs import tiny
from ranks import run_ranks
from sweeps import some_of
from test_experts_layouts import COMMON, EXPERTS, alone, train

from megatronish.config.read import ConfigError, read_config
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.layers.dropout import Dropout
from megatronish.parallel.streams import mask_keys, uniform

MODEL = f"{COMMON} {EXPERTS} --moe-router-topk 2 --swiglu --moe-aux-loss-coeff 0.01"
RANDOM = {"jitter": "--moe-input-jitter-eps 0.3", "forced": "--moe-router-force-load-balancing"}
LAYOUTS = [
    "--tp 2 --etp 1 --ep 2 --sequence-parallel",
    "--tp 2 --etp 2",
    "--cp 2 --ep 2",
    "--cp 2 --tp 2 --ep 4 --etp 1 --sequence-parallel",
    "--dp 2 --ep 2",
    "--pp 2 --dp 2 --ep 2 --recompute-granularity full",
    "--dp 2 --ep 2 --zero-stage 3 --recompute-granularity full",
]


# Every second layout, with one kind of randomness in turn.
CASES = [(kind, layout) for kind in RANDOM for layout in LAYOUTS]
CHOSEN = [(list(RANDOM)[number % 2], layout) for number, layout in enumerate(LAYOUTS[::2])]


@pytest.mark.parametrize(("kind", "layout"), some_of(CASES, CHOSEN))
def test_random_routing_is_the_same_in_every_layout(kind: str, layout: str) -> None:
    expected = alone(f"{MODEL} {RANDOM[kind]}")
    flags = in_few_micro_batches(f"{MODEL} {RANDOM[kind]} {layout}")
    for found in run_ranks(world_size_of(flags), train, flags):
        for step, (mine, theirs) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
            assert torch.equal(found.tokens[step], expected.tokens[step]), step
            assert mine == pytest.approx(theirs, rel=1e-5), step


def test_recomputation_draws_what_the_forward_drew() -> None:
    plain = alone(f"{MODEL} {RANDOM['jitter']}")
    again = alone(f"{MODEL} {RANDOM['jitter']} --recompute-granularity full")
    assert again.metrics == plain.metrics


def test_random_routing_changes_choices_and_forced_choices_are_even() -> None:
    plain, jittered, forced = (alone(f"{MODEL} {flags}") for flags in ("", *RANDOM.values()))
    assert not torch.equal(plain.tokens[0], jittered.tokens[0])
    assert plain.metrics[0]["loss"] != jittered.metrics[0]["loss"]
    loads = [[each["largest_expert_load"] for each in run.metrics] for run in (plain, forced)]
    assert max(loads[1]) < 1.5 < max(loads[0])
    assert not torch.equal(forced.tokens[0], forced.tokens[1])  # each step draws anew


def evaluation(place: Place, flags: str) -> tuple[float, int]:
    """An evaluation of the initial weights."""
    job = open_job(place, flags)
    engine = build_engine(job.config, job.mesh, vocab_size=job.vocab_size)
    found = evaluated(engine, job.batches_of(job.datasets.train)(0, 8))
    assert engine.balancing.model.balance is None
    return found


@pytest.mark.parametrize("kind", RANDOM)
def test_nothing_is_random_in_evaluation(kind: str) -> None:
    assert run_ranks(1, evaluation, f"{MODEL} {RANDOM[kind]}") == run_ranks(1, evaluation, MODEL)


def test_values_are_uniform_and_named_by_token_layer_and_step() -> None:
    positions, samples = torch.arange(64), torch.tensor([3, 9])
    dropout = Dropout(1, 5, samples, layers=(2, 3))
    drawn = dropout.of_layer(2).of_router(site="jitter", positions=positions, num_columns=48)
    assert drawn.shape == (64, 2, 48) and drawn.dtype == torch.float32
    assert (
        drawn.abs().max() <= 1 and abs(float(drawn.mean())) < 0.03 and float(drawn.var()) == pytest.approx(1 / 3, 0.03)
    )
    part = dropout.of_layer(2).of_router(site="jitter", positions=positions[16:32], num_columns=48)
    assert torch.equal(part, drawn[16:32])
    others = [
        Dropout(1, 6, samples, layers=(2,)).of_layer(2).of_router(site="jitter", positions=positions, num_columns=48),
        dropout.of_layer(3).of_router(site="jitter", positions=positions, num_columns=48),
        dropout.of_layer(2).of_router(site="forced choice", positions=positions, num_columns=48),
    ]
    assert all((drawn == other).float().mean() < 0.001 for other in others)
    keys = mask_keys([(1, "dropout", 5, 2, "jitter")])[0]
    place = uniform(keys, places=(torch.tensor(9), torch.tensor(7)), columns=torch.arange(48))
    assert torch.equal(place, drawn[7, 1])


def test_an_eps_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="moe_input_jitter_eps"):
        read_config(tiny(Path("never-written"), f"{MODEL} --moe-input-jitter-eps 1.5"))
