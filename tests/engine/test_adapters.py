"""Adapters in every layout: the same losses and gradient norms as in one process, and a gradient for each of them."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from adapted import draw_adapters
from engines import in_few_micro_batches, world_size_of
from jobs import tiny
from ranks import run_ranks
from sweeps import some_of

from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.model.adapters import is_adapter
from megatronish.train.base_model import draw_base
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

STEPS = 2


class Trained(NamedTuple):
    """Loss and gradient norm of each step, and the parameters that had no gradient in the last one."""

    numbers: list[tuple[float, float]]
    without_gradient: list[str]


def open_config(flags: str, adapter: AdapterConfig) -> Config:
    """Config of a tiny run with these adapters; a real one is given its base by --load."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    return replace(config, adapter=adapter)


def train(place: Place, flags: str, adapter: AdapterConfig) -> Trained:
    """Two steps with SGD, whose updates multiply no rounding."""
    config = open_config(flags, adapter)
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(config, mesh, vocab_size=job.vocab_size)
    draw_base(engine, seed=config.training.seed)
    draw_adapters(engine)
    batches, numbers, without = job.batches_of(job.datasets.train), [], []
    for step in range(STEPS):
        result = engine.step(batches(8 * step, 8), num_steps_done=step, learning_rate=0.1, weight_decay=0.1)
        numbers.append((result.loss, result.grad_norm))
        without = [name for name, each in engine.data_parallel.gradients.items() if each.numel() and not each.any()]
    assert all(map(is_adapter, engine.optimizer.masters))
    return Trained(numbers, without)


LORA = AdapterConfig(adapter_type="lora", lora_rank=3, lora_alpha=6.0, lora_dropout=0.1)
RSLORA = replace(LORA, adapter_targets=("q_proj", "v_proj", "layers.1.*.down"), use_rslora=True)
IA3 = AdapterConfig(adapter_type="ia3", adapter_targets=("q", "k", "v", "o", "down"))
QLORA = replace(LORA, quantize_base="nf4")
ADAPTERS = {"lora": LORA, "rslora": RSLORA, "ia3": IA3, "qlora": QLORA}

DENSE = "--num-layers 4 --optimizer sgd --hidden-dropout 0.1 --attention-dropout 0.1"
GATED = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --num-query-groups 2 "
    "--group-query-attention --qk-layernorm --add-qkv-bias"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"
FULL = "--recompute-granularity full"
WHOLE_BLOCKS = (
    "--hidden-size 128 --num-attention-heads 8 --ffn-hidden-size 256"  # of 64 elements, also where tp cuts the inputs
)
LAYOUTS = {
    "lora": [
        f"--tp 2 {FULL} --recompute-num-layers 2",
        f"{GATED} --tp 2 --sequence-parallel --cp 2 --recompute-granularity selective",
        f"{GATED} --pp 2 --pipeline-schedule zb-h1 --cp 2 --cp-comm-type a2a",
        f"--pp 2 --pipeline-schedule zb-v --tp 2 {FULL}",
        f"--dp 2 --zero-stage 3 {FULL} --recompute-method block --recompute-num-layers 1",
        f"{GATED} --dp 2 --zero-stage 2 --tp 2 --sequence-parallel --reset-attention-mask --reset-position-ids",
        "--dp 2 --zero-stage 1 --pp 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
    "rslora": [f"{GATED} --tp 2 --sequence-parallel --pp 2", "--dp 2 --zero-stage 3 --tp 2"],
    "ia3": [f"{GATED} --tp 2 --sequence-parallel --dp 2 --zero-stage 2", f"--pp 2 --tp 2 {FULL}"],
    "qlora": [
        f"{GATED} --tp 2 --sequence-parallel --cp 2 {FULL} --recompute-num-layers 2",
        "--dp 2 --zero-stage 3 --tp 2",
        f"{GATED} --dp 2 --zero-stage 1 --pp 2 --pipeline-schedule zb-h1",
        "--dp 2 --zero-stage 2 --tp 2",
    ],
}
OF_EXPERTS = {
    "lora": [
        f"{GATED} --dp 2 --ep 2 --tp 2 --sequence-parallel --etp 2",
        f"{GATED} --tp 2 --ep 2 --etp 1 --zero-stage 3",
        f"{GATED} --pp 2 --dp 2 --ep 2 --pipeline-schedule zb-h1",
    ],
    "ia3": [f"{GATED} --dp 2 --ep 2 --tp 2 --sequence-parallel --etp 2 --zero-stage 1"],
    "qlora": [
        f"{GATED} --dp 2 --ep 2 --tp 2 --sequence-parallel --etp 2",
        f"{GATED} --tp 2 --ep 2 --etp 1 --zero-stage 3",
    ],
}
CASES = [(kind, layout, False) for kind, layouts in LAYOUTS.items() for layout in layouts]
CASES += [(kind, layout, True) for kind, layouts in OF_EXPERTS.items() for layout in layouts]
# Sequences that are cut, documents and selective recomputation with LoRA, as every pair of a feature and a kind of
# adapter, are in the theorem (theorem/test_parallel_equals_serial.py).
FURTHER = [
    *(("lora", LAYOUTS["lora"][number], False) for number in (0, 1, 3, 5)),
    ("rslora", LAYOUTS["rslora"][1], False),
    ("ia3", LAYOUTS["ia3"][0], False),
    *(("qlora", LAYOUTS["qlora"][number], False) for number in (0, 1, 2, 3)),
    *(("lora", OF_EXPERTS["lora"][number], True) for number in (0, 1)),
    ("ia3", OF_EXPERTS["ia3"][0], True),
    ("qlora", OF_EXPERTS["qlora"][0], True),
]
OF_MODEL = (*GATED.split(), "--reset-attention-mask", "--reset-position-ids")


@cache
def alone(flags: str, adapter: AdapterConfig) -> Trained:
    """The same in one process."""
    (found,) = run_ranks(1, train, f"{flags} --global-batch-size 8 --micro-batch-size 8", adapter)
    return found


@pytest.mark.parametrize(
    ("kind", "layout", "has_experts"), some_of(CASES, [case for case in CASES if case not in FURTHER])
)
def test_adapters_learn_the_same_in_every_layout(kind: str, layout: str, has_experts: bool) -> None:
    adapter, flags = ADAPTERS[kind], f"{DENSE} {EXPERTS}" if has_experts else DENSE
    if has_experts:
        adapter = replace(adapter, lora_dropout=0.0)
    if adapter.quantize_base is not None:
        flags = f"{flags} {WHOLE_BLOCKS}"
    of_model = GATED if GATED in layout else ""
    of_model += " --reset-attention-mask --reset-position-ids" if "--reset" in layout else ""
    expected = alone(f"{flags} {of_model}", adapter)
    assert expected.numbers[0][1] > 0 and expected.numbers[0][0] != expected.numbers[1][0]
    flags = in_few_micro_batches(f"{flags} --global-batch-size 8 {layout}")
    for found in run_ranks(world_size_of(flags), train, flags, adapter):
        assert not found.without_gradient
        for mine, theirs in zip(found.numbers, expected.numbers, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
