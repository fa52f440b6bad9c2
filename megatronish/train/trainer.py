"""The training loop of one rank: data, a step of the engine, hooks; everything that watches a run is a hook.

Hooks are called in their order: those that decide whether to stop come before the one that saves. A hook may look at
everything and change nothing but `stop_reason`.

What only looks never ends a run by its own fault: an observer (`Hook.is_observer`) that raises is left out from then
on, and one line says so. A hook that communicates guards what it does alone, and tells the other ranks in the
collective that follows (`Aside`); so all of them leave it out, and none waits for another.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatronish.config.sections.run import LogConfig
from megatronish.core.aside import Aside
from megatronish.core.names import HOOK_NAMES, options_of_each
from megatronish.data.loader import Prefetcher
from megatronish.engine.engine import Engine
from megatronish.engine.nan_origin import find_origin
from megatronish.engine.results import NotFiniteError, StepResult
from megatronish.model.batch import MicroBatch
from megatronish.optim.schedules import BatchSizeSchedule, LearningRateSchedule
from megatronish.parallel.ranges import DATA, UPDATE, marked
from megatronish.watch.record import PhaseName, RankRecord


@dataclass
class Progress:
    """Progress of a run: `step` is the number of steps done, and so the number of the last one, counted from 1."""

    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0  # of them: their gradient overflowed or was a spike, and they changed no parameter
    skipped_samples: int = 0  # what those consumed: the learning rate is constant over them, as in Megatron-LM


@dataclass(frozen=True)
class TrainingSchedule:
    """Schedules of learning rate, weight decay and batch size, and the number of the last step."""

    learning_rate: LearningRateSchedule
    batch_size: BatchSizeSchedule
    num_steps: int


class LearningRates(NamedTuple):
    """Learning rates of a step, and the momentum where it cycles.

    `decoupled` is the rate of word embedding and output layer, with --decoupled-lr alone.
    """

    base: float
    decoupled: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """One finished step, counted from 1. `seconds` is the engine's step: forward, backward, update; no data, no saving.

    `data_seconds` is the time for which the loop waited for the batch of this step. `consumed_samples` includes the
    `global_batch_size` of this step.
    """

    step: int
    result: StepResult
    learning_rates: LearningRates
    global_batch_size: int
    consumed_samples: int
    seconds: float
    data_seconds: float = 0.0

    @property
    def learning_rate(self) -> float:
        """Learning rate of the step, of all except decoupled parameters."""
        return self.learning_rates.base


class Hook:
    """An observer of a run. Every rank calls its hooks in the same order, so a hook may communicate.

    `name` is the key of its state in a checkpoint; a hook that keeps something over a resume has one. `phase` says to
    the watchdog what the hook does after a step, and so how long it may take.
    """

    name = ""
    phase: PhaseName = "hook"
    is_observer = False
    """Whether the run continues without it if it raises. It sends nothing, for the other ranks know nothing of it."""

    def start(self, trainer: "Trainer") -> None:
        """Called before the first step."""

    def before_step(self, trainer: "Trainer") -> None:
        """Called before every step; the step's number is `trainer.progress.step + 1`."""

    def votes(self, step: int) -> dict[str, float]:
        """Numbers to be summed over all ranks in step `step`; their names are the same on every rank, in every step."""
        return {}

    def decided(self, trainer: "Trainer", sums: Mapping[str, float]) -> None:
        """Called with the sums of all hooks' votes, before any hook's `after_step`."""

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        """Called after every step."""

    def on_error(self, trainer: "Trainer", error: BaseException) -> None:
        """Called on a rank whose loop raises. It must not communicate: other ranks may be anywhere."""

    def finish(self, trainer: "Trainer") -> None:
        """Called after the last step."""

    def state(self) -> dict[str, Any]:
        """State of this hook for a checkpoint, of JSON's types, taken on the main rank. Empty: nothing is kept."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state that `state` returned before a resume. Called before `start`."""


