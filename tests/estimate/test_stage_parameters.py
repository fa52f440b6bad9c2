"""Tests of the list of a stage's parameters, against the model that is built from the same config on a mesh alone."""

from math import prod

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatronish.commands.configuration import read_config
from megatronish.config.config import Config
from megatronish.engine.build import execution_of, with_adapters
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.stage_parameters import StageParameter, StageParameters
from megatronish.launch.place import Place
from megatronish.optim.muon import matrices_of
from megatronish.parallel.bucketing import cut_into_buckets, padded_size
from megatronish.parallel.mesh import Mesh, leave
from megatronish.parallel.pipeline.stage import ModelStage, build_stage
from megatronish.parallel.sharding import Sharding
from megatronish.parallel.stages import Stages

SIZES = "--hidden-size 48 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32"
LORA = "--load never-read --adapter-type lora --lora-rank 3"
CASES = {
    "gpt2": "--tp 2 --dp 2",
    "tied on two stages": "--tp 2 --pp 2 --sequence-parallel --embed-layernorm",
    "zero bubble": f"--pp 2 --pipeline-schedule zb-h1 {LLAMA}",
    "interleaved": f"--pp 2 --num-virtual-stages-per-pipeline-rank 2 {LLAMA} --qk-layernorm",
    "norm over all heads": f"--tp 2 {LLAMA} --qk-layernorm --qk-layernorm-across-heads --softmax-type learnable",
    "xielu": "--tp 2 --sequence-parallel --xielu",
    "experts": f"--tp 2 --dp 2 --ep 2 --etp 2 {LLAMA} {EXPERTS} --moe-shared-expert-gate",
    "experts with biases": f"--tp 2 --dp 2 --ep 2 --etp 2 {LLAMA} {EXPERTS} --moe-add-bias-linear",
    "lora over biases": f"--dp 2 --tp 2 --ep 2 --etp 2 {LLAMA} {EXPERTS} --moe-add-bias-linear {LORA}",
    "lora": f"--tp 2 --sequence-parallel {LLAMA} {LORA}",
    "lora of some sections": f"--tp 2 {LORA} --adapter-targets q v down",
    "lora of experts": f"--dp 2 --tp 2 --ep 2 --etp 2 --disable-bias-linear {LLAMA} {EXPERTS} {LORA}",
    "further predictions": f"--tp 2 --pp 2 --sequence-parallel {LLAMA} --mtp-num-layers 2",
    "further predictions, tied": f"--pp 2 --pipeline-schedule zb-h1 {EXPERTS} --mtp-num-layers 1 "
    "--position-embedding-type rope",
    "lora of further predictions": f"--tp 2 {LLAMA} {LORA} --mtp-num-layers 1",
    "ia3": "--tp 2 --load never-read --adapter-type ia3 --adapter-targets k o down",
}


def as_listed(name: str, tensor: torch.Tensor, sharding: Sharding) -> StageParameter:
    """A parameter of a built model as the list would have it, without what its sharding does not say."""
    shape = tuple(tensor.shape)
    is_matrix = sharding.role == "matrix"
    return StageParameter(
        name,
        shape[0],
        prod(shape[1:]),
        tuple(sorted(sharding.cut_axes)),
        tuple(sorted(sharding.partial_over)),
        sharding.domain,
        sharding.tied,
        matrices=tuple(each.num_elements for each in matrices_of(name, sharding)) if is_matrix else (),
    )


def config_of(flags: str) -> Config:
    argv = f"--mock-data --vocab-size 90 --num-layers 4 --train-iters 1 {SIZES} {flags}".split()
    return read_config(argv).config


def built_by(config: Config, *, pp: int = 0) -> tuple[ModelStage, Stages]:
    """The model of the first rank of a pipeline stage, with its adapters, without memory."""
    model, layout = config.model, config.layout
    rank, has_experts = layout.rank(pp=pp), model.num_experts is not None
    mesh = Mesh.of(
        config.parallel,
        Place(rank, layout.world_size, 0, 1),
        backend="fake",
        has_experts=has_experts,
        store=FakeStore(),
    )
    try:
        stages = Stages.of(config.parallel, model, vocab_size=90, seq_length=16)
        built = build_stage(
            model,
            stages,
            mesh,
            vocab_size=90,
            num_positions=16,
            sequence_parallel=config.parallel.sequence_parallel,
            execution=execution_of(config, mesh),
            device=torch.device("meta"),
        )
        if config.adapter.is_used:
            built = with_adapters(built, config.adapter, device=torch.device("meta"))
        return built, stages
    finally:
        leave()


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", ["first", "last"])
def test_the_list_is_that_of_the_model(name: str, stage: str) -> None:
    config = config_of(CASES[name])
    place = config.layout.pp - 1 if stage == "last" else 0
    built, stages = built_by(config, pp=place)
    parameters = dict(built.model.named_parameters())
    listed = list(StageParameters(config, stages.load(place, 8), 90).all())
    found = [each._replace(cut=tuple(sorted(each.cut)), sources=frozenset(), learns=True) for each in listed]
    assert found == [as_listed(each, parameters[each], built.shardings[each]) for each in parameters]
    for each in listed:
        kind = "W" if stages.schedule.has_weight_gradients else "B"
        users = built.model.users()[each.name]
        assert each.sources == {(user.chunk, kind if user.is_linear else "B") for user in users}
        assert each.learns == (not config.adapter.is_used or ".adapters." in each.name)


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize(
    "adapter", ["lora --lora-rank 3", "lora --lora-rank 3 --quantize-base int8", "ia3 --adapter-targets down"]
)
def test_bytes_of_adapters_of_experts_are_those_of_the_model(adapter: str, etp: int) -> None:
    """Factors that etp does not cut, and scales, are whole on each of its ranks."""
    layout = f"--tp 4 --ep 2 --etp {etp} --dp 2 --disable-bias-linear"
    config = config_of(f"{layout} {LLAMA} {EXPERTS} --load never-read --adapter-type {adapter}")
    built, stages = built_by(config)
    tensors = dict(built.model.named_parameters())
    learned = sum(tensor.numel() for name, tensor in tensors.items() if ".adapters." in name)
    (memory,) = expected_memory(config, stages.loads(8), vocab_size=90)
    assert memory.optimizer == 8 * learned
    assert memory.gradients == 4 * learned
    assert memory.parameters == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_buckets_take_parameters_until_they_are_full_and_are_padded_for_every_rank() -> None:
    assert list(cut_into_buckets([4, 4, 1, 9, 2], 8)) == [range(0, 2), range(2, 4), range(4, 5)]
    assert list(cut_into_buckets([], 8)) == []
    assert padded_size([3, 8], alignment=4, ranks=2) == 16
    assert padded_size([3], alignment=8, ranks=4) == 32
