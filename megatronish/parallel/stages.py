"""Pipeline stages of a config: the layers of each stage, its actions in a step, and its live activations."""

from dataclasses import dataclass
from functools import cached_property

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.remembered import remembered
from megatronish.parallel.schedules.live_activations import StageLoad, StagePlan
from megatronish.parallel.schedules.plan import Action, Placement, StageChunk
from megatronish.parallel.schedules.split import SplitWeights, split_layers
from megatronish.parallel.schedules.table import SCHEDULES, PipelineSchedule
from megatronish.specs.flops import layer_flops, logits_flops
from megatronish.specs.layers import layer_specs


@dataclass(frozen=True)
class Stages:
    """A pipeline schedule with the layers of every position of its placement."""

    schedule: PipelineSchedule
    num_stages: int
    num_chunks: int
    layers: tuple[range, ...]

    @classmethod
    def of(cls, parallel: ParallelConfig, model: ModelConfig, *, vocab_size: int, seq_length: int) -> "Stages":
        """The stages that --pipeline-schedule, --pipeline-split and the flags of single stages describe."""
        schedule, num_chunks = SCHEDULES[parallel.schedule], parallel.num_chunks(model.num_layers)
        num_stages = parallel.pipeline_model_parallel_size
        weights = None
        if parallel.pipeline_split == "auto":
            every = [layer_flops(model, spec, seq_length=seq_length) for spec in layer_specs(model)]
            flops, ahead = every[: model.num_layers], sum(every[model.num_layers :])
            mean = sum(flops) / len(flops)
            # An embedding lookup multiplies nothing: a copy of D values a token, against a layer's D^2 products.
            weights = SplitWeights(
                embedding=1 / model.hidden_size,
                head=(logits_flops(model, vocab_size, seq_length=seq_length) + ahead) / mean,
                layers=tuple(each / mean for each in flops),
            )
        embedding, head = parallel.ends_in_split
        ranges = split_layers(
            num_layers=embedding + model.num_layers + head,
            placement=schedule.place(num_stages=num_stages, num_chunks=num_chunks),
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
            weights=weights,
        )
        # Without the embedding and the head: a position that holds one of them alone has no layer.
        layers = range(model.num_layers)
        own = [layers[max(each.start - embedding, 0) : max(each.stop - embedding, 0)] for each in ranges]
        # Those of multi-token prediction read what the last one hands to the output layer.
        own[-1] = range(own[-1].start, model.num_all_layers)
        return cls(schedule, num_stages, num_chunks, tuple(own))

    @cached_property
    def placement(self) -> Placement:
        """The stage and chunk of every position of the model."""
        return self.schedule.place(num_stages=self.num_stages, num_chunks=self.num_chunks)

    @cached_property
    def _positions(self) -> dict[StageChunk, int]:
        return {place: position for position, place in enumerate(self.placement)}

    @remembered
    def actions(self, stage: int, num_microbatches: int) -> list[Action]:
        """The actions of one stage in a step, in order."""
        return self.schedule.row(
            stage=stage, num_stages=self.num_stages, num_microbatches=num_microbatches, num_chunks=self.num_chunks
        )

    def layers_at(self, place: StageChunk) -> range:
        """The layers of one chunk of one stage."""
        return self.layers[self._positions[place]]

    def is_first(self, place: StageChunk) -> bool:
        """Whether the place holds the first position of the model."""
        return self._positions[place] == 0

    def is_last(self, place: StageChunk) -> bool:
        """Whether the place holds the last position of the model."""
        return self._positions[place] == len(self._positions) - 1

    def loads(self, num_microbatches: int) -> list[StageLoad]:
        """The load of every stage: its layers, and the numbers of live activations at every instant of a step."""
        return [self.load(stage, num_microbatches) for stage in range(self.num_stages)]

    def load(self, stage: int, num_microbatches: int) -> StageLoad:
        """The load of one stage."""
        places = [StageChunk(stage, chunk) for chunk in range(self.num_chunks)]
        return StageLoad(
            layers=tuple(self.layers_at(place) for place in places),
            is_first=any(map(self.is_first, places)),
            is_last=any(map(self.is_last, places)),
            plan=StagePlan(self.schedule.name, self.num_stages, self.num_chunks, num_microbatches, stage),
        )


def stage_loads(config: Config, vocab_size: int) -> list[StageLoad]:
    """The load of every stage in a step of a config."""
    training = config.training
    stages = Stages.of(config.parallel, config.model, vocab_size=vocab_size, seq_length=training.seq_length)
    return stages.loads(config.num_microbatches)
