"""Learning parameters at which no gradient arrives end a run in its first step, with a sentence on every rank."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from engines import world_size_of
from jobs import tiny
from ranks import run_ranks
from sweeps import some_of

from megatronish.config.read import read_config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.core.errors import RunError
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

LORA = AdapterConfig(adapter_type="lora", lora_rank=2)


def take_steps(place: Place, flags: str, adapter: AdapterConfig, cut: str) -> str:
    """What two steps say of a model whose part `cut` is cut out of autograd; empty if nothing."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(replace(config, adapter=adapter), mesh, vocab_size=job.vocab_size)
    for name, module in engine.stage.model.named_modules():
        if cut and name == cut:
            module.register_forward_hook(lambda _module, _inputs, output: output.detach())
    batches = job.batches_of(job.datasets.train)
    try:
        for step in range(2):
            engine.step(batches(8 * step, 8), num_steps_done=step, learning_rate=0.1, weight_decay=0.0)
    except RunError as error:
        return str(error)
    return ""


WHOLE = [
    "--tp 2 --recompute-granularity full --recompute-num-layers 2",
    "--dp 2 --zero-stage 3 --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--pp 2 --pipeline-schedule zb-v --num-layers 4",
    "--pp 2 --dp 2 --zero-stage 2",
    "--dp 2 --zero-stage 1 --no-overlap-grad-reduce",
]


LEARNING = {"whole": AdapterConfig(), "lora": LORA}
# Each layout with all weights or adapters in turn.
CHOSEN = [(list(LEARNING)[number % 2], flags) for number, flags in enumerate(WHOLE)]


@pytest.mark.parametrize(("learning", "flags"), some_of(product(LEARNING, WHOLE), CHOSEN))
def test_every_layout_has_a_gradient_for_all_that_learns(learning: str, flags: str) -> None:
    assert set(run_ranks(world_size_of(flags), take_steps, flags, LEARNING[learning], "")) == {""}


@pytest.mark.parametrize("flags", ["--tp 2", "--pp 2", "--dp 2 --zero-stage 3", "--dp 2 --zero-stage 2"])
def test_a_path_that_is_cut_is_told_on_every_rank(flags: str) -> None:
    said = set(run_ranks(2, take_steps, flags, AdapterConfig(), "layers.0.attention.qkv"))
    (sentence,) = said
    assert sentence.startswith("no gradient has reached layers.0.")
    assert "layers.0.attention.qkv.weight" in sentence and "freeze them" in sentence


def test_an_adapter_that_is_cut_off_is_named() -> None:
    (sentence,) = run_ranks(1, take_steps, "--num-layers 1", LORA, "layers.0.mlp.fc2.adapters.default")
    assert sentence.startswith("no gradient has reached layers.0.mlp.fc1.adapters.default.up.A, ")  # which feeds fc2
