"""What does a config make of the pipeline? Who holds which layers, who does what when, and what that keeps alive."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megatronish.config.model import ModelConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.flops import forward_flops
from megatronish.memory import StageLoad
from megatronish.pipeline.plan import Place, Placement, Plan
from megatronish.pipeline.schedule import SCHEDULES, Schedule
from megatronish.pipeline.split import split_layers


@dataclass(frozen=True)
class Stages:
    """A schedule, and the layers of every position of its placement."""

    schedule: Schedule
    num_stages: int
    num_chunks: int
    layers: tuple[range, ...]

    @classmethod
    def of(cls, parallel: ParallelConfig, model: ModelConfig, *, vocab_size: int, seq_length: int) -> "Stages":
        """As --pipeline-schedule, --pipeline-split and the flags of single stages say."""
        schedule, num_chunks = SCHEDULES[parallel.schedule], parallel.num_chunks(model.num_layers)
        num_stages = parallel.pipeline_model_parallel_size
        weights = None
        if parallel.pipeline_split == "auto":
            forward = forward_flops(model, vocab_size=vocab_size, seq_length=seq_length)
            layer = (forward.linear + 2 * forward.scores) / model.num_layers
            # Looking an embedding up multiplies nothing: what it costs is a copy of D values against a layer's D^2.
            weights = (1 / model.hidden_size, forward.logits / layer)
        layers = split_layers(
            num_layers=model.num_layers,
            placement=schedule.place(num_stages=num_stages, num_chunks=num_chunks),
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
            weights=weights,
        )
        return cls(schedule, num_stages, num_chunks, tuple(layers))

    @property
    def placement(self) -> Placement:
        """The place of every position of the model."""
        return self.schedule.place(num_stages=self.num_stages, num_chunks=self.num_chunks)

    def plan(self, num_microbatches: int) -> Plan:
        """Every stage's actions of a step."""
        return _plan(self.schedule.name, self.num_stages, num_microbatches, self.num_chunks)

    def layers_at(self, place: Place) -> range:
        """The layers of one chunk of one stage."""
        return self.layers[self.placement.index(place)]

    def is_first(self, place: Place) -> bool:
        """Whether the model starts there."""
        return place == self.placement[0]

    def is_last(self, place: Place) -> bool:
        """Whether the model ends there."""
        return place == self.placement[-1]

    def loads(self, num_microbatches: int) -> list[StageLoad]:
        """What each stage holds when it holds most."""
        plan = self.plan(num_microbatches)
        return [self._load(stage, plan) for stage in range(self.num_stages)]

    def _load(self, stage: int, plan: Plan) -> StageLoad:
        released_by = "W" if self.schedule.has_weight_gradients else "B"
        places = [Place(stage, chunk) for chunk in range(self.num_chunks)]
        layers = tuple(len(self.layers_at(place)) for place in places)
        live = [0] * self.num_chunks
        fullest = tuple(live)
        for action in plan[stage]:
            live[action.chunk] += (action.kind == "F") - (action.kind == released_by)
            if _held(live, layers) > _held(fullest, layers):
                fullest = tuple(live)
        return StageLoad(
            layers=layers,
            live=fullest,
            is_first=any(map(self.is_first, places)),
            is_last=any(map(self.is_last, places)),
        )


@cache
def _plan(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Plan:
    return SCHEDULES[name].plan(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)


def _held(live: Sequence[int], layers: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(live, layers, strict=True))
