"""Dry run of one rank: its real engine is built, and takes a real step, on tensors that have no memory.

Of many micro-batches only so many are run that every number of live activations of the schedule has been there: one
more than the pipeline has stages, with most schedules. The rest repeats what the first micro-batch does, so that
traffic, FLOPs and waits of the whole step are known.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatronish.attention import dropout_attention
from megatronish.attention.mask import slopes_on
from megatronish.checkpoint.save import HostCopies
from megatronish.config.config import Config
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.masked import MaskedCollator
from megatronish.data.mock import open_mock
from megatronish.data.sample import DatasetSettings, DatasetSource
from megatronish.data.spans import SpanCollator, sample_length
from megatronish.data.text_pairs import TextPairCollator
from megatronish.dry_run.gpu import Reference, answered_for, attention_of_a_gpu, dropped_references
from megatronish.dry_run.ledger import Group, Owners
from megatronish.dry_run.recorder import StepCounts, StepRecorder
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.estimate.costs.step_traffic import TrafficKey
from megatronish.launch.place import Place
from megatronish.layers.quantised import MatrixPiece, QuantisedWeight
from megatronish.model.batch import MicroBatch
from megatronish.ops.library import NAMESPACE, has_kernels
from megatronish.ops.nf4 import table_on
from megatronish.ops.report import FAMILIES
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, Mesh, leave
from megatronish.parallel.schedules.plan import Action
from megatronish.parallel.stages import Stages
from megatronish.report.statistics import num_zeros, params_norm
from megatronish.tokenizer.plain import NullTokenizer
from megatronish.train.checkpoint_state import num_not_finite, tensors_of
from megatronish.train.hooks.replicas import differences

# NF4 and ALiBi in a dry run: small tables of its own, and the largest piece of a matrix in the place of all.
#
# A quantised matrix is dequantised piece by piece, thousands of operators a layer; pieces follow each other and none
# outlives the next, so one piece takes the memory of all. Nothing of it is a product that has FLOPs.


all_pieces = QuantisedWeight.pieces


@contextmanager
def own_tables() -> Iterator[None]:
    """Meanwhile tables, which a run keeps on a device from their first use on, are tensors of this run alone."""
    _forget()
    try:
        yield
    finally:
        _forget()


@contextmanager
def matrices_by_one_piece() -> Iterator[None]:
    """Meanwhile of each quantised matrix its largest piece is dequantised."""
    with patch.object(QuantisedWeight, "pieces", _largest_piece):
        yield


def _largest_piece(self: QuantisedWeight, device: torch.device) -> Iterator[MatrixPiece]:
    yield max(all_pieces(self, device), key=lambda piece: piece.rows.stop - piece.rows.start)


def _forget() -> None:
    for table in (slopes_on, table_on):
        table.cache_clear()


# Rows of ZeRO-3 that FSDP has padded: at the first forward a rank with fewer rows than others keeps those it has.
#
# FSDP pads rows once, and knows padded rows again by the address of plain tensors. Those of a dry run are not plain: it
# would copy them a second time, which no GPU does.


@contextmanager
def rows_padded_once() -> Iterator[None]:
    """Meanwhile FSDP leaves alone the rows that it has padded."""
    reset = FSDPParam.reset_sharded_param

    def reset_once(self: FSDPParam) -> None:
        rows = self._sharded_param_data
        local = getattr(self._module_info.module, self._module_info.param_name)._local_tensor
        is_same = isinstance(rows, FakeTensor) and rows.untyped_storage()._cdata == local.untyped_storage()._cdata
        if not is_same or local.is_meta:
            reset(self)

    with patch.object(FSDPParam, "reset_sharded_param", reset_once):
        yield


# What follows a step in a dry run: all that hooks compute of an engine, called once on tensors without memory.
#
# A mistake there ends a run where it has the most to lose: at its first save. None of it counts as part of the step.


def call_hooks(engine: Engine, recorder: StepRecorder) -> None:
    """What is compared between copies, looked through before a save, saved, copied for a thread, and logged."""
    computed: dict[str, Callable[[], object]] = {
        "replicas": lambda: differences(engine),
        "finite": lambda: num_not_finite(engine),
        "checkpoint": lambda: HostCopies().of(tensors_of(engine, with_optimizer=True)),
        "params norm": lambda: params_norm(engine),
        "zeros": lambda: num_zeros(engine),
    }
    if engine.outer is not None:
        computed["outer step"] = engine.outer.step
    with objects_alike():
        for name, compute in computed.items():
            recorder.begin_part(name)
            recorder.ledger.begin(name)
            compute()


@contextmanager
def objects_alike() -> Iterator[None]:
    """Meanwhile every rank has the objects that this one has: they are pickled, and bytes without memory are none."""

    def gathered(value: object, axis: Axis) -> list[object]:
        return [value] * axis.size

    with patch.object(comm, "all_gather_object", gathered):
        yield


FIRST, OTHERS, END = "first micro-batch", "other micro-batches", "end of the step"
PHASES = {"F": "forward", "B": "backward", "W": "weight gradients"}


class PlannedRun(NamedTuple):
    """What is run: a config, with the true vocabulary, on a type of device."""

    config: Config
    vocab_size: int
    device_type: str

    @property
    def stages(self) -> Stages:
        """Stages of the pipeline."""
        config = self.config
        return Stages.of(
            config.parallel, config.model, vocab_size=self.vocab_size, seq_length=config.training.seq_length
        )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.config.num_microbatches

    @property
    def rows_of_an_expert(self) -> int:
        """Rows that a rank sends to each expert where the load is even; at least one."""
        model, layout = self.config.model, self.config.layout
        if model.num_experts is None:
            return 1
        tokens = self.config.training.micro_batch_size * self.config.training.seq_length // layout.cp
        etp = self.config.parallel.expert_layout.etp
        return max(1, tokens * etp // layout.tp * model.moe_router_topk // model.num_experts)


class DryRank(NamedTuple):
    """What the dry run of a rank has found. `counts` are those of the whole step, of which `num_run` micro-batches ran.

    `build_peak` and `peak` are bytes, `phase` is when most was held, `owners` say for what, `largest` are (owner, what
    made it, shape, number, bytes). `seconds` are those of the mesh, the build and the step, `shard_ranks` places among
    the ranks that shard each domain.
    """

    rank: int
    stage: int
    num_layers: int
    num_parameters: int
    num_run: int
    counts: StepCounts
    num_operators: int
    build_peak: int
    peak: int
    phase: str
    owners: dict[str, int]
    largest: list[tuple[Group, int, int]]
    seconds: tuple[float, float, float]
    shard_ranks: dict[str, int]


Then = Callable[[Engine, Sequence[MicroBatch], StepRecorder], None]
"""What is done with the engine after a step, and counts as no part of the step."""


def hooks_alone(engine: Engine, _batches: Sequence[MicroBatch], recorder: StepRecorder) -> None:
    """What a run does after a step in any case."""
    call_hooks(engine, recorder)


def run_rank(planned: PlannedRun, rank: int, *, then: Then = hooks_alone) -> DryRank:
    """Build the engine of this rank, let it take a step, do what comes `then`, and leave nothing behind."""
    # What would lie on a disk has no memory here anyway: it counts as the host's.
    config, device_type = planned.config.with_fields(offload_folder=None), planned.device_type
    recorder = StepRecorder(device_type, number=planned.rows_of_an_expert, references=references())
    ledger, fake, times = recorder.ledger, FakeTensorMode(allow_non_fake_inputs=True), [time.perf_counter()]
    with answered_for(device_type, recorder.wait), _mesh(config, rank, device_type) as mesh:
        num_run = needed_microbatches(planned.stages, mesh.pp.rank, planned.num_microbatches)
        batches = made_up_batches(planned, mesh, num_run)
        times.append(time.perf_counter())
        attention = attention_of_a_gpu() if device_type == "cuda" else nullcontext()
        with fake, recorder.watching(), attention, rows_padded_once(), own_tables(), matrices_by_one_piece():
            ledger.begin("build")
            engine = build_engine(config, mesh, vocab_size=planned.vocab_size, initialises=False)
            owners, build_peak = Owners.of(engine, ledger), ledger.peak
            times.append(time.perf_counter())
            ledger.forget_peak()
            batches = [batch.pinned() for batch in batches]
            take_step(engine, batches, recorder)
            times.append(time.perf_counter())
            model = engine.stage.model
            record = DryRank(
                rank=rank,
                stage=mesh.pp.rank,
                num_layers=len(model.layers),
                num_parameters=sum(parameter.numel() for parameter in model.parameters()),
                num_run=num_run,
                counts=whole_step(recorder.parts, num_run, planned.num_microbatches),
                num_operators=sum(part.operators for part in recorder.parts.values()),
                build_peak=build_peak,
                peak=ledger.peak,
                phase=ledger.phases[ledger.peak_phase],
                owners=owners.by_owner(ledger),
                largest=owners.largest(ledger),
                seconds=(times[1] - times[0], times[2] - times[1], times[3] - times[2]),
                shard_ranks={name: domain.shard.rank for name, domain in mesh.domains.items()},
            )
            then(engine, batches, recorder)
        return record


def references() -> dict[Any, Reference]:
    """Operators that a GPU runs by other operators: one that has no kernel, and all where none is built."""
    ops, families = getattr(torch.ops, NAMESPACE), [family for family in FAMILIES if not has_kernels(family)]
    fused = {getattr(ops, each.name): Reference(each.reference) for family in families for each in family.operators}
    return fused | ({} if has_kernels(dropout_attention.FAMILY) else dropped_references())


@contextmanager
def _mesh(config: Config, rank: int, device_type: str) -> Iterator[Mesh]:
    """Mesh of a rank whose groups send nothing."""
    place = Place(rank, config.layout.world_size, 0, 1)
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    mesh = Mesh.of(
        config.parallel,
        place,
        device=device,
        backend="fake",
        has_experts=config.model.num_experts is not None,
        store=FakeStore(),
    )
    try:
        yield replace(mesh, checkpoint_axis=Axis("checkpoint"))  # over which ranks tell each other their errors
    finally:
        leave()


def made_up_batches(planned: PlannedRun, mesh: Mesh, num_microbatches: int) -> list[MicroBatch]:
    """Micro-batches of made-up tokens for this rank."""
    config, training = planned.config, planned.config.training
    eod = planned.vocab_size - 1
    tokenizer = NullTokenizer(planned.vocab_size)
    masks = None if config.model.is_causal else tokenizer.mask_tokens()
    length = sample_length(config.model, config.data, seq_length=training.seq_length)
    settings = DatasetSettings(length, training.seed, planned.vocab_size, eod, masks=masks)
    rows = Collator.of(config.data, eod=eod)
    collate: Collator | MaskedCollator | SpanCollator | TextPairCollator = rows
    if config.model.has_encoder:
        kind = TextPairCollator if config.data.has_chats else SpanCollator
        collate = kind.of(config, tokenizer.span_tokens(config.data.vocab_extra_ids))
    elif masks is not None:
        collate = MaskedCollator.of(config, rows, masks, vocab_size=planned.vocab_size)
    return micro_batches(
        open_mock(DatasetSource("dry run"), settings),
        consumed_samples=0,
        global_batch_size=num_microbatches * training.micro_batch_size * config.layout.dp,
        share=BatchShare.of(mesh, training.micro_batch_size),
        collate=collate,
    )


def take_step(engine: Engine, batches: Sequence[MicroBatch], recorder: StepRecorder) -> None:
    """One step of the engine; what it does is counted apart for the first micro-batch, the others and the end."""

    data_parallel = engine.data_parallel
    begin_action = data_parallel.begin_action

    def begin(action: Action, is_last: bool) -> None:
        begin_action(action, is_last)  # what ZeRO-2 has left to send is of the action before
        recorder.begin_part(OTHERS if action.micro_batch else FIRST)
        chunk = f", chunk {action.chunk}" if engine.stage.stages.num_chunks > 1 else ""
        recorder.ledger.begin(f"{PHASES[action.kind]} of micro-batch {action.micro_batch}{chunk}")

    def end() -> dict[str, float]:
        recorder.begin_part(END)
        recorder.ledger.begin("update")
        return {}

    data_parallel.begin_action = begin  # type: ignore[assignment,method-assign]
    recorder.begin_part(END)
    recorder.ledger.begin("begin of the step")
    engine.step(
        batches,
        num_steps_done=0,
        learning_rate=1e-4,
        weight_decay=0.1,
        decoupled_learning_rate=1e-4,
        votes=end,
    )


def needed_microbatches(stages: Stages, stage: int, planned: int) -> int:
    """Fewest micro-batches, more than there are stages, of which a stage holds as many at once as of all.

    Also when a backward begins after one of every chunk: then all gradients have memory.
    """

    def most(number: int) -> tuple[int, ...]:
        load = stages.load(stage, number)
        late = [each.instant for each in load.backwards if len(each.begun) == stages.num_chunks]
        largest: list[int] = []
        for instants in (load.instants, late):
            sizes = [(sum(each.live) + sum(each.deferred), sum(each.live), each.live[-1]) for each in instants]
            largest += map(max, zip(*sizes, strict=True))
        return tuple(largest)

    number = min(planned, max(2, stages.num_stages + 1))
    while number < planned and most(number) != most(planned):
        number = min(planned, number + stages.num_stages)
    return number


def whole_step(parts: Mapping[str, StepCounts], num_run: int, planned: int) -> StepCounts:
    """Counts of a step of `planned` micro-batches, of which `num_run` ran. What stages send each other is linear.

    So is what ZeRO-3 gathers, in all: where neighbours keep it (hpZ), over all ranks once and then among them.
    """
    whole, first = StepCounts(), parts.get(FIRST, StepCounts())
    of_step = [counts for name, counts in parts.items() if name != "build"]
    more = planned - num_run
    for name in ("calls", "sent", "flops", "uncounted", "waits"):
        total: Counter[Any] = getattr(whole, name)
        for counts in of_step:
            total.update(getattr(counts, name))
        for key, value in list(total.items()):
            if isinstance(key, TrafficKey) and key.axis.startswith(("F ", "B ")):
                total[key] = value * planned // num_run
            elif isinstance(key, TrafficKey) and key[:2] == ("shard", "all-gather"):
                # ZeRO-3 gathers a layer for the action that comes next, which may be another micro-batch's.
                once = sum(getattr(part, name)[key] for number, part in parts.items() if number not in (FIRST, OTHERS))
                kept = key._replace(axis="secondary")
                if kept not in total:
                    total[key] = once + (value - once) * planned // num_run
                else:
                    total[kept] = (value - once + total[kept]) * planned // num_run - (value - once)
            elif isinstance(key, TrafficKey) and key.axis == "secondary":
                pass  # with the key above
            else:
                total[key] = value + more * getattr(first, name)[key]
    return whole
