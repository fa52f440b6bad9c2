"""QK-clip by every layout: weights of queries and keys shrink as in one process; each mistake of it is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import aspects_that_differ, assert_equal_to_serial, assert_same_training, serial, whole
from pairwise import Chosen
from problem import Problem, Spread
from ranks import run_ranks
from test_experts_mutations import Patch, no_mistake, planted_train
from test_latent_equal_serial import LATENT
from theorem import batches_of, build, masters_of, one_step, parts
from theorem_cases import choices, name_of, problem_of, spread_of
from torch import Tensor

from megatronish.attention.largest_logits import LargestLogits
from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare
from megatronish.engine.qk_clip import LARGEST, QKClip
from megatronish.launch.place import Place
from megatronish.model.gpt import GPT
from megatronish.parallel.mesh import Mesh

LATENTS = LATENT | {"q_lora_rank": 7}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("gpt2", {}),
    "alibi": ("bloom", {}),
    "latents": ("llama", LATENTS),
    "latents ahead": ("llama", {**LATENT, "mtp_num_layers": 1}),
    "one group": ("llama", {"num_query_groups": 1}),
}
CASES: list[tuple[str, Layout, Chosen]] = [
    ("llama", Layout(dp=2), {"zero": 3, "recompute": "uniform"}),
    ("llama", Layout(tp=2), {"sequence_parallel": True, "optimizer": "muon", "dropout": 0.1}),
    ("llama", Layout(cp=2), {"cp_comm_type": "p2p", "documents": True}),
    ("biases", Layout(cp=2), {"cp_comm_type": "a2a", "dropout": 0.1}),
    ("biases", Layout(dp=2), {"zero": 1, "optimizer": "adam"}),
    ("biases", Layout(tp=2, pp=2), {"schedule": "zb-v", "num_microbatches": 3, "sequence_parallel": True}),
    ("alibi", Layout(pp=2), {"schedule": "interleaved", "num_microbatches": 4}),
    ("one group", Layout(tp=2), {"sequence_parallel": True, "optimizer": "muon"}),
    ("latents", Layout(tp=2), {"sequence_parallel": True, "recompute": "selective"}),
    ("latents", Layout(cp=2), {"cp_comm_type": "p2p", "sight": "window"}),
    ("latents", Layout(dp=2), {"zero": 2, "offload": "optimizer"}),
    ("latents ahead", Layout(pp=2), {"schedule": "zb-h1", "num_microbatches": 3}),
]
BELOW = 0.02  # of the logits of every head here, so that all are clipped


def case_of(model: str, layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    usual = {"family": MODELS[model][0], "eod_mask_loss": False, "zero": 0, "offload": "none", "tied": False}
    return plain | usual | {"optimizer": "adam" if layout.dp * layout.pp > 1 else "sgd"} | given


def clipped(problem: Problem, model: str) -> Problem:
    return replace(problem, model=replace(problem.model, **MODELS[model][1]), largest_logit=BELOW)


@pytest.mark.parametrize(
    ("model", "layout", "given"),
    CASES,
    ids=[f"{model}-{name_of(layout, case_of(model, layout, given))}" for model, layout, given in CASES],
)
def test_a_layout_clips_as_one_process_does(model: str, layout: Layout, given: Chosen) -> None:
    chosen = case_of(model, layout, given)
    assert_equal_to_serial(clipped(problem_of(layout, chosen), model), spread_of(layout, chosen))


# Mistakes

PROBLEM = Problem(
    ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        position_embedding_type="rope",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        make_vocab_size_divisible_by=4,
    ),
    seq_length=16,
    global_batch_size=4,
    optimizer="sgd",
    largest_logit=BELOW,
)
SPREAD = Spread(Layout(tp=2, cp=2), 2, sequence_parallel=True)
SERIAL = Spread(Layout(), 4)


def not_over_all_ranks(patch: Patch) -> None:
    """Each rank clips by the largest logits that it has seen itself."""

    def planted(self: QKClip, _mesh: Mesh) -> dict[str, float]:
        assert self.logits is not None
        self.largest = self.logits.of_heads.clone()
        return {LARGEST: float(self.largest.max())}

    patch.setattr(QKClip, "metrics", planted)


def queries_as_keys(patch: Patch) -> None:
    """Alpha is that of keys."""
    of = QKClip.of

    def planted(config: Any, model: GPT, mesh: Mesh) -> QKClip:
        clip = of(config, model, mesh)
        clip.alpha = 1 - clip.alpha
        return clip

    patch.setattr(QKClip, "of", planted)


def keys_of_this_rank_alone(patch: Patch) -> None:
    """Keys that other ranks of cp hold are not looked at."""
    from megatronish.attention import largest_logits

    gathered = largest_logits.from_zigzag
    patch.setattr(largest_logits, "from_zigzag", lambda k, size: 0 * gathered(k, size))


def not_forgotten(patch: Patch) -> None:
    """Logits of the step before count in this one."""
    patch.setattr(LargestLogits, "forget", lambda *_: None)


def no_clip(patch: Patch) -> None:
    patch.setattr(QKClip, "end_step", lambda *_: None)


MUTATIONS = [
    (not_over_all_ranks, set[str]()),
    (queries_as_keys, {"trained"}),
    (keys_of_this_rank_alone, {"metrics"}),
    (not_forgotten, {"metrics"}),
    (no_clip, {"trained"}),
]


def test_without_a_mistake_nothing_is_found() -> None:
    assert_same_training(run_ranks(4, planted_train, PROBLEM, SPREAD, no_mistake), serial(PROBLEM))


@pytest.mark.parametrize(("plant", "shown_by"), MUTATIONS, ids=[plant.__name__ for plant, _ in MUTATIONS])
def test_a_mistake_of_the_clip_is_found(plant: Callable[[Patch], None], shown_by: set[str]) -> None:
    differing = aspects_that_differ(run_ranks(4, planted_train, PROBLEM, SPREAD, plant), serial(PROBLEM))
    assert differing and shown_by <= differing, differing


def test_the_clip_acts() -> None:
    clipped, free = serial(PROBLEM), serial(replace(PROBLEM, largest_logit=None))
    weights: list[dict[str, Tensor]] = [whole([record.trained_parts]) for record in (clipped, free)]
    for name in ("layers.0.attention.qkv.q.weight", "layers.1.attention.qkv.k.weight"):
        with_clip, without = (next(w for key, w in each.items() if name.rsplit(".", 2)[0] in key) for each in weights)
        assert not torch.equal(with_clip, without)


@pytest.mark.parametrize("more", [{}, LATENTS | {"group_query_attention": False, "num_query_groups": None}])
def test_logits_of_the_same_tokens_are_at_the_threshold_after_a_clip(more: dict[str, Any]) -> None:
    problem = replace(PROBLEM, model=replace(PROBLEM.model, **more))
    mesh = Mesh.of(SERIAL.parallel, Place())
    engine = build(mesh, problem, SERIAL)
    batches = batches_of(problem, BatchShare(0, 1, 4), 0)
    engine.gradients(batches, num_steps_done=0)
    assert engine.qk_clip.largest is not None
    assert (engine.qk_clip.largest[:, :4] > BELOW).all()
    engine.qk_clip.end_step(engine.stage.model, engine.optimizer)
    engine.data_parallel.gather_parameters()
    engine.gradients(batches, num_steps_done=0)
    # The first layer's tokens are the same; queries that share a key with others may be clipped further.
    after = engine.qk_clip.largest[0, :4]
    assert (after <= BELOW * 1.001).all()
    assert after.max() > BELOW * 0.999


def test_a_step_that_is_skipped_clips_nothing(monkeypatch: Patch) -> None:
    engine = build(Mesh.of(SERIAL.parallel, Place()), PROBLEM, SERIAL)
    before = whole([parts(engine, masters_of(engine))])
    monkeypatch.setattr(type(engine.rule), "skips", lambda *_, **__: True)
    result = one_step(engine, PROBLEM, batches_of(PROBLEM, BatchShare(0, 1, 4), 0), 0)
    assert result.skipped
    after = whole([parts(engine, masters_of(engine))])
    assert all(torch.equal(before[name], after[name]) for name in before)
