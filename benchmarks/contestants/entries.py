"""Table of the contestants and of the cases, and which of them fit into memory together."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from benchmarks.contestants.case import Case, Numbers

BASELINE, PEAK = "plain loop", "matrix products"
PROCESSES = {"one": 1, "dp2": 2, "tp2": 2, "pp2": 2}


class Entry(NamedTuple):
    """A row of the table: the module that builds it, its variant, where it runs, and its environment if not ours."""

    name: str
    module: str
    layouts: Sequence[str]
    variant: str = ""
    environment: str = ""
    dtypes: Sequence[str] = get_args(Numbers)


ENTRIES = (
    Entry(BASELINE, "plain", ()),
    Entry("plain loop, compiled", "plain", ("one",), "compile"),
    Entry("plain loop, compiled, freed memory kept", "plain", ("one",), "compile keep"),
    Entry("megatronish", "ours", ("one", "dp2", "tp2", "pp2")),
    Entry("megatronish --compile", "ours", ("one", "dp2", "tp2", "pp2"), "compile"),
    Entry("megatronish --zero-stage 1", "ours", ("dp2",), "zero1"),
    Entry("megatronish --zero-stage 3", "ours", ("dp2",), "zero3"),
    Entry("megatronish, schedule zb-h1", "ours", ("pp2",), "zb-h1"),
    Entry("transformers + accelerate", "accelerate_gpt2", ("one",), environment="transformers"),
    Entry("deepspeed", "deepspeed_engine", ("one",), environment="deepspeed"),
    Entry("deepspeed ZeRO-1", "deepspeed_engine", ("dp2",), "zero1", environment="deepspeed"),
    Entry("litgpt", "litgpt_model", ("one",), environment="litgpt"),
    Entry("megatron-core", "megatron_model", ("one", "tp2", "pp2"), environment="megatron-core"),
    Entry("DDP", "ddp", ("dp2",)),
    Entry("FSDP2", "fsdp2", ("dp2",)),
    Entry("DTensor", "dtensor", ("tp2",)),
    Entry("torch.distributed.pipelining 1F1B", "pipelining", ("pp2",)),
)
DEFAULT_CASES = (
    *(Case("one", "small", numbers) for numbers in get_args(Numbers)),
    *(Case(layout, "small", "fp32") for layout in ("dp2", "tp2", "pp2")),
    Case("one", "gpt2-124m", "fp32"),
)
"""What is measured where no choice is made, in less than half an hour on two cores."""


def bytes_at_rest(case: Case) -> float:
    """About what a contestant holds between its turns: weights, gradients and Adam's states in fp32, and its code."""
    sizes = case.sizes
    parameters = 12 * sizes.num_layers * sizes.hidden_size**2 + sizes.vocab_size * sizes.hidden_size
    return 16 * parameters * (2 if PROCESSES[case.layout] > 1 else 1) + 0.7e9


def available_memory() -> int:
    """Bytes of memory that nobody uses, or a guess where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 16 << 30


def groups(entries: Sequence[Entry], case: Case) -> list[list[Entry]]:
    """Contestants that fit into memory at the same time; megatronish is among those of every group."""
    at_once = max(2, int(0.8 * available_memory() / bytes_at_rest(case)) - 2)
    if len(entries) <= at_once:
        return [list(entries)]
    ours, rest = list(entries[:1]), list(entries[1:])
    size = at_once - len(ours)
    return [ours + rest[start : start + size] for start in range(0, len(rest), size)]
