"""Check that a layout trains the same model as one process, on the user's own config.

Each run records a trace. None of its numbers depends on the layout, so two traces are compared entry by entry, and the
first entry that differs, in the order of computation, is where the runs differ. Tokens of a model with experts are
given the choices of the one process; a token that would have chosen otherwise is an error, unless its scores are so
near to each other in the one process that rounding decides.

A trace has the Loss, gradient norm and metrics of every step; and, to locate a difference, the sum and the sum of
squares of every layer's output for every sample, and the sum of squares of every parameter's gradient. Of a model with
experts also the choices of every token, which another run replays: one token that rounding sends to another expert
would change gradients by 5e-3, and hide every other difference.

Of a run with islands (DiLoCo) the other run has as many islands, each of one process.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatronish.config.config import Config
from megatronish.config.sections.training import RecomputeConfig
from megatronish.engine.engine import Engine
from megatronish.engine.results import StepResult
from megatronish.launch.local import run_local_ranks
from megatronish.launch.place import Place
from megatronish.layers.router import Router
from megatronish.model.context import Context
from megatronish.model.experts import MixtureOfExperts
from megatronish.model.gpt import GPT
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh, leave
from megatronish.train.base_model import draw_base
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh
from megatronish.train.trainer import Progress, Trainer, TrainingSchedule


# Trace of routing: the experts that every token chose, their margins, and the replay of choices in another layout.
#
# Rounding differs between layouts, so a token whose scores are nearly equal may choose another expert there. A run in a
# layout is therefore given the choices of the one process, by step, layer, sample and position. What the layout would
# have chosen is compared with them, and each difference is recorded with the margin of the choice.
class Choices(NamedTuple):
    """Choices of the tokens of a sample in a layer, [S, K], and the margin of each token, [S] (`Router.margins`)."""

    experts: list[list[int]]
    margins: list[float]


class Rerouted(NamedTuple):
    """A token that would have chosen other experts than in the run that was replayed, where its margin was `margin`."""

    step: int
    layer: int
    sample: int
    position: int
    margin: float


class RoutingRecorder:
    """Records the choices of this rank's tokens or, where there are some of another run, replays them.

    It hooks into routers. A recomputation, which has its choices, is left alone. Of a step that is computed again, as
    rows of experts found no room, what is left is the second time: its records take the place of the first one's.
    """

    def __init__(self, model: GPT, replayed: dict[str, Choices]) -> None:
        self.replayed, self.step = replayed, 0
        self.choices, self._rerouted = dict[str, Choices](), dict[str, list[Rerouted]]()
        self._context: Context | None = None
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                module.register_forward_pre_hook(self._begin)
                module.router.register_forward_pre_hook(partial(self._route, module))

    def _begin(self, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._context = arguments[-1]

    @torch.no_grad()
    def _route(self, module: MixtureOfExperts, router: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Arguments of a router, with the choices that are replayed."""
        tokens, chosen = arguments
        assert isinstance(router, Router) and self._context is not None
        if chosen is not None:
            return None
        positions, samples = module.own_positions(self._context), self._context.batch.sample_ids.tolist()
        scores = router.compared(router.logits(tokens))
        shape = (len(positions), len(samples))
        experts, margins = router.choose(scores).unflatten(0, shape), router.margins(scores).unflatten(0, shape)
        keys = [f"{self.step}/{module.layer}/{sample}" for sample in samples]
        if not self.replayed:
            for i, key in enumerate(keys):
                self.choices[key] = Choices(experts[:, i].tolist(), margins[:, i].tolist())
            return None
        theirs = torch.stack([self._replay(key, positions) for key in keys], dim=1).to(tokens.device)  # [s, B, K]
        self._rerouted.update({key: [] for key in keys})
        differs = (experts.sort(-1).values != theirs.sort(-1).values).any(-1)
        for place, i in differs.nonzero().tolist():
            position = int(positions[place])
            margin = self.replayed[keys[i]].margins[position]
            self._rerouted[keys[i]].append(Rerouted(self.step, module.layer, samples[i], position, margin))
        return tokens, theirs.flatten(0, 1)

    @property
    def rerouted(self) -> list[Rerouted]:
        """Tokens that would have chosen other experts than in the run that is replayed."""
        return [token for tokens in self._rerouted.values() for token in tokens]

    def _replay(self, key: str, positions: Tensor) -> Tensor:
        """[s, K], the choices of a sample's tokens at `positions`."""
        return torch.tensor(self.replayed[key].experts)[positions.cpu()]


