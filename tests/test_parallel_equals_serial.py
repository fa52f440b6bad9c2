"""Theorem: every layout trains the same model as one process.

Each of the 55 layouts of dp x tp x pp x cp (cp 1, 2 or 4) with at most eight ranks is trained, with features that a
seeded pairwise array has dealt to it, and compared with one process that takes each global batch as a single
micro-batch: initial values bit by bit, losses and gradient norms of three Adam or Muon steps, an evaluation, every
element of the first gradient (clipped), the parameters after SGD steps, and matrices after Muon steps. Nothing after
Adam steps: Adam turns the rounding noise of a gradient that is truly zero, a key bias's, into whole steps. The
tolerance is the same for all: 1e-5 in fp32.

`pytest --all-layouts` takes the product of the features that meet in the maths, for every layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engines import evaluated
from pairwise import Chosen, covered_pairs, pairwise, possible_pairs
from ranks import run_ranks
from torch import Tensor

from megatronish.config.config import Config
from megatronish.config.model import ModelConfig
from megatronish.config.optimizer import OptimizerConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.recompute import RecomputeConfig
from megatronish.config.training import AttentionBackend, TrainingConfig
from megatronish.data.collate import Collator
from megatronish.data.loader import BatchShare, micro_batches
from megatronish.data.sample import Sample
from megatronish.launch.place import Place
from megatronish.layout import Layout
from megatronish.mesh import Mesh
from megatronish.model.batch import MicroBatch
from megatronish.streams import numpy_stream
from megatronish.train.build import build_engine
from megatronish.train.engine import Engine
from megatronish.train.statistics import params_norm

RTOL = 1e-5
SEED = 7
VOCABULARY = 131  # of tokens; padded to 132, 136 or more, by tp
EOD = 0
NUM_STEPS = 3
SGD_STEPS = 2
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
CLIP = 0.5  # below every gradient norm here, so that clipping acts
# Large steps for matrices alone: Adam makes whole steps of noise in embeddings, which at 20 times this rate shows.
OPTIMIZERS = {
    "adam": OptimizerConfig(lr=1e-3, clip_grad=CLIP),
    "muon": OptimizerConfig(optimizer="muon", lr=1e-3, muon_nesterov=True, muon_extra_scale_factor=4.0, clip_grad=CLIP),
}

SGD = OptimizerConfig(optimizer="sgd", clip_grad=CLIP)
DECOUPLED: dict[str, Any] = {"decoupled_lr": 3e-3, "apply_wd_to_qk_layernorm": True}

LAYOUTS = [
    Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    for cp, dp, tp, pp in product((1, 2, 4), *[range(1, 9)] * 3)
    if dp * tp * pp * cp <= 8
]
RECOMPUTE = {
    "none": RecomputeConfig(),
    "selective": RecomputeConfig("selective"),
    "uniform": RecomputeConfig("full", "uniform", 2, offload_saved_activations=True),
    "block": RecomputeConfig("full", "block", 1),
}


@dataclass(frozen=True)
class Problem:
    """What is trained. No layout shows in it, but for sizes that every layout of the test could divide."""

    model: ModelConfig
    seq_length: int
    global_batch_size: int
    eod_mask_loss: bool = False
    documents: bool = False
    optimizer: str = "adam"
    decoupled: bool = False
    bf16: bool = False


@dataclass(frozen=True)
class Spread:
    """How it is spread over ranks and over time."""

    layout: Layout
    micro_batch_size: int
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    num_chunks: int | None = None
    split: str = "even"
    overlap: bool = True
    cp_comm_type: str = "p2p"
    attention_backend: AttentionBackend = "auto"
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    zero: int = 0
    copies: int = 1
    offload: str = "none"

    @property
    def parallel(self) -> ParallelConfig:
        """As a user would write it.

        `uneven`: the number of layers of the first stage is given; `ends`: embedding and head count as layers.
        """
        return ParallelConfig(
            tensor_model_parallel_size=self.layout.tp,
            pipeline_model_parallel_size=self.layout.pp,
            data_parallel_size=self.layout.dp,
            context_parallel_size=self.layout.cp,
            cp_comm_type=self.cp_comm_type,  # type: ignore[arg-type]
            sequence_parallel=self.sequence_parallel,
            pipeline_schedule=self.schedule,  # type: ignore[arg-type]
            num_virtual_stages_per_pipeline_rank=self.num_chunks,
            pipeline_split="auto" if self.split == "auto" else "even",
            account_for_embedding_in_pipeline_split=self.split == "ends",
            account_for_loss_in_pipeline_split=self.split == "ends",
            decoder_first_pipeline_num_layers=CHUNKS[self.schedule] + 1 if self.split == "uneven" else None,
            overlap_grad_reduce=self.overlap,
            overlap_param_gather=self.overlap,
            ddp_bucket_size=3000,  # a few parameters: every rank has several buckets
            zero_stage=self.zero,  # type: ignore[arg-type]
            num_distributed_optimizer_instances=self.copies,
            optimizer_cpu_offload=self.offload == "optimizer",
            param_cpu_offload=self.offload == "parameters",
        )


class Held(NamedTuple):
    """A rectangle of a global tensor, as one rank holds it."""

    offset: tuple[int, ...]
    values: Tensor


Parts = dict[str, list[Held]]


class Record(NamedTuple):
    """What one rank saw. `*_parts` are its share of the tensors."""

    losses: list[float]
    grad_norms: list[float]
    evaluation: tuple[float, int]
    params_norm: float
    initial_parts: Parts
    gradient_parts: Parts
    trained_parts: Parts
    muon_parts: Parts


class Samples:
    """Random tokens with ends of documents among them, more in some samples than in others; every fifth all ends."""

    name = identity = "samples"
    num_samples = None

    def __init__(self, seq_length: int) -> None:
        self.length = seq_length + 1

    def sample(self, index: int) -> Sample:
        stream = numpy_stream(SEED, "samples", index)
        share = 1.0 if index % 5 == 4 else stream.random() * 0.5
        ends = stream.random(self.length) < share
        return Sample(np.where(ends, EOD, stream.integers(1, VOCABULARY, self.length)))


# One rank's work


def train(place: Place, problem: Problem, spread: Spread) -> Record:
    """SGD steps from the initial values, then Adam or Muon steps from them again."""
    mesh = Mesh.of(spread.parallel, place)
    dataset = Samples(problem.seq_length)

    def batches(step: int) -> list[MicroBatch]:
        return micro_batches(
            dataset,
            consumed_samples=step * problem.global_batch_size,
            global_batch_size=problem.global_batch_size,
            share=BatchShare(mesh.dp.rank, mesh.dp.size, spread.micro_batch_size),
            collate=Collator(
                EOD,
                reset_position_ids=problem.documents,
                reset_attention_mask=problem.documents,
                eod_mask_loss=problem.eod_mask_loss,
            ),
        )

    sgd = build(mesh, problem, spread, replace(SGD, **DECOUPLED if problem.decoupled else {}))
    initial = parts(sgd, masters_of(sgd))
    for step in range(SGD_STEPS):
        rates = {"learning_rate": 0.1, "decoupled_learning_rate": 0.2 if problem.decoupled else None}
        sgd.step(batches(step), num_steps_done=step, weight_decay=0.1, **rates)
        if step == 0:
            gradients = parts(sgd, sgd.data_parallel.gradients)
    config = replace(OPTIMIZERS[problem.optimizer], **DECOUPLED if problem.decoupled else {})
    engine = build(mesh, problem, spread, config)
    assert config.lr is not None
    rates = {"learning_rate": config.lr, "decoupled_learning_rate": config.decoupled_lr}
    results = [engine.step(batches(step), num_steps_done=step, weight_decay=0.1, **rates) for step in range(NUM_STEPS)]
    of_muon = {
        name: held
        for name, held in parts(engine, masters_of(engine)).items()
        if problem.optimizer == "muon" and engine.stage.shardings[name].role == "matrix"
    }
    return Record(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        evaluation=evaluated(engine, batches(NUM_STEPS)),
        params_norm=params_norm(engine),
        initial_parts=initial,
        gradient_parts=gradients,
        trained_parts=parts(sgd, masters_of(sgd)),
        muon_parts=of_muon,
    )


def build(mesh: Mesh, problem: Problem, spread: Spread, optimizer: OptimizerConfig) -> Engine:
    return build_engine(
        Config(
            model=problem.model,
            parallel=spread.parallel,
            recompute=spread.recompute,
            training=TrainingConfig(
                seq_length=problem.seq_length,
                micro_batch_size=spread.micro_batch_size,
                global_batch_size=problem.global_batch_size,
                seed=SEED,
                bf16=problem.bf16,
                attention_backend=spread.attention_backend,
            ),
            optimizer=optimizer,
        ),
        mesh,
        vocab_size=VOCABULARY,
    )


def masters_of(engine: Engine) -> dict[str, Tensor]:
    return {name: shard.master for name, shard in engine.data_parallel.shards.items()}


def parts(engine: Engine, tensors: dict[str, Tensor]) -> Parts:
    """Copies of the rectangles that this rank holds; what is left over is padding, which stays zero."""
    found: Parts = {}
    for name, shard in engine.data_parallel.shards.items():
        local = tensors[name].detach()
        found[name] = [Held(piece.global_offset, piece.view(local).clone()) for piece in shard.pieces]
        assert sum(int(held.values.count_nonzero()) for held in found[name]) == int(local.count_nonzero()), name
    return found


# The comparison


@cache
def serial(problem: Problem) -> Record:
    """The same in this process, each global batch as one micro-batch."""
    return train(Place(), problem, Spread(Layout(), micro_batch_size=problem.global_batch_size))


def whole(records: Sequence[Parts]) -> dict[str, Tensor]:
    """The global tensors; an assertion where embedding_axis of one element differ in a bit, or nobody holds one.

    So copies are compared on the way: data ranks, replicas over tp, both ends of a tied embedding.
    """
    tensors: dict[str, Tensor] = {}
    for name in sorted({name for record in records for name in record}):
        helds = [held for record in records for held in record.get(name, [])]
        ends = [[start + size for start, size in zip(offset, x.shape, strict=True)] for offset, x in helds]
        tensor = torch.full([max(sizes) for sizes in zip(*ends, strict=True)], torch.nan)
        for offset, values in helds:
            there = tensor[tuple(slice(start, start + size) for start, size in zip(offset, values.shape, strict=True))]
            assert bool((there.isnan() | (there == values)).all()), f"{name} differs between ranks that share it"
            there.copy_(values)
        assert not tensor.isnan().any(), f"nobody holds some elements of {name}"
        tensors[name] = tensor
    return tensors


def assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    """Within RTOL of the tensor's largest element."""
    assert actual.shape == expected.shape, name
    limit = RTOL * expected.abs().max().item()
    worst = (actual - expected).abs().max().item()
    assert worst <= limit, f"{name}: off by {worst:.3g}, which is more than {limit:.3g}"


