"""Calibration of the time model: published steps, its errors over them, and the fit of its constants.

The steps of published.toml are all fitted. Those of vtrain.csv are split before anything is fitted: a row belongs to
the fit where the CRC-32 of its text is a multiple of 3, and to the test otherwise.

The fit is a pattern search inside bounds, with a penalty to the prior. Without the penalty constants that the data do
not identify run to their bounds, and predictions elsewhere get worse.
"""

import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.estimate.costs.candidate import Candidate, MeshSizes, config_of
from megatronish.estimate.planner.device_speed import FITTED, Efficiencies
from megatronish.estimate.planner.devices import Device, find_device
from megatronish.estimate.planner.exact import exact_step
from megatronish.estimate.planner.pipeline_time import CLOSED_FORMS, PipelineSizes
from megatronish.estimate.planner.step_time import StepClock, StepSeconds
from megatronish.estimate.planner.workload import StageLayers, Workload
from megatronish.parallel.schedules.live_activations import StageLoad, StagePlan
from megatronish.parallel.schedules.table import SCHEDULES

TABLE = Path(__file__).with_name("published.toml")
MEASURED = Path(__file__).with_name("vtrain.csv")
"""416 steps of GPTs by Megatron-DeepSpeed on A100, from github.com/VIA-Research/vTrain (Bang et al. 2024,
arXiv:2312.12391), data/ground_truth_single.csv and ground_truth_multi.csv: fp16, explicit scores, full recomputation,
1F1B, gradients exchanged after the last backward; 100 GB/s from a node to others, as its configs have it."""
FITTED_PART = 3
MACHINE = "a100-sxm"
PENALTY = 0.004  # of a constant at the middle between its prior and a bound, in units of the mean error
SHRINK, SMALLEST = 0.5, 0.01
ZERO_BUBBLE_REST = 0.3  # of what cannot be filled in a zero-bubble schedule with twice the activations
SIMULATED = {"zb-1p": "zb-h1"}
"""Schedules of published steps by those that come nearest. ZB-2p, which keeps twice the activations, is not there."""


def _zb_2p(sizes: PipelineSizes) -> float:
    times = sizes.times
    rest = max(0.0, times.forward + times.backward - 2 * times.weight)
    return (sizes.stages - 1) * rest * ZERO_BUBBLE_REST


CLOSED_FORMS.update({"zb-1p": CLOSED_FORMS["zb-h1"], "zb-2p": _zb_2p})


class PublishedStep(NamedTuple):
    """A step that was published: what it computed, how it was laid out, and its seconds."""

    name: str
    work: Workload
    candidate: Candidate
    layers: tuple[int, ...]
    """Layers of each stage."""
    seconds: float
    device: Device
    is_fitted: bool = True

    def predicted(self, efficiencies: Efficiencies) -> StepSeconds:
        """Seconds of this step by the closed form; nothing overlapped in these runs."""
        ends = [sum(self.layers[:stage]) for stage in range(len(self.layers) + 1)]
        loads = [
            StageLoad(
                (range(*layers),),
                is_first=layers[0] == 0,
                is_last=layers[1] == ends[-1],
                plan=StagePlan("1f1b", len(self.layers), 1, 1, stage),
            )
            for stage, layers in enumerate(pairwise(ends))
        ]
        return self._clock(efficiencies).step(self.candidate, StageLayers(self.work, loads))

    def printed(self, efficiencies: Efficiencies) -> StepSeconds:
        """Seconds as a plan prints them, by the simulator: by the closed form where there is no such schedule."""
        candidate = self.candidate._replace(schedule=SIMULATED.get(self.candidate.schedule, self.candidate.schedule))
        if candidate.schedule not in SCHEDULES:
            return self.predicted(efficiencies)
        is_short = len(set(self.layers)) > 1  # the ends, as if embedding and head were a layer
        config = config_of(self.work.config, candidate).with_fields(
            account_for_embedding_in_pipeline_split=is_short,
            account_for_loss_in_pipeline_split=is_short,
        )
        stages = StageLayers.of(self.work, config.parallel)
        assert tuple(len(stage.kinds) for stage in stages.stages) == self.layers, (
            "the published stages are those of the config"
        )
        return exact_step(self._clock(efficiencies), candidate, stages, config)

    def _clock(self, efficiencies: Efficiencies) -> StepClock:
        return StepClock(self.work, self.device, efficiencies, overlaps=False)


class Errors(NamedTuple):
    """Errors over a table of steps, as parts of the true seconds."""

    mean: float
    p90: float
    worst: float
    bias: float
    rank_correlation: float


