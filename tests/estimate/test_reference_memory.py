"""The second model of --reference model: what it takes on a rank, and that the forecast counts it."""

from dataclasses import replace

import pytest
from held_bytes import bytes_held
from preference_runs import LORA, MODEL
from ranks import run_ranks
from sweeps import further

from megatronish.config.config import Config
from megatronish.config.sections.finetuning import AdapterConfig, PreferenceConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.engine.build import build_engine
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.memory_table import Memory
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.stages import Stages

QLORA = replace(LORA, quantize_base="nf4")
WIDE = replace(MODEL, hidden_size=128, ffn_hidden_size=256, make_vocab_size_divisible_by=16)
VOCAB_SIZE = 101


def config_of(reference: str, parallel: ParallelConfig, adapter: AdapterConfig) -> Config:
    return Config(
        model=WIDE,
        parallel=parallel,
        training=TrainingConfig(seq_length=16, bf16=True, objective="dpo"),
        adapter=adapter,
        preference=PreferenceConfig(reference=reference),  # type: ignore[arg-type]
    )


def expected(config: Config) -> list[Memory]:
    stages = Stages.of(config.parallel, config.model, vocab_size=VOCAB_SIZE, seq_length=16)
    return expected_memory(config, stages.loads(1), vocab_size=VOCAB_SIZE)


def held(place: Place, config: Config) -> int:
    """Bytes that a rank holds once its engine is built."""
    before = bytes_held()
    engine = build_engine(config, Mesh.of(config.parallel, place), vocab_size=VOCAB_SIZE)
    assert (engine.reference is not None) == (config.reference == "model")
    return bytes_held() - before


@pytest.mark.parametrize(
    ("parallel", "adapter"),
    [
        (ParallelConfig(), AdapterConfig()),
        (ParallelConfig(), QLORA),  # of which the reference is not quantised
        further((ParallelConfig(tensor_model_parallel_size=2), LORA)),
        (ParallelConfig(data_parallel_size=2, zero_stage=3), LORA),
        further((ParallelConfig(pipeline_model_parallel_size=2), AdapterConfig())),
    ],
    ids=["whole", "qlora", "tp", "zero-3", "pp"],
)
def test_the_reference_takes_what_the_forecast_says(parallel: ParallelConfig, adapter: AdapterConfig) -> None:
    with_model, stored = (config_of(reference, parallel, adapter) for reference in ("model", "stored"))
    size = parallel.layout.world_size
    found = [a - b for a, b in zip(run_ranks(size, held, with_model), run_ranks(size, held, stored), strict=True)]
    forecasts = [a.parameters - b.parameters for a, b in zip(expected(with_model), expected(stored), strict=True)]
    for rank, more in enumerate(found):
        assert more == pytest.approx(forecasts[parallel.layout.coordinates(rank).pp], rel=0.02)


def test_the_reference_has_weights_alone() -> None:
    (with_model,), (stored,) = (
        expected(config_of(reference, ParallelConfig(data_parallel_size=2, zero_stage=3), LORA))
        for reference in ("model", "stored")
    )
    more = with_model.parameters - stored.parameters
    assert more > 0
    assert with_model.total - stored.total == more  # it is gathered when the model that learns is not
    assert with_model._replace(parameters=0) == stored._replace(parameters=0)


def test_without_adapters_the_reference_is_a_second_model() -> None:
    """And the default: so the forecast of --objective dpo alone has it."""
    (default,) = expected(replace(config_of("model", ParallelConfig(), AdapterConfig()), preference=PreferenceConfig()))
    (stored,) = expected(config_of("stored", ParallelConfig(), AdapterConfig()))
    assert default.parameters == 2 * stored.parameters
