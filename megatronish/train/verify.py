"""Check that a layout trains the same model as one process, on the user's own config.

Each run records a trace: loss and gradient norm of every step; and, to locate a difference, the sum and the sum of
squares of every layer's output for every sample, and the sum of squares of every parameter's gradient. None of these
depends on the layout. So two traces are compared entry by entry, and the first entry that differs, in the order of
computation, is where the runs differ.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatronish import comm
from megatronish.config.config import Config
from megatronish.config.recompute import RecomputeConfig
from megatronish.launch.local import run_local_ranks
from megatronish.launch.place import Place
from megatronish.mesh import Mesh, leave
from megatronish.model.gpt import GPT
from megatronish.train.engine import Engine
from megatronish.train.job import TrainingJob
from megatronish.train.run import start_mesh
from megatronish.train.trainer import Progress, Trainer, TrainingSchedule

TOLERANCE = 1e-5
WIDTHS = (5, 14, 18, 11, 18, 18, 11)  # of the columns, at least


class Trace(NamedTuple):
    """Records of one run: `steps` has (loss, gradient norm), `outputs` (sum, sum of squares).

    Keys of `outputs` are `step/layer/sample`, keys of `gradients` (sums of squares) `step/parameter`.
    """

    steps: list[tuple[float, float]]
    outputs: dict[str, tuple[float, float]]
    gradients: dict[str, float]


class Recorder:
    """Records sums over the outputs of this rank's layers, by forward hooks."""

    def __init__(self, model: GPT, mesh: Mesh) -> None:
        self.mesh, self.outputs = mesh, dict[str, tuple[float, float]]()
        self.step = 0
        self.sequence_is_cut = model.tp.cuts_sequence
        layers = model.get_submodule("layers")
        watched = {f"layers.{name}": layer for name, layer in layers.named_children()}
        if model.is_first:
            watched["embedding"] = model.get_submodule("embedding")
        for name, module in watched.items():
            module.register_forward_hook(partial(self._record, name))

    def _record(self, layer: str, _module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        """Add the sums of an output [S, B, D] for each of its B samples, over the ranks that cut the sequence.

        The samples are those of the context, the layer's last argument: with recomputation a layer runs again after
        other micro-batches.
        """
        values = output.detach().double()
        sums = torch.stack((values.sum((0, 2)), values.square().sum((0, 2))))
        if self.sequence_is_cut:
            comm.all_reduce(sums, self.mesh.tp)
        comm.all_reduce(sums, self.mesh.cp)
        for sample, (total, squares) in zip(arguments[-1].batch.sample_ids.tolist(), sums.t().tolist(), strict=True):
            self.outputs[f"{self.step}/{layer}/{sample}"] = (total, squares)


def trace_rank(config: Config, num_steps: int, folder: Path, place: Place) -> int:
    """Train `num_steps` steps on one rank and write its `trace_RANK.json` to `folder`; the exit status."""
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = job.build_engine()
    recorder = Recorder(engine.stage.model, mesh)
    trainer = Trainer(
        engine=engine,
        schedule=TrainingSchedule(job.schedule, job.batch_sizes, num_steps),
        prepare=job.batches_of(job.datasets.train),
        num_ahead=0,
        hooks=(),
        progress=Progress(),
    )
    steps, gradients = [], {}
    for step in range(num_steps):
        recorder.step = step
        consumed = trainer.progress.consumed_samples
        record = trainer.step(trainer.prepare(consumed, trainer.schedule.batch_size.at(consumed)))
        steps.append((record.result.loss, record.result.grad_norm))
        for name, squares in _gradient_squares(engine).items():
            gradients[f"{step}/{name}"] = squares
    (folder / f"trace_{place.rank}.json").write_text(json.dumps(Trace(steps, recorder.outputs, gradients)))
    comm.barrier(mesh.world)
    leave()
    return 0


def _gradient_squares(engine: Engine) -> dict[str, float]:
    """The sum of squares of every parameter's gradient (after clipping), over the ranks that hold its parts."""
    found = {}
    sharing = engine.data_parallel
    for name in engine.stage.shardings:
        part = sharing.gradients.get(name)
        squares = torch.zeros((), dtype=torch.float64) if part is None else part.double().square().sum().cpu()
        domain = sharing.domains[engine.stage.shardings[name].domain]
        for axis in (domain.shard, *(domain.model[cut.axis] for cut in engine.stage.shardings[name].cuts)):
            comm.all_reduce(squares, axis)
        found[name] = float(squares)
    return found


def trace(config: Config, *, num_steps: int) -> Trace | None:
    """The trace of `config` in its layout on local ranks; None if a rank failed (which prints its error)."""
    with TemporaryDirectory(prefix="megatronish-") as folder:
        status = run_local_ranks(
            partial(trace_rank, config, num_steps, Path(folder)), world_size=config.layout.world_size
        )
        if status:
            return None
        whole = Trace([], {}, {})
        for path in sorted(Path(folder).glob("trace_*.json")):
            part = Trace(*json.loads(path.read_text()))
            whole.outputs.update(part.outputs)
            whole.gradients.update(part.gradients)
            whole = whole._replace(steps=part.steps)
        return whole


def serial(config: Config) -> Config:
    """The config of the same run in one process: the same global batch, in micro-batches of the same size."""
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
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
    if worst <= tolerance:
        return Verdict("\n".join(lines), None)
    return Verdict("\n".join(lines), _place(one, other, tolerance) or "no single layer: differences add up over steps")


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
    runs: Sequence[Config] = (serial(config), config)
    traces = [trace(run, num_steps=num_steps) for run in runs]
    if traces[0] is None or traces[1] is None:
        return 1
    verdict = compare(traces[0], traces[1], layout=layout)
    print(verdict.table)
    if verdict.difference is None:
        print(f"{config.layout} trains the same model: every difference is at most {TOLERANCE:.0e} relative")
        return 0
    print(f"{config.layout} does NOT train the same model: {verdict.difference}")
    return 1
