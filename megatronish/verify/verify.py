"""Check that a layout trains the same model as one process, on the user's own config.

Each run records a trace (layout_trace.py). None of its numbers depends on the layout, so two traces are compared entry
by entry, and the first entry that differs, in the order of computation, is where the runs differ. Tokens of a model
with experts are given the choices of the one process; a token that would have chosen otherwise is an error, unless its
scores are so near to each other in the one process that rounding decides.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.sections.recompute import RecomputeConfig
from megatronish.verify.layout_trace import Trace, trace

TOLERANCE = 1e-5
MARGIN = 1e-5  # of scores: rounding moves them by about 1e-7
WIDTHS = (5, 14, 18, 11, 18, 18, 11)  # of the columns, at least


def serial(config: Config) -> Config:
    """The config of the same run in one process: the same global batch, in micro-batches of the same size."""
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        data_parallel_size=1,
        sequence_parallel=False,
        pipeline_schedule="1f1b",
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        use_distributed_optimizer=False,
        zero_stage=None,
        num_distributed_optimizer_instances=1,
        optimizer_cpu_offload=False,
        param_cpu_offload=False,
    )
    training = replace(config.training, global_batch_size=config.global_batch_size)
    return replace(config, parallel=parallel, training=training, recompute=RecomputeConfig())


class Verdict(NamedTuple):
    """`table` shows every step. `difference` names the first difference, None where the runs agree."""

    table: str
    difference: str | None


def compare(one: Trace, other: Trace, *, layout: str, tolerance: float = TOLERANCE) -> Verdict:
    """Compare the trace of one process with the trace of a layout, by relative differences."""
    titles = ("step", "loss of one", layout, "rel. diff", "grad norm of one", layout, "rel. diff")
    widths = [max(width, len(title) + 2) for title, width in zip(titles, WIDTHS, strict=True)]
    lines, worst = ["".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))], 0.0
    for step, (before, after) in enumerate(zip(one.steps, other.steps, strict=True), start=1):
        apart = [_apart(a, b) for a, b in zip(before, after, strict=True)]
        worst = max(worst, *apart)
        cells: list[int | str] = [step, f"{before[0]:.8f}", f"{after[0]:.8f}", f"{apart[0]:.1e}"]
        cells += [f"{before[1]:.6f}", f"{after[1]:.6f}", f"{apart[1]:.1e}"]
        lines.append("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    difference = _inexact(one, other, tolerance) or _rerouted(other)
    if worst > tolerance:
        difference = _place(one, other, tolerance) or difference or "no single layer: differences add up over steps"
    return Verdict("\n".join(lines), difference)


def routing_report(one: Trace, other: Trace) -> str:
    """How many tokens would have chosen other experts, and by what margins the one process chose."""
    margins = [margin for choices in one.choices.values() for margin in choices.margins]
    tokens = f"{len(other.rerouted)} of {len(margins)} tokens, counted in each layer and step,"
    smallest = f"the smallest margin of one process is {min(margins):.1e}"
    if not other.rerouted:
        return f"experts: {tokens} would have chosen others; {smallest}"
    worst = max(token.margin for token in other.rerouted)
    return (
        f"experts: {tokens} would have chosen others, at margins of at most {worst:.1e} (below {MARGIN:.0e} rounding "
        f"decides, and that is allowed); {smallest}"
    )


def _inexact(one: Trace, other: Trace, tolerance: float) -> str | None:
    """The first number that must be equal and is not, else the first metric that differs."""
    for key, (expected,) in one.exact.items():
        if any(values != expected for values in other.exact[key]):
            step, name = key.split("/")
            return f"the {name} must be equal, and differ in step {int(step) + 1}"
    for number, (before, after) in enumerate(zip(one.metrics, other.metrics, strict=True), start=1):
        for name, value in before.items():
            if _apart(value, after[name]) > tolerance:
                return f"{name} is {after[name]:.8g} instead of {value:.8g} in step {number}"
    return None


def _rerouted(other: Trace) -> str | None:
    """The first token whose choice another layout may not change."""
    for token in sorted(other.rerouted):
        if token.margin >= MARGIN:
            return (
                f"in step {token.step + 1} layers.{token.layer} would have chosen other experts for the token at "
                f"position {token.position} of sample {token.sample}, at a margin of {token.margin:.1e}"
            )
    return None


def _place(one: Trace, other: Trace, tolerance: float) -> str | None:
    """The first layer whose output differs, else the first parameter in backward order whose gradient does."""
    for step in range(len(one.steps)):
        keys = [key for key in one.outputs if key.startswith(f"{step}/")]
        for key in sorted(keys, key=_order):
            scale = one.outputs[key][1] ** 0.5
            pairs = zip(one.outputs[key], other.outputs[key], strict=True)
            if any(abs(a - b) > tolerance * max(abs(a), scale) for a, b in pairs):
                _, layer, sample = key.split("/")
                return f"the output of {layer} is the first to differ, in step {step + 1}, sample {sample}"
        gradients = {key: squares**0.5 for key, squares in one.gradients.items() if key.startswith(f"{step}/")}
        # Where a gradient is truly zero, its rounding noise is not compared.
        noise = 1e-6 * max(gradients.values())
        for key, norm in reversed(gradients.items()):
            if abs(norm - other.gradients[key] ** 0.5) > 10 * tolerance * norm + noise:
                name = key.split("/")[1]
                return f"outputs agree, and the gradient of {name} is the first to differ, in step {step + 1}"
    return None


def _order(key: str) -> tuple[int, int, int]:
    step, layer, sample = key.split("/")
    return int(step), -1 if layer == "embedding" else int(layer.split(".")[1]), int(sample)


def _apart(one: float, other: float) -> float:
    apart = abs(one - other) / max(abs(one), 1e-30)
    return math.inf if math.isnan(apart) else apart


def verify(config: Config, *, num_steps: int) -> int:
    """Print the comparison; the exit status is 0 for equal, 1 for different or failed."""
    layout = str(config.layout).replace(" x ", " ")
    one = trace(serial(config), num_steps=num_steps)
    other = None if one is None else trace(config, num_steps=num_steps, replayed=one.choices)
    if one is None or other is None:
        return 1
    grid = "" if config.model.num_experts is None else f", {config.parallel.expert_layout.line(config.layout)}"
    verdict = compare(one, other, layout=layout + grid)
    print(verdict.table)
    if one.choices:
        print(routing_report(one, other))
    if verdict.difference is None:
        print(f"{config.layout}{grid} trains the same model: every difference is at most {TOLERANCE:.0e} relative")
        return 0
    print(f"{config.layout}{grid} does NOT train the same model: {verdict.difference}")
    return 1