def assert_equal_to_serial(problem: Problem, spread: Spread) -> None:
    reference = serial(problem)
    records = run_ranks(spread.layout.world_size, train, problem, spread)
    assert min(reference.grad_norms) > CLIP
    for record in records:
        assert record.losses == pytest.approx(reference.losses, rel=RTOL)
        assert record.grad_norms == pytest.approx(reference.grad_norms, rel=RTOL)
        assert record.evaluation == pytest.approx(reference.evaluation, rel=RTOL)
        assert record.params_norm == pytest.approx(reference.params_norm, rel=RTOL)
    for kind in ("initial_parts", "gradient_parts", "trained_parts", "muon_parts"):
        actual = whole([getattr(record, kind) for record in records])
        expected = whole([getattr(reference, kind)])
        assert actual.keys() == expected.keys()
        for name, tensor in actual.items():
            if kind == "initial_parts":
                assert torch.equal(tensor, expected[name]), name
            else:
                assert_close(f"{kind} of {name}", tensor, expected[name])


# The cases


def choices(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """What each feature may be in this layout, facts of the layout among them. None: the layout has nothing of it."""
    return {
        "family": ("gpt2", "llama", "qwen", "bloom", "gpt_oss"),
        "tied": (True, False),
        "sequence_parallel": (True, False) if layout.tp > 1 else (None,),
        "dropout": (0.0, 0.1),
        "schedule": tuple(CHUNKS) if layout.pp > 1 else (None,),
        "split": ("even", "uneven", "auto") if layout.pp > 1 else (None,),
        "recompute": tuple(RECOMPUTE),
        "cp_comm_type": ("p2p", "a2a") if layout.cp > 1 else (None,),
        "attention_backend": ("auto", "fused_softmax"),
        "eod_mask_loss": (True, False),
        "documents": (True, False),
        "micro_batch_size": (1, 2),
        "num_microbatches": (1, 3, 4) if layout.pp in (2, 3) else (1, 3),
        "overlap": (True, False) if layout.dp * layout.cp > 1 else (None,),
        "optimizer": ("adam", "muon"),
        "decoupled": (True, False),
        "zero": (0, 1, 2, 3) if layout.dp * layout.cp > 1 else (0, 1),
        "copies": (1, 2) if layout.dp * layout.cp in (4, 6, 8) else (None,),
        "offload": ("none", "optimizer", "parameters"),
        "dp": (layout.dp > 1,),
        "tp": (layout.tp > 1,),
        "pp": (min(layout.pp, 3),),
        "cp": (layout.cp,),
    }


IN_THE_PRODUCT = ("family", "tied", "sequence_parallel", "dropout", "schedule", "recompute", "cp_comm_type")
# Few layouts have both a long ring, many data ranks or tp, and a pipeline: they are dealt features several times.
CASES = [
    *LAYOUTS,
    *[Layout(pp=2, cp=4)] * 4,
    *[Layout(tp=2, cp=4)] * 2,
    Layout(dp=2, cp=4),
    *[Layout(tp=2, pp=2, cp=2)] * 2,
    *[Layout(tp=2, pp=2)] * 2,
    Layout(pp=3, cp=2),
    *[Layout(dp=4, pp=2)] * 3,
]
CHOICES = [choices(layout) for layout in CASES]
DEALT = pairwise(CHOICES, seed=34)


def model_of(layout: Layout, chosen: Chosen) -> ModelConfig:
    """A small model that the layout divides."""
    family = chosen["family"]
    llama, qwen, oss = family in ("llama", "gpt_oss"), family == "qwen", family == "gpt_oss"
    # At least 3; where heads are traded for sequence, tp cp of them, and key/value heads that cp need not divide.
    trades_heads = chosen["cp_comm_type"] == "a2a"
    unit = layout.tp * layout.cp if trades_heads else layout.tp
    heads = kv_heads = -(-3 // unit) * unit
    if llama and trades_heads:
        kv_heads = layout.tp
    elif llama:
        heads = 2 * kv_heads
    positions = layout.pp * CHUNKS[chosen["schedule"] or "1f1b"]
    num_layers = max(positions, 2 if layout.pp == 1 else 4) + (chosen["split"] in ("uneven", "auto"))
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=20 if qwen else 4 * heads,
        num_attention_heads=heads,
        kv_channels=6 if qwen else None,
        ffn_hidden_size=5 * heads,
        group_query_attention=llama,
        num_query_groups=kv_heads if llama else None,
        position_embedding_type={"gpt2": "learned_absolute", "bloom": "alibi"}.get(family, "rope"),  # type: ignore[arg-type]
        normalization="RMSNorm" if llama or qwen else "LayerNorm",
        swiglu=family == "llama" or qwen,
        quick_geglu=oss,
        glu_linear_offset=1.0 if oss else 0.0,
        activation_func_clamp_value=0.3 if oss and chosen.get("clamped", True) else None,
        embed_layernorm=family == "bloom",
        softmax_type={"gpt_oss": "learnable", "bloom": "off-by-one"}.get(family, "vanilla"),  # type: ignore[arg-type]
        disable_bias_linear=family == "llama" or qwen,
        add_qkv_bias=qwen,
        qk_layernorm=qwen,
        window_size=5 if qwen or oss else None,
        window_attn_skip_freq="2" if oss else None,
        no_rope_freq=str([1] + [0] * (num_layers - 1)) if oss else None,
        untie_embeddings_and_output_weights=not chosen["tied"],
        attention_dropout=chosen["dropout"],
        hidden_dropout=chosen["dropout"],
        init_method_std=0.2,  # attention that is far from uniform
        make_vocab_size_divisible_by=4,
    )


def problem_of(layout: Layout, chosen: Chosen) -> Problem:
    cut = lcm(2 * layout.cp, layout.cp * layout.tp) if layout.cp > 1 else layout.tp
    return Problem(
        model=model_of(layout, chosen),
        seq_length=-(-12 // cut) * cut,
        global_batch_size=layout.dp * chosen["micro_batch_size"] * chosen["num_microbatches"],
        eod_mask_loss=chosen["eod_mask_loss"],
        documents=chosen["documents"],
        optimizer=chosen["optimizer"],
        decoupled=chosen["decoupled"],
    )


def offload_of(zero: int, asked: str) -> str:
    """What of it the stage can have."""
    if zero == 0:
        return "none"
    return "optimizer" if zero < 3 and asked == "parameters" else asked


def spread_of(layout: Layout, chosen: Chosen) -> Spread:
    splits = chosen["schedule"] in ("zb-h1", "zb-v")  # which stages 2 and 3 cannot have
    zero = min(chosen["zero"], 1) if splits else chosen["zero"]
    is_ring = layout.cp > 1 and chosen["cp_comm_type"] == "p2p"  # which has no choice of backends
    shares = chosen["recompute"] == "uniform" and layout.tp > 1 and not chosen["sequence_parallel"]
    return Spread(
        layout=layout,
        micro_batch_size=chosen["micro_batch_size"],
        sequence_parallel=bool(chosen["sequence_parallel"]),
        schedule=chosen["schedule"] or "1f1b",
        num_chunks=CHUNKS["interleaved"] if chosen["schedule"] == "interleaved" else None,
        split=chosen["split"] or "even",
        cp_comm_type=chosen["cp_comm_type"] or "p2p",
        attention_backend="auto" if is_ring else chosen["attention_backend"],
        recompute=replace(RECOMPUTE[chosen["recompute"]], distribute_saved_activations=shares),
        overlap=chosen["overlap"] is not False,
        zero=zero,
        copies=chosen["copies"] or 1 if zero else 1,
        offload=offload_of(zero, chosen["offload"]),
    )


def all_cases() -> list[tuple[Layout, Chosen]]:
    """Every layout with the product of its main features; the others as they were dealt to the layout."""
    return [
        (layout, dealt | dict(zip(IN_THE_PRODUCT, values, strict=True)))
        for layout, dealt, of_layout in zip(CASES, DEALT, CHOICES, strict=True)
        for values in product(*(of_layout[feature] for feature in IN_THE_PRODUCT))
    ]


def name_of(layout: Layout, chosen: Chosen) -> str:
    said: dict[str, dict[Any, str]] = {
        "tied": {True: "tied", False: "untied"},
        "sequence_parallel": {True: "sp", False: "", None: ""},
        "dropout": {0.1: "dropout", 0.0: ""},
        "eod_mask_loss": {True: "masked", False: ""},
        "documents": {True: "documents", False: ""},
        "overlap": {True: "", False: "no_overlap", None: ""},
        "decoupled": {True: "decoupled", False: ""},
    }
    words = [chosen["family"], *(said[feature][chosen[feature]] for feature in said)]
    words += [chosen["optimizer"]] if chosen["optimizer"] != "adam" else []
    words += [f"recompute_{chosen['recompute']}"] if chosen["recompute"] != "none" else []
    if layout.cp > 1:
        words.append(chosen["cp_comm_type"])
    words += [chosen["attention_backend"]] if spread_of(layout, chosen).attention_backend != "auto" else []
    if chosen["zero"]:
        words.append(f"zero{chosen['zero']}x{chosen['copies']}")
        words += [f"offload_{chosen['offload']}"] if chosen["offload"] != "none" else []
    if layout.pp > 1:
        words += [chosen["schedule"], chosen["split"]]
    sizes = f"{chosen['num_microbatches']}x{chosen['micro_batch_size']}"
    return f"dp{layout.dp}_tp{layout.tp}_pp{layout.pp}_cp{layout.cp}-{'-'.join(filter(None, words))}-{sizes}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chosen" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-layouts")
        cases = all_cases() if everything else list(zip(CASES, DEALT, strict=True))
        metafunc.parametrize(("layout", "chosen"), cases, ids=[name_of(*case) for case in cases])


def test_a_layout_trains_the_same_model_as_one_process(layout: Layout, chosen: Chosen) -> None:
    assert_equal_to_serial(problem_of(layout, chosen), spread_of(layout, chosen))


POSITIONS_WITHOUT_LAYERS = [
    ("interleaved", Layout(pp=4), {}),
    ("interleaved", Layout(dp=2, pp=2), {"zero": 3}),
    ("zb-v", Layout(tp=2, pp=2), {"zero": 1, "sequence_parallel": True}),
    ("1f1b", Layout(pp=3, cp=2), {"recompute": "uniform", "zero": 2, "documents": True}),
    ("gpipe", Layout(dp=2, pp=3), {"zero": 1, "overlap": True, "optimizer": "muon", "tied": False}),
]


@pytest.mark.parametrize(("schedule", "layout", "others"), POSITIONS_WITHOUT_LAYERS)
def test_positions_that_hold_the_embedding_or_the_head_alone_train_the_same_model(
    schedule: str, layout: Layout, others: Chosen
) -> None:
    """Embedding and head count as layers, and there are so few layers that the two ends of the pipeline have none."""
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    chosen = plain | {"schedule": schedule, "num_microbatches": 4, "dropout": 0.1, "split": "ends"} | others
    problem = problem_of(layout, chosen)
    problem = replace(problem, model=replace(problem.model, num_layers=layout.pp * CHUNKS[schedule] - 2))
    assert_equal_to_serial(problem, spread_of(layout, chosen))


def test_there_are_55_layouts_each_taken() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) == len(set(CASES)) == 55
    assert len(DEALT) == len(CASES)


def test_every_two_features_that_can_meet_do_so_in_some_layout() -> None:
    assert possible_pairs(CHOICES) - covered_pairs(DEALT) == set()


# bf16 keeps 8 bits of a value: each rounding moves it by up to 2^-9, and other layouts round other partial sums.
# A loss is a mean over many tokens, so its roundings cancel: it stays within one of them (measured: half of it).
# A gradient has some forty roundings behind it, which add up in quadrature: 2^-9 sqrt(40) = 2^-6.3 (measured 2^-5.4).
BF16_LOSS, BF16_NORM, BF16_GRADIENT = 2**-9, 2**-6, 2**-5
BF16_CASES = [
    (Layout(dp=2, tp=2, pp=2), {"family": "gpt2", "tied": True, "sequence_parallel": True, "dropout": 0.1}),
    (Layout(tp=4), {"family": "llama", "tied": False, "sequence_parallel": False, "dropout": 0.0}),
    (Layout(dp=2, pp=4), {"family": "qwen", "tied": True, "sequence_parallel": False, "dropout": 0.0}),
    # Without its clamp, whose kink makes a gradient jump: rounding alone moves one process by 3.6e-2 from fp32.
    (
        Layout(cp=2, tp=2),
        {"family": "gpt_oss", "tied": True, "sequence_parallel": True, "dropout": 0.0, "clamped": False},
    ),
    (Layout(cp=2, pp=2), {"family": "bloom", "tied": True, "sequence_parallel": False, "dropout": 0.0}),
    (Layout(cp=4, tp=2), {"family": "qwen", "tied": True, "sequence_parallel": True, "dropout": 0.0}),
    (
        Layout(cp=2, pp=2, tp=2),
        {"family": "llama", "tied": True, "sequence_parallel": False, "dropout": 0.1, "schedule": "zb-v"}
        | {"recompute": "uniform", "cp_comm_type": "a2a"},
    ),
]


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all tensors together, relative to the length of the expected ones."""
    squares = [(actual[name] - expected[name]).square().sum() for name in expected]
    return float((sum(squares) / sum(tensor.square().sum() for tensor in expected.values())) ** 0.5)


@pytest.mark.parametrize(("layout", "main"), BF16_CASES, ids=[str(layout) for layout, _ in BF16_CASES])
def test_in_bf16_a_layout_is_as_near_to_fp32_as_one_process_is(layout: Layout, main: Chosen) -> None:
    rest = {"eod_mask_loss": True, "documents": True, "micro_batch_size": 1, "num_microbatches": 3, "overlap": True}
    usual: Chosen = {"schedule": "1f1b", "split": "even", "recompute": "none", "cp_comm_type": "p2p"}
    usual |= {
        "attention_backend": "auto",
        "optimizer": "adam",
        "decoupled": False,
        "zero": 0,
        "copies": 1,
        "offload": "none",
    }
    chosen = usual | rest | main
    exact = problem_of(layout, chosen)
    rounded = replace(exact, bf16=True)
    spread = spread_of(layout, chosen)
    reference, one_process = serial(exact), serial(rounded)
    ranks = run_ranks(layout.world_size, train, rounded, spread)
    for record, near in [(one_process, reference), *((rank, reference) for rank in ranks), (ranks[0], one_process)]:
        assert record.losses == pytest.approx(near.losses, rel=BF16_LOSS)
        assert record.grad_norms == pytest.approx(near.grad_norms, rel=BF16_NORM)
        assert record.evaluation == pytest.approx(near.evaluation, rel=BF16_LOSS)
    gradient = whole([reference.gradient_parts])
    of_one_process = distance(whole([one_process.gradient_parts]), gradient)
    of_layout = distance(whole([rank.gradient_parts for rank in ranks]), gradient)
    assert of_layout < min(1.25 * of_one_process, BF16_GRADIENT)
    masters = whole([rank.initial_parts for rank in ranks])
    assert all(torch.equal(masters[name], tensor) for name, tensor in whole([one_process.initial_parts]).items())
    whole([rank.trained_parts for rank in ranks])  # copies are equal in every bit
