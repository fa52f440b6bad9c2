"""Table of the pipeline schedules, by the names of --pipeline-schedule.

A new schedule is a function in a file of this folder and a line in `SCHEDULES`: `simulate`, the executor, the drawings,
the tools and the tests take it from this table.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatronish.core.errors import UserError
from megatronish.parallel.schedules.one_f_one_b import gpipe, interleaved, one_f_one_b
from megatronish.parallel.schedules.plan import Action, Placement, Plan, looped, v_shaped
from megatronish.parallel.schedules.zero_bubble import zb_h1, zb_v

RECEIVES_AHEAD = 1
"""Number of actions by which a receive is posted early, so that the transfer overlaps with their computation."""


@dataclass(frozen=True)
class PipelineSchedule:
    """An order of actions and a placement that belong together."""

    name: str
    generate: Callable[..., list[Action]]
    """The actions of one stage, a pure function, so that each rank computes its own."""
    placement: Callable[..., Placement]
    num_chunks: int | None
    """The number of chunks of a stage; None if any number is possible."""
    has_weight_gradients: bool
    """Whether its plans have W actions, which need layers with a split backward."""

    def plan(self, *, num_stages: int, num_microbatches: int, num_chunks: int | None = None) -> Plan:
        """The actions of every stage. UserError for sizes that the schedule does not have."""
        sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
        return [self.row(stage=stage, **sizes) for stage in range(max(num_stages, 1))]  # type: ignore[arg-type]

    def row(self, *, stage: int, num_stages: int, num_microbatches: int, num_chunks: int | None = None) -> list[Action]:
        """The actions of one stage. UserError for sizes that the schedule does not have."""
        chunks = self._checked(num_stages, num_chunks)
        if num_microbatches < 1:
            raise UserError(f"num_microbatches={num_microbatches} must be at least 1")
        return self.generate(stage=stage, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=chunks)

    def place(self, *, num_stages: int, num_chunks: int | None = None) -> Placement:
        """The stage and chunk of every position of the model. UserError as in `plan`."""
        return self.placement(num_stages=num_stages, num_chunks=self._checked(num_stages, num_chunks))

    def _checked(self, num_stages: int, num_chunks: int | None) -> int:
        """The number of chunks, by default the schedule's own (1 if any number is possible)."""
        if num_stages < 1:
            raise UserError(f"num_stages={num_stages} must be at least 1")
        chunks = num_chunks if num_chunks is not None else self.num_chunks or 1
        if self.num_chunks not in (None, chunks):
            others = ", ".join(name for name, other in SCHEDULES.items() if other.num_chunks in (None, chunks))
            raise UserError(
                f"schedule {self.name} has num_chunks={self.num_chunks} a stage, not {chunks}; "
                f"use {self.num_chunks}, or one of {others} for {chunks}"
            )
        if chunks < 1:
            raise UserError(f"num_chunks={chunks} must be at least 1")
        return chunks


SCHEDULES: dict[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("gpipe", gpipe, looped, num_chunks=1, has_weight_gradients=False),
        PipelineSchedule("1f1b", one_f_one_b, looped, num_chunks=1, has_weight_gradients=False),
        PipelineSchedule("interleaved", interleaved, looped, num_chunks=None, has_weight_gradients=False),
        PipelineSchedule("zb-h1", zb_h1, looped, num_chunks=1, has_weight_gradients=True),
        PipelineSchedule("zb-v", zb_v, v_shaped, num_chunks=2, has_weight_gradients=True),
    )
}
"""The schedules of --pipeline-schedule."""