@cache
def published_steps() -> tuple[PublishedStep, ...]:
    """All steps of the table."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(_step(name, table, row) for name, table in tables.items() for row in table["rows"])


@cache
def measured_steps() -> tuple[PublishedStep, ...]:
    """All steps of vtrain.csv."""
    device = replace(find_device(MACHINE), network_gb_s=12.5)
    names, *lines = MEASURED.read_text(encoding="utf-8").splitlines()
    steps = []
    for line in lines:
        *sizes, milliseconds = line.split(",")
        row = dict(zip(names.split(","), map(int, sizes), strict=False))
        mesh = MeshSizes(tp=row["tp"], pp=row["pp"], dp=row["dp"])
        candidate = Candidate(mesh, micro_batch=row["micro"], recompute="full")
        work = _work(row, vocab_size=50257, seq_length=row["seq_length"])
        layers = (row["l"] // row["pp"],) * row["pp"]
        is_fitted = zlib.crc32(line.encode()) % FITTED_PART == 0
        steps.append(PublishedStep(line, work, candidate, layers, float(milliseconds) / 1000, device, is_fitted))
    return tuple(steps)


def _work(row: dict[str, Any], *, vocab_size: int, seq_length: int) -> Workload:
    """A GPT as Megatron-LM computed it before flash attention.

    Its kernel of the softmax takes four samples times heads of a rank together (FusedScaleMaskSoftmax of that time): a
    number that is no multiple of four went without.
    """
    has_kernel = row["micro"] * row["a"] // row["tp"] % 4 == 0
    model = ModelConfig(
        num_layers=row["l"],
        hidden_size=row["h"],
        num_attention_heads=row["a"],
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    training = TrainingConfig(seq_length, row["micro"], row["batch"], fp16=True)
    config = Config(model=model, training=training, parallel=ParallelConfig(grad_reduce_in_bf16=True))
    return Workload(config, vocab_size, "fused_softmax" if has_kernel else "unfused", fused_loss=False)


def _step(source: str, table: dict[str, Any], row: dict[str, Any]) -> PublishedStep:
    work = _work(row, vocab_size=table["vocab_size"], seq_length=table["seq_length"])
    candidate = Candidate(
        MeshSizes(tp=row["tp"], pp=row["pp"], dp=row["dp"]),
        micro_batch=row["micro"],
        schedule=row.get("schedule", "interleaved" if row["v"] > 1 else "1f1b"),
        chunks=row["v"],
        recompute=table["recompute"],
        sequence_parallel=table.get("sequence_parallel", False),
    )
    p = row["pp"]
    sizes = [row["l"] // p] * p
    if row["l"] % p:  # the zero-bubble runs: the ends, which hold embedding and head, have a layer less
        sizes = [2, *([3] * (p - 2)), 2]
    seconds = row["seconds"] if "seconds" in row else row["batch"] / (row["samples"] * work_size(row))
    return PublishedStep(f"{source} {row['name']}", work, candidate, tuple(sizes), seconds, find_device(MACHINE))


def work_size(row: dict[str, Any]) -> int:
    """Devices of a row."""
    return row["tp"] * row["pp"] * row["dp"]


def errors(predicted: Sequence[float], measured: Sequence[float], rates: Sequence[float]) -> Errors:
    """Errors of predicted seconds; the rank correlation is that of `rates` (work a second and device) over seconds."""
    parts = [mine / true - 1 for mine, true in zip(predicted, measured, strict=True)]
    sizes = sorted(map(abs, parts))
    return Errors(
        sum(sizes) / len(sizes),
        sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))],
        sizes[-1],
        sum(parts) / len(parts),
        _rank_correlation(
            [rate / mine for rate, mine in zip(rates, predicted, strict=True)],
            [rate / true for rate, true in zip(rates, measured, strict=True)],
        ),
    )


def _rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's correlation: of the places in the order."""
    a, b = _places(left), _places(right)
    mean = (len(a) - 1) / 2
    product = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return product / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5


def _places(values: Sequence[float]) -> list[float]:
    """Place of each value in the order; of equal ones the mean place."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def loss(efficiencies: Efficiencies) -> float:
    """Mean size of the errors over each of the tables, and the penalties."""
    tables = published_steps(), [step for step in measured_steps() if step.is_fitted]
    means = [
        sum(abs(step.predicted(efficiencies).expected / step.seconds - 1) for step in steps) / len(steps)
        for steps in tables
    ]
    return sum(means) / len(means) + penalty(efficiencies)


def penalty(efficiencies: Efficiencies) -> float:
    """Penalty of all constants that are away from their priors, growing with the square of the distance."""
    distances = (
        (getattr(efficiencies, name) - bounds.prior) / (bounds.high - bounds.low) for name, bounds in FITTED.items()
    )
    return PENALTY * sum((4 * distance) ** 2 for distance in distances)


def fitted(start: Efficiencies | None = None) -> Efficiencies:
    """The constants that fit best, from the priors on unless a start is given."""
    priors: dict[str, Any] = {name: bounds.prior for name, bounds in FITTED.items()}
    best = start or replace(Efficiencies(), **priors)
    least, width = loss(best), 0.1
    while width > SMALLEST:
        before = least
        for name, bounds in FITTED.items():
            for sign in (1, -1):
                value = getattr(best, name) + sign * width * (bounds.high - bounds.low)
                changed: dict[str, Any] = {name: min(bounds.high, max(bounds.low, value))}
                tried = replace(best, **changed)
                if (found := loss(tried)) < least:
                    best, least = tried, found
        if least == before:
            width *= SHRINK
    return best
