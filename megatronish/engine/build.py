"""Assembly of an engine, one function a step, in the order in which the parts are wrapped around each other.

build_stage         the modules of this rank's stage (parallel/pipeline/stage.py)
with_adapters       adapters of its linear layers; with --quantize-base the layers themselves in 4 bits
freeze              which parameters learn
make_data_parallel  parameters and gradients over the data ranks, as the ZeRO stage says, and their initial values
add_in_place        weight gradients added to the sums of a step by the layers themselves
split_backward      weight gradients deferred to W actions, where the schedule has them
Optimizer           over the fp32 masters that this rank keeps
OuterOptimizer      over the same ones, every few steps, with --outer-optimizer
build_executor      the loop over the actions of a plan
with_graphs         with --cuda-graph, the replay of micro-batches around it

What changes the modules of a stage belongs between build_stage and freeze: `linear.set_products`, for a matrix product
in another precision, would.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatronish.config.config import Config
from megatronish.config.sections.finetuning import AdapterConfig, PreferenceConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import RecomputeConfig, TrainingConfig
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.engine.engine import Engine
from megatronish.engine.forward import PairPreparation, Scorer, SentencePreparation, run_chunk
from megatronish.engine.qk_clip import QKClip
from megatronish.engine.results import UpdateRule
from megatronish.layers.linear import split_backward
from megatronish.layers.recompute import Recompute
from megatronish.layers.weight_gradients import WeightGradients, add_in_place
from megatronish.model.adapters import DEFAULT, add_adapters, is_adapter
from megatronish.model.batch import MicroBatch
from megatronish.model.block import MakeBlock
from megatronish.model.compiled import compile_layers, why_not_compiled
from megatronish.model.gpt import Execution
from megatronish.model.quantised import form_of, quantise_base
from megatronish.objectives.ahead import MultiTokenPrediction
from megatronish.objectives.masked import SentenceObjective
from megatronish.objectives.objective import CausalLM, LogitsObjective
from megatronish.objectives.pairs import AnyObjective, PairObjective
from megatronish.objectives.table import objective_of
from megatronish.ops.gradient_sum import sums_unrounded
from megatronish.optim.loss_scale import NormSpikes, loss_scale_of
from megatronish.optim.optimizer import Optimizer
from megatronish.optim.outer import OuterOptimizer, OuterSettings
from megatronish.parallel.data_parallel.coded_weights import refuse_odd_rows
from megatronish.parallel.data_parallel.data_parallel import DataParallel, DataParallelSettings
from megatronish.parallel.data_parallel.fully_sharded import FullySharded
from megatronish.parallel.data_parallel.zero import Zero
from megatronish.parallel.deep_ep import exchange_of, runs_on
from megatronish.parallel.mesh import Axis, ExpertParallel, Mesh
from megatronish.parallel.pipeline.cuda_graph import Record, ReplayingExecutor, record_on_cuda
from megatronish.parallel.pipeline.executor import Boundary, Executor
from megatronish.parallel.pipeline.stage import ModelStage, build_stage
from megatronish.parallel.sharding import Sharding, collect_shardings
from megatronish.parallel.stages import Stages

Trainable = Callable[[str, Sharding], bool]
"""Whether a parameter learns, by its name and what it is."""


def everything(_name: str, _sharding: Sharding) -> bool:
    """Choice of an engine that trains the whole model."""
    return True


def adapters_alone(name: str, _sharding: Sharding) -> bool:
    """Choice of an engine with adapters: the model itself is frozen."""
    return is_adapter(name)


def nothing(_name: str, _sharding: Sharding) -> bool:
    """Choice of an engine that only evaluates: neither gradients nor masters nor optimizer states."""
    return False


def freeze(stage: ModelStage, trainable: Trainable) -> dict[str, Sharding]:
    """Take what is not trainable out of autograd; the shardings of what is left to learn.

    A module may have frozen parameters of its own at construction: they stay frozen.
    """
    learning = {}
    for name, parameter in stage.model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and trainable(name, stage.shardings[name]))
        if parameter.requires_grad:
            learning[name] = stage.shardings[name]
    return learning


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_engine(
    config: Config,
    mesh: Mesh,
    *,
    vocab_size: int,
    make_block: MakeBlock | None = None,
    trainable: Trainable = everything,
    objective: AnyObjective | None = None,
    initialises: bool = True,
) -> Engine:
    """This rank's share of a training run.

    Parameters are initialised as their names and the seed say, in fp32, and rounded to the run's precision. Those of
    an engine that only evaluates (`trainable=nothing`) are zeros for a checkpoint to fill; without `initialises` all
    are, for a dry run.
    """
    assert config.layout == mesh.layout, "the mesh is not that of the config"
    model, training, mesh = config.model, config.training, replace(mesh, experts=experts_of(config, mesh))
    objective = with_depths(objective or objective_of(config), model)
    settings = DataParallelSettings.of(config.parallel, DTYPES[training.precision])
    stages = Stages.of(config.parallel, model, vocab_size=vocab_size, seq_length=training.seq_length)
    # Parameters have no memory until they lie where they stay, a bucket after the other, in the precision in which they
    # stay: a second copy in fp32, of what is frozen or shared, may be what a device has no place for.
    device = torch.device("meta")
    stage = build_stage(
        model,
        stages,
        mesh,
        vocab_size=vocab_size,
        num_positions=model.max_position_embeddings or training.seq_length,
        sequence_parallel=config.parallel.sequence_parallel,
        by_pieces=config.parallel.tp_comm_overlap_backend if config.multiplies_by_pieces else None,
        execution=execution_of(config, mesh),
        make_block=make_block,
        device=device,
    )
    if config.adapter.is_used:
        stage = with_adapters(stage, config.adapter, device=device)
        trainable = adapters_alone if trainable is everything else trainable
    if settings.zero_stage < 3:
        place_on(stage.model, mesh.device)
    learning = freeze(stage, trainable)
    seed = training.seed if initialises and trainable is not nothing else None
    data_parallel = make_data_parallel(stage, mesh, settings, seed=seed, gives_back=not training.cuda_graph)
    weight_gradients = place_weight_gradients(stage, data_parallel, settings)
    if config.training.compile and why_not_compiled(mesh.device.type) is None:
        compile_layers(stage.model.layers.values())
    optimizer = _make_optimizer(config, data_parallel, learning, mesh)
    stage.model.record = mesh.record
    executor = build_executor(config, stage, mesh, objective, weight_gradients)
    replaying = with_graphs(config, executor, mesh)
    engine = Engine(mesh, stage, objective, data_parallel, optimizer, replaying, rule_of(config))
    if trainable is not nothing:
        _complete_updates(engine, config, learning)
    if isinstance(objective, PairObjective):
        prepare_pairs(engine, Scorer(stage, executor), config, vocab_size=vocab_size)
    if isinstance(objective, SentenceObjective):
        engine.preparation = SentencePreparation(mesh)
    return engine


def _make_optimizer(
    config: Config, data_parallel: DataParallel, learning: Mapping[str, Sharding], mesh: Mesh
) -> Optimizer:
    return Optimizer(
        data_parallel.shards,
        data_parallel.gradients,
        learning,
        mesh.domains,
        config.optimizer,
        device=mesh.device,
        width_mult=config.model.width_mult,
    )


def _complete_updates(engine: Engine, config: Config, learning: Mapping[str, Sharding]) -> None:
    """Give an engine what follows the optimizer's step, where the config has it: QK-clip, and outer steps."""
    mesh = engine.mesh
    engine.qk_clip = QKClip.of(config, engine.stage.model, mesh)
    if (outer := OuterSettings.of(config.parallel)) is not None:
        engine.outer = OuterOptimizer(engine.optimizer.masters, learning, mesh.domains, outer, device=mesh.device)