@dataclass
class Trainer:
    """A run on one rank. `prepare(consumed_samples, global_batch_size)` makes the micro-batches of a step.

    `record` is shown the phase that the run is in.
    """

    engine: Engine
    schedule: TrainingSchedule
    prepare: Callable[[int, int], list[MicroBatch]]
    num_ahead: int
    hooks: Sequence[Hook]
    progress: Progress
    record: RankRecord = field(default_factory=RankRecord)
    stop_reason: str | None = field(default=None, init=False)
    _asides: dict[Hook, Aside] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Train from `progress` until the end, or until a hook says to stop."""
        for hook in self.hooks:
            with self._guarded(hook) as active:
                active.start(self)
        # What a step reads follows from the samples consumed before it, so steps can be prepared ahead, and a resume
        # reads the same.
        batches = Prefetcher(
            self.prepare,
            consumed_samples=self.progress.consumed_samples,
            global_batch_size=self.schedule.batch_size.at,
            num_ahead=self.num_ahead,
            num_steps=self.schedule.num_steps - self.progress.step,
        )
        # A failure in the loop is shown to hooks while the data still come, and its threads end in any case.
        with batches, self._errors_shown_to_hooks():
            while self.progress.step < self.schedule.num_steps and self.stop_reason is None:
                self._step_with_hooks(batches)
        with self._errors_shown_to_hooks():
            for hook in self.hooks:
                self.record.enter_phase(hook.phase, "" if hook.phase == "save" else type(hook).__name__)
                with self._guarded(hook) as active:
                    active.finish(self)

    @contextmanager
    def _guarded(self, hook: Hook) -> Iterator[Hook]:
        """The hook to call; in its place one that does nothing, where the hook is an observer that has failed."""
        # A hook that communicates is never replaced: if one rank left it out, the others would wait in it.
        if not hook.is_observer:
            yield hook
            return
        aside = self._asides.setdefault(hook, Aside(f"the hook {type(hook).__name__}"))
        with aside.guard():
            yield Hook() if aside.is_off else hook

    def _step_with_hooks(self, batches: Iterator[list[MicroBatch]]) -> None:
        # 1. Data: waiting for it is no part of the step's time.
        watched = self.record
        watched.step = self.progress.step + 1
        for hook in self.hooks:
            with self._guarded(hook) as active:
                active.before_step(self)
        start = time.perf_counter()
        watched.enter_phase("data")
        with marked(DATA):
            micro_batches = next(batches)
        data_seconds = time.perf_counter() - start
        # 2. The step. The votes of hooks are summed with its loss, so that deciding together takes no collective of its
        # own.
        watched.enter_phase("step")
        record = replace(self.step(micro_batches), data_seconds=data_seconds)
        watched.finished_step(data_seconds + record.seconds)
        # 3. All hooks hear the decision before any acts on it: one that saves must know whether this was the last step.
        for hook in self.hooks:
            hook.decided(self, record.result.votes)
        for hook in self.hooks:
            watched.enter_phase(hook.phase, "" if hook.phase == "save" else type(hook).__name__)
            with self._guarded(hook) as active:
                active.after_step(self, record)

    def step(self, micro_batches: list[MicroBatch]) -> StepRecord:
        """One step from its micro-batches."""
        # 1. Rates are functions of the samples learned from before this step: steps that were skipped do not count.
        before, schedule = self.progress, self.schedule
        learned_from = before.consumed_samples - before.skipped_samples
        decoupled = schedule.learning_rate.decoupled
        rates = LearningRates(
            schedule.learning_rate.learning_rate(learned_from),
            None if decoupled is None else decoupled.learning_rate(learned_from),
            schedule.learning_rate.momentum(learned_from),
        )
        start = time.perf_counter()
        with marked(UPDATE):
            try:
                result = self.engine.step(
                    micro_batches,
                    num_steps_done=before.step,
                    learning_rate=rates.base,
                    weight_decay=schedule.learning_rate.weight_decay(learned_from),
                    decoupled_learning_rate=rates.decoupled,
                    momentum=rates.momentum,
                    votes=self._votes,
                    is_last=before.step + 1 == schedule.num_steps,
                )
            # 2. The parameters have not changed yet, so the same step can be computed again, to find where it begins;
            # on all ranks, as that communicates.
            except NotFiniteError as error:  # on all ranks at once, for they have the same loss and norm
                try:
                    origin = find_origin(self.engine, micro_batches, num_steps_done=before.step)
                except Exception as another:
                    error.add_note(f"where it begins was not found: {type(another).__name__}: {another}")
                    raise error from None
                raise NotFiniteError(f"{error}. Computed again, {origin.phrase}", origin=origin.rank) from None
        # 3. Progress counts a skipped step, too: its samples are consumed.
        seconds = time.perf_counter() - start
        size = schedule.batch_size.at(before.consumed_samples)
        self.progress = Progress(
            before.step + 1,
            before.consumed_samples + size,
            before.skipped_steps + result.skipped,
            before.skipped_samples + size * result.skipped,
        )
        return StepRecord(
            self.progress.step,
            result,
            rates,
            size,
            self.progress.consumed_samples,
            seconds=seconds,
        )

    def _votes(self) -> dict[str, float]:
        """Votes of this rank's hooks for the step that is being computed."""
        step = self.progress.step + 1
        votes = [vote for hook in self.hooks for vote in hook.votes(step).items()]
        assert len(dict(votes)) == len(votes), f"two hooks cast votes of one name: {[name for name, _ in votes]}"
        return dict(votes)

    def hook_states(self) -> dict[str, dict[str, Any]]:
        """States of the hooks that keep something, by name."""
        states = {}
        for hook in self.hooks:
            with self._guarded(hook) as active:
                if hook.name and (state := active.state()):
                    states[hook.name] = state
        return states

    def load_hook_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Hand each hook its state, where there is one; states of unknown names are left aside."""
        for hook in self.hooks:
            if hook.name in states:
                with self._guarded(hook) as active:
                    active.load_state(states[hook.name])

    @contextmanager
    def _errors_shown_to_hooks(self) -> Iterator[None]:
        """Call every hook's `on_error`, and raise the same error again whatever they do."""
        try:
            yield
        except BaseException as error:
            for hook in self.hooks:
                try:
                    hook.on_error(self, error)
                except Exception as another:
                    error.add_note(f"{type(hook).__name__}.on_error failed too: {another!r}")
            raise


HOOKS: dict[str, Callable[..., Hook]] = {}
"""Makers of hooks: called on every rank with the `TrainingJob`, and with the options of the name in `HOOK_NAMES`."""


def hooks_of(log: LogConfig, job: object) -> list[Hook]:
    """The hooks that a config names, in its order. One without a name of its own keeps its state under that name."""
    hooks = []
    for name, options in options_of_each(HOOK_NAMES, log.hook, log.hook_args).items():
        hook = HOOKS[name](job, **options)
        hook.name = hook.name or name
        hooks.append(hook)
    return hooks