class Trace(NamedTuple):
    """Records of one run: `steps` has (loss, gradient norm), `outputs` (sum, sum of squares).

    Keys of `outputs` are `step/layer/sample`, keys of `gradients` (sums of squares) `step/parameter`. `metrics` are
    those of each step. `exact` has what is equal in every layout, by `step/name`, from every rank that holds it: the
    choices of each expert and the states of routers. `choices` are those of every token by `step/layer/sample`,
    `rerouted` the tokens that would have chosen otherwise than the run that was replayed.
    """

    steps: list[tuple[float, float]]
    outputs: dict[str, tuple[float, float]]
    gradients: dict[str, float]
    metrics: list[dict[str, float]]
    exact: dict[str, list[list[float]]]
    choices: dict[str, Choices]
    rerouted: list[Rerouted]

    @classmethod
    def empty(cls) -> "Trace":
        """A trace without records."""
        return cls([], {}, {}, [], {}, {}, [])

    @classmethod
    def read(cls, paths: Iterable[Path]) -> "Trace":
        """The trace of a run from the files of all its ranks."""
        whole = cls.empty()
        for path in paths:
            part = Trace(*json.loads(path.read_text()))
            whole.outputs.update(part.outputs)
            whole.gradients.update(part.gradients)
            whole.choices.update({key: Choices(*fields) for key, fields in part.choices.items()})
            whole.rerouted.extend(Rerouted(*fields) for fields in part.rerouted)
            for key, values in part.exact.items():
                whole.exact.setdefault(key, []).extend(values)
            whole = whole._replace(steps=part.steps, metrics=part.metrics)
        return whole


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


def trace_rank(config: Config, num_steps: int, folder: Path, replayed: dict[str, Choices], place: Place) -> int:
    """Train `num_steps` steps on one rank and write its `trace_RANK.json` to `folder`; the exit status."""
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = job.build_engine()
    draw_base(engine, seed=config.training.seed)
    recorder = Recorder(engine.stage.model, mesh)
    routing = RoutingRecorder(engine.stage.model, replayed)
    trainer = Trainer(
        engine=engine,
        schedule=TrainingSchedule(job.schedule, job.batch_sizes, num_steps),
        prepare=job.batches_of(job.datasets.train),
        num_ahead=0,
        hooks=(),
        progress=Progress(),
    )
    recorded = Trace.empty()._replace(outputs=recorder.outputs, choices=routing.choices)
    for step in range(num_steps):
        recorder.step = routing.step = step
        consumed = trainer.progress.consumed_samples
        result = trainer.step(trainer.prepare(consumed, trainer.schedule.batch_size.at(consumed))).result
        recorded.steps.append((result.loss, result.grad_norm))
        recorded.metrics.append(dict(result.metrics))
        of_island = f" of island {mesh.islands.rank}" if mesh.islands.size > 1 else ""
        exact, gradients = _exact(engine, result).items(), _gradient_squares(engine).items()
        recorded.exact.update({f"{step}/{name}{of_island}": [values] for name, values in exact})
        recorded.gradients.update({f"{step}/{name}{of_island}": squares for name, squares in gradients})
    recorded = recorded._replace(rerouted=routing.rerouted)
    (folder / f"trace_{place.rank}.json").write_text(json.dumps(recorded))
    comm.barrier(mesh.world)
    leave()
    return 0


def _exact(engine: Engine, result: StepResult) -> dict[str, list[float]]:
    """The choices of each expert, and the states of this rank's routers after a step."""
    exact = (
        {} if result.expert_load is None else {"choices of each expert": result.expert_load.tokens.flatten().tolist()}
    )
    for layer, router in engine.stage.model.routers().items():
        exact |= {f"{name} of the router of layers.{layer}": state.tolist() for name, state in router.state.items()}
    return exact


def _gradient_squares(engine: Engine) -> dict[str, float]:
    """The sum of squares of every parameter's gradient (after clipping), over the ranks that hold its parts."""
    squares_by_name = {}
    sharing = engine.data_parallel
    for name in engine.stage.shardings:
        part = sharing.gradients.get(name)
        squares = torch.zeros((), dtype=torch.float64) if part is None else part.double().square().sum()
        squares = squares.to(engine.mesh.device)  # where the axes of a model communicate
        domain = sharing.domains[engine.stage.shardings[name].domain]
        for axis in (domain.shard, *(domain.model[cut.axis] for cut in engine.stage.shardings[name].cuts)):
            comm.all_reduce(squares, axis)
        squares_by_name[name] = float(squares)
    return squares_by_name


def trace(config: Config, *, num_steps: int, replayed: dict[str, Choices] | None = None) -> Trace | None:
    """The trace of `config` in its layout on local ranks; None if a rank failed (which prints its error).

    `replayed` are the choices of experts that every token is given.
    """
    with TemporaryDirectory(prefix="megatronish-") as name:
        folder = Path(name)
        run = partial(trace_rank, config, num_steps, folder, replayed or {})
        status = run_local_ranks(run, world_size=config.layout.world_size)
        return None if status else Trace.read(sorted(folder.glob("trace_*.json")))


TOLERANCE = 1e-5
MARGIN = 1e-5  # of scores: rounding moves them by about 1e-7
WIDTHS = (5, 14, 18, 11, 18, 18, 11)  # of the columns, at least


def serial(config: Config) -> Config:
    """The config of the same run in one process, or in one for each island.

    It has the same global batch, in micro-batches of the same size.
    """
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        data_parallel_size=config.parallel.num_islands,
        sequence_parallel=False,
        pipeline_schedule="1f1b",
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        use_distributed_optimizer=False,
        zero_stage=None,
        num_distributed_optimizer_instances=config.parallel.num_islands,
        zero_hpz_partition_size=None,
        optimizer_cpu_offload=False,
        param_cpu_offload=False,
        offload_folder=None,
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
