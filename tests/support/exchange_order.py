"""Order in which a rank starts exchanges, waits for them and multiplies matrices, as a dry run of one step shows it.

A dry run sends nothing and takes no time: what it shows is the order of the calls. An exchange is hidden by what is
computed between its start and its wait.

    PYTHONPATH=.:tests/support python tests/support/exchange_order.py     (the table of docs/SHARDING.md)
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from command_lines import small
from happens_before import STARTERS
from torch._C._distributed_c10d import FakeWork

from megatronish.config.read import read_config
from megatronish.dry_run import rank as dry_rank
from megatronish.dry_run.ledger import StorageLedger
from megatronish.dry_run.rank import PlannedRun, run_rank
from megatronish.dry_run.recorder import StepRecorder, formula_of
from megatronish.engine.engine import Engine

COLLECTIVES = {
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "send": "send",
    "recv": "receive",
}


class Event(NamedTuple):
    """Something that the rank does: `what` is start, wait, product, or begin and end of a part.

    `exchange` is its number, in the order of starts, and -1 of others. `name` is that of the collective and its axis,
    of the part, or of the operator. `phase` is the action of the pipeline, `layer` the layer that is computed.
    """

    what: str
    name: str
    exchange: int
    phase: str
    layer: int | None


class Flight(NamedTuple):
    """An exchange from its start to its wait; `products` lie between the two. None waits for it within the step."""

    start: Event
    wait: Event | None
    products: list[Event]

    @property
    def line(self) -> str:
        """Its collective, and how many products hide it."""
        return f"{self.start.name} {len(self.products) if self.wait is not None else 'not waited for'}"


class OrderRecorder:
    """Events of a step, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._layer: int | None = None
        self._phase, self._starts = "build", 0
        self._works: dict[int, tuple[object, int, str]] = {}  # by id of the Work, which is kept
        self._last: tuple[str, str] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Meanwhile a dry run is recorded."""
        with ExitStack() as patches:
            for name in STARTERS:
                plain = getattr(dist.ProcessGroup, name)
                patches.enter_context(patch.object(dist.ProcessGroup, name, self._starting(plain, name)))
            patches.enter_context(patch.object(FakeWork, "wait", self._waiting(FakeWork.wait)))
            dispatch, begin, build = StepRecorder.__torch_dispatch__, StorageLedger.begin, dry_rank.build_engine
            patches.enter_context(patch.object(StepRecorder, "__torch_dispatch__", self._multiplying(dispatch)))
            patches.enter_context(patch.object(StorageLedger, "begin", self._beginning(begin)))
            patches.enter_context(patch.object(dry_rank, "build_engine", self._building(build)))
            yield

    def flights(self) -> list[Flight]:
        """Exchanges in the order of their starts."""
        starts = [place for place, event in enumerate(self.events) if event.what == "start"]
        waits = {event.exchange: place for place, event in enumerate(self.events) if event.what == "wait"}
        flights = []
        for place in starts:
            start = self.events[place]
            end = waits.get(start.exchange, len(self.events))
            products = [event for event in self.events[place:end] if event.what == "product"]
            flights.append(Flight(start, self.events[end] if end < len(self.events) else None, products))
        return flights

    def of_layer(self, layer: int, part: str) -> list[Flight]:
        """Exchanges that are started in the last forward, or backward, of a layer."""
        phase = [event.phase for event in self.events if event.phase.startswith(part)][-1]
        return [each for each in self.flights() if (each.start.phase, each.start.layer) == (phase, layer)]

    def _note(self, what: str, name: str, exchange: int = -1) -> None:
        self.events.append(Event(what, name, exchange, self._phase, self._layer))

    def _starting(self, start: Callable[..., Any], name: str) -> Callable[..., Any]:
        kind = next((kind for word, kind in COLLECTIVES.items() if name.strip("_").startswith(word)), name)

        @wraps(start)
        def started(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = start(group, *args, **kwargs)
            named = f"{group.group_desc} {kind}"
            self._works[id(work)] = (work, self._starts, named)
            self._note("start", named, self._starts)
            self._starts += 1
            return work

        return started

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wait)
        def waited(work: Any, *args: Any) -> Any:
            if (known := self._works.pop(id(work), None)) is not None:
                self._note("wait", known[2], known[1])
            return wait(work, *args)

        return waited

    def _multiplying(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(dispatch)
        def dispatched(recorder: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            if formula_of(func._overloadpacket) is not None:
                self._note("product", func._overloadpacket.__name__)
            return dispatch(recorder, func, *args, **kwargs)

        return dispatched

    def _beginning(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(begin)
        def began(ledger: Any, phase: str) -> Any:
            self._phase, self._layer = phase, None
            return begin(ledger, phase)

        return began

    def _building(self, build: Callable[..., Engine]) -> Callable[..., Engine]:
        @wraps(build)
        def built(*args: Any, **kwargs: Any) -> Engine:
            engine = build(*args, **kwargs)
            for name, layer in engine.stage.model.get_submodule("layers").named_children():
                layer.register_forward_pre_hook(self._entering("begin", int(name)), prepend=True)
                layer.register_forward_hook(self._entering("end", int(name)))
                layer.register_full_backward_pre_hook(self._entering("begin", int(name)), prepend=True)
                layer.register_full_backward_hook(self._entering("end", int(name)))
            return engine

        return built

    def _entering(self, what: str, layer: int) -> Callable[..., None]:
        def entered(*_: Any) -> None:
            self._layer = layer
            self._note(what, f"layer {layer}")
            self._layer = layer if what == "begin" else None

        return entered


SIZES = "--num-layers 3 --vocab-size 512 --hidden-dropout 0 --attention-dropout 0 --bf16"
STEP = "--micro-batch-size 1 --global-batch-size 4"
RUNS = {
    "`--dp 2 --zero-stage 1`": "--dp 2 --zero-stage 1 --ddp-bucket-size 120000",
    "`--dp 2 --zero-stage 2`": "--dp 2 --zero-stage 2 --ddp-bucket-size 120000",
    "`--tp 2`": "--tp 2",
    "`--tp 2 --sequence-parallel`": "--tp 2 --sequence-parallel",
    "the same with `--tp-comm-overlap`": "--tp 2 --sequence-parallel --tp-comm-overlap",
    "`--cp 2`": "--cp 2",
    "`--cp 2 --cp-comm-type a2a`": "--cp 2 --cp-comm-type a2a",
    "`--num-experts 4 --ep 2`": "--dp 2 --ep 2 --num-experts 4 --moe-router-topk 2",
    "the same with shared experts": "--dp 2 --ep 2 --num-experts 4 --moe-router-topk 2 "
    "--moe-shared-expert-intermediate-size 64",
}


def order_of(flags: str, *, rank: int = 0) -> OrderRecorder:
    """What a rank of a small model does in one step with these flags."""
    config = read_config(small("--mock-data", *SIZES.split(), *STEP.split(), *flags.split())).config
    assert config.data.vocab_size is not None
    recorder = OrderRecorder()
    with recorder.listening():
        run_rank(PlannedRun(config, config.data.vocab_size, "cpu"), rank, then=lambda *_: None)
    return recorder


def row_of(name: str, flags: str) -> str:
    """A row of the table: exchanges of layer 1 in the last micro-batch, with the products that hide each."""
    recorder = order_of(flags)
    cells = [", ".join(flight.line for flight in recorder.of_layer(1, part)) for part in ("forward", "backward")]
    return f"| {name} | {' | '.join(cell or '-' for cell in cells)} |"


if __name__ == "__main__":
    for run, words in RUNS.items():
        print(row_of(run, words))