def with_depths(objective: AnyObjective, model: ModelConfig) -> AnyObjective:
    """The objective with the losses of the layers of multi-token prediction that a model has."""
    if model.num_depths == 0:
        return objective
    others = LogitsObjective | PairObjective | SentenceObjective
    assert not isinstance(objective, others), "multi-token prediction is for losses of tokens"
    return MultiTokenPrediction(objective, num_depths=model.num_depths, factor=model.mtp_loss_scaling_factor)


def place_on(model: nn.Module, device: torch.device) -> None:
    """Make a model of the meta device one of this device, of whose parameters one element is there and stands for all.

    Buckets hold the values. Tensors are new ones: one of the meta device cannot become a view of those.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            one = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            module.register_parameter(name, nn.Parameter(one, requires_grad=parameter.requires_grad))


def place_weight_gradients(
    stage: ModelStage, data_parallel: DataParallel, settings: DataParallelSettings
) -> WeightGradients | None:
    """Have layers add their weight gradients to the sums; the queue of those that W actions compute, if there are."""
    device, sum_of = next(stage.model.parameters()).device, data_parallel.sum_of
    if sum_of is not None and (settings.dtype == torch.float32 or sums_unrounded(device.type, settings.dtype)):
        # Elsewhere a micro-batch's gradient in 16 bits is rounded once, in every stage of ZeRO alike.
        add_in_place(stage.model, sum_of)
    if not stage.stages.schedule.has_weight_gradients:
        return None
    assert sum_of is not None, "ZeRO-3 has no deferred weight gradients"
    weight_gradients = WeightGradients(sum_of, delivered=data_parallel.weight_gradient_ready)
    split_backward(stage.model, weight_gradients)
    return weight_gradients


def rule_of(config: Config) -> UpdateRule:
    """What becomes of a gradient before the optimizer."""
    training = config.training
    spikes = NormSpikes(config.resilience.skip_loss_spikes)
    return UpdateRule(
        loss_scale_of(training), config.optimizer.clip_grad, training.check_for_nan_in_loss_and_grad, spikes
    )


def prepare_pairs(engine: Engine, scorer: Scorer, config: Config, *, vocab_size: int) -> None:
    """Have the engine compute what its pairs are compared with, by a frozen model of its own if the config wants it."""
    if config.reference == "model":
        alike = config_of_reference(config)
        engine.reference = build_engine(
            alike, engine.mesh, vocab_size=vocab_size, trainable=nothing, objective=CausalLM()
        )
    engine.preparation = preparation_of(config, scorer, engine.reference, engine.mesh)


def config_of_reference(config: Config) -> Config:
    """The config of the frozen model that an objective of pairs compares with, in the same layout."""
    training = replace(config.training, objective=TrainingConfig.objective, objective_args=())
    return replace(
        config,
        training=training,
        adapter=AdapterConfig(),
        preference=PreferenceConfig(),
        recompute=RecomputeConfig(),
    )


def preparation_of(config: Config, scorer: Scorer, reference: Engine | None, mesh: Mesh) -> PairPreparation:
    """What is computed of the pairs of a step before they are trained on."""
    compared: Callable[[Sequence[MicroBatch]], list[torch.Tensor]] | None = None
    if config.reference == "adapters-off":
        compared = scorer.without_adapters
    elif reference is not None:
        assert isinstance(reference.executor, Executor)
        compared = Scorer(reference.stage, reference.executor)
    needs_kl = OBJECTIVE_NAMES[config.training.objective].learns_from == "labelled"
    return PairPreparation(mesh, scorer, compared, needs_kl=needs_kl)


def experts_of(config: Config, mesh: Mesh) -> ExpertParallel:
    """How tokens go to experts: in rooms of so many rows, or by DeepEP where it is asked for and can.

    A frozen model on the mesh of an engine has the buffer of that engine.
    """
    experts = replace(mesh.experts, room=config.parallel.row_room)
    is_dry = experts.ep.group is None or experts.ep.group.name() == "fake"
    if is_dry or not config.parallel.wants_deep_ep or experts.exchange is not None:
        return experts
    if not runs_on(experts.ep, config.deep_ep_needs, mesh.device.type):
        return experts
    return replace(experts, exchange=exchange_of(experts.ep, config.model.hidden_size))


def execution_of(config: Config, mesh: Mesh) -> Execution:
    """Settings of the forward and backward of layers."""
    return Execution(
        mesh.cp,
        config.parallel.cp_comm_type,
        config.training.attention_backend,
        Recompute(config.recompute, mesh.tp if config.recompute.distribute_saved_activations else Axis("tp")),
        dropout_seed=config.training.seed,
        sends_latents=config.sends_latents,
    )


def with_adapters(stage: ModelStage, config: AdapterConfig, *, device: torch.device, name: str = DEFAULT) -> ModelStage:
    """The stage with adapters of this name, as the config says, on its quantised layers or others.

    Parameters are uninitialised.
    """
    with device:
        add_adapters(stage.model, config, name=name)
        if (form := form_of(config)) is not None:
            quantise_base(stage.model, form)
    return replace(stage, shardings=collect_shardings(stage.model), is_adapted=True)


def make_data_parallel(
    stage: ModelStage, mesh: Mesh, settings: DataParallelSettings, *, seed: int | None, gives_back: bool = True
) -> DataParallel:
    """Fill in initial values (none where `seed` is None), and lay the stage out over the data ranks (ZeRO).

    With `gives_back` gradients have no memory during a step's first forward: not for CUDA graphs, of fixed addresses.
    """
    model = stage.model
    if settings.weight_block is not None:
        refuse_odd_rows(dict(model.named_parameters()), stage.shardings, settings.weight_block)
    data_parallel: DataParallel
    if settings.zero_stage == 3:
        chunks = [[model.layers[str(layer)] for layer in chunk.layers] for chunk in model.chunks]
        data_parallel = FullySharded(
            model, chunks, stage.shardings, mesh.domains, settings, device=mesh.device, seed=seed
        )
    else:
        deferred = "W" if stage.stages.schedule.has_weight_gradients else "B"
        data_parallel = Zero(
            dict(model.named_parameters()),
            stage.shardings,
            mesh.domains,
            settings,
            seed=seed,
            sources={
                name: frozenset((user.chunk, deferred if user.is_linear else "B") for user in users)
                for name, users in model.users().items()
            },
            gives_back=gives_back,
        )
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(settings.dtype)
    for module, names in model.by_first_use():
        data_parallel.gather_before(module, names)
    return data_parallel


def build_executor(
    config: Config,
    stage: ModelStage,
    mesh: Mesh,
    objective: AnyObjective,
    weight_gradients: WeightGradients | None,
) -> Executor:
    """The loop over this stage's actions. Every rank of the pipeline makes its own at the same time."""
    dtype = DTYPES[config.training.precision]
    return Executor(
        [partial(run_chunk, stage.model, objective, chunk) for chunk in range(stage.stages.num_chunks)],
        stage.stages.placement,
        p2p_axes=mesh.p2p_axes,
        boundary=Boundary(config.model.hidden_size, dtype, mesh.device, stage.model.tp),
        weight_gradients=weight_gradients,
        record=mesh.record,
    )


def with_graphs(
    config: Config, executor: Executor, mesh: Mesh, *, record: Record = record_on_cuda
) -> Executor | ReplayingExecutor:
    """With --cuda-graph, an executor that replays micro-batches from a graph."""
    if not config.training.cuda_graph:
        return executor
    domain = mesh.domains["dense"]
    sends, gathers = domain.shard.size * domain.replicate.size > 1, domain.shard.size > 1
    return ReplayingExecutor(executor, record, first=gathers, last=sends)
