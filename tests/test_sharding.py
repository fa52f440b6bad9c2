"""Who holds which part of a parameter: every element once over tp, and the same values in any layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatronish.config.model import ModelConfig
from megatronish.mesh import Axis, TensorParallel
from megatronish.model.gpt import GPT, ModelChunk
from megatronish.sharding import Piece, Sharding, collect_shardings, initialize

TP_SIZES = range(1, 9)
VOCABULARY = 131
COMMON = 840  # the smallest size that 1 to 8 divide


def axes(tp_size: int) -> list[Axis]:
    """The places on a tp axis, without processes: nothing here communicates."""
    return [Axis("tp", tp_size, rank) for rank in range(tp_size)]


def gpt(tp: Axis, *, layers: range | None = None, num_layers: int = 2, **options: Any) -> GPT:
    config = ModelConfig(
        num_layers=num_layers,
        hidden_size=24,
        num_attention_heads=COMMON * 2,
        num_query_groups=COMMON,
        group_query_attention=True,
        kv_channels=1,
        ffn_hidden_size=COMMON,
        make_vocab_size_divisible_by=4,
        **options,
    )
    stage = layers or range(num_layers)
    return GPT(
        config,
        vocab_size=VOCABULARY,
        num_positions=16,
        tp=TensorParallel(tp),
        chunks=[ModelChunk(stage, is_first=stage[0] == 0, is_last=stage[-1] == num_layers - 1)],
    )


def held(sharding: Sharding, tp_size: int) -> Tensor:
    """How often each element of the global tensor is held."""
    count = torch.zeros(sharding.shape)
    for tp in axes(tp_size):
        for piece in sharding.pieces(tp):
            Piece((), piece.global_offset, piece.sizes).view(count).add_(1)
    return count


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_the_pieces_of_a_cut_parameter_cover_it_once(tp_size: int) -> None:
    padded = -(-VOCABULARY // (4 * tp_size)) * 4 * tp_size
    cut = [
        Sharding((VOCABULARY, 3), dim=0, sections=(padded,)),
        Sharding((4 * COMMON, 3), dim=0, sections=(2 * COMMON, COMMON, COMMON)),
        Sharding((2 * COMMON,), dim=0, sections=(COMMON, COMMON)),
        Sharding((3, COMMON), dim=1),
    ]
    for sharding in cut:
        assert torch.equal(held(sharding, tp_size), torch.ones(sharding.shape))
    replicated = Sharding((5, 3))
    assert torch.equal(held(replicated, tp_size), torch.full((5, 3), float(tp_size)))


def test_a_rank_of_padding_alone_holds_nothing() -> None:
    sharding = Sharding((131, 2), dim=0, sections=(160,))
    rows = [sum(piece.sizes[0] for piece in sharding.pieces(tp)) for tp in axes(8)]
    assert rows == [20, 20, 20, 20, 20, 20, 11, 0]


def test_a_rank_holds_its_part_of_each_section_side_by_side() -> None:
    sharding = Sharding((12,), dim=0, sections=(8, 2, 2))
    assert list(sharding.pieces(Axis("tp", 2, 1))) == [
        Piece((4,), (0,), (4,)),
        Piece((9,), (4,), (1,)),
        Piece((11,), (5,), (1,)),
    ]


FAMILIES: list[dict[str, Any]] = [
    {},
    {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    },
]


@pytest.mark.parametrize("options", FAMILIES)
def test_initial_values_are_the_same_for_every_tp(options: dict[str, Any]) -> None:
    serial = gpt(Axis("tp"), **options)
    initialize(serial, collect_shardings(serial), seed=3, tp=serial.tp.axis)
    expected = dict(serial.named_parameters())
    for tp_size in (2, 3, 8):
        covered = {name: torch.zeros_like(values) for name, values in expected.items()}
        for tp in axes(tp_size):
            model = gpt(tp, **options)
            shardings = collect_shardings(model)
            initialize(model, shardings, seed=3, tp=tp)
            for name, local in model.named_parameters():
                padding = local.detach().clone()
                for piece in shardings[name].pieces(tp):
                    there = Piece((), piece.global_offset, piece.sizes)
                    assert torch.equal(piece.view(local), there.view(expected[name])), name
                    there.view(covered[name]).add_(1)
                    piece.view(padding).zero_()
                assert not padding.any()
        assert all(bool(count[:VOCABULARY].all()) for count in covered.values())


def test_a_stage_has_the_names_and_values_of_its_part_of_the_model() -> None:
    whole = gpt(Axis("tp"), num_layers=4)
    initialize(whole, collect_shardings(whole), seed=3, tp=whole.tp.axis)
    expected = dict(whole.named_parameters())
    seen: list[str] = []
    for layers in (range(0, 2), range(2, 3), range(3, 4)):
        stage = gpt(Axis("tp"), num_layers=4, layers=layers)
        initialize(stage, collect_shardings(stage), seed=3, tp=stage.tp.axis)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, expected[name])
            seen.append(name)
    assert sorted(seen) == sorted([*expected, "embedding.tokens.weight"])  # tied: the last stage has it too


def test_values_have_the_spread_that_their_sharding_says() -> None:
    model = gpt(Axis("tp"))
    shardings = collect_shardings(model)
    initialize(model, shardings, seed=3, tp=model.tp.axis)
    for name, parameter in model.named_parameters():
        std = shardings[name].init_std
        if std is None:
            assert bool((parameter == shardings[name].init_value).all())
        else:
            true = parameter[:VOCABULARY] if "tokens" in name else parameter
            assert true.std().item() == pytest.approx(std, rel=0.1), name
    stds = {name.split(".", 2)[-1]: shardings[name].init_std for name in shardings if name.startswith("layers.0")}
    assert (stds["attention.qkv.weight"], stds["mlp.fc1.weight"]) == (0.02, 0.02)
    assert stds["attention.out.weight"] == stds["mlp.fc2.weight"] == pytest.approx(0.02 / 2)  # / sqrt(2 * 2 layers)


def test_another_seed_is_another_model() -> None:
    model = gpt(Axis("tp"))
    weight = dict(model.named_parameters())["layers.0.mlp.fc1.weight"]
    initialize(model, collect_shardings(model), seed=3, tp=model.tp.axis)
    before = weight.detach().clone()
    initialize(model, collect_shardings(model), seed=4, tp=model.tp.axis)
    assert (weight == before).float().mean() < 0.01


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    shardings = collect_shardings(gpt(Axis("tp")))
    still = {name for name, sharding in shardings.items() if not sharding.decays}
    assert still == {name for name in shardings if "norm" in name or name.endswith("bias")}


def test_the_true_vocabulary_counts_not_its_padding() -> None:
    shardings = collect_shardings(gpt(Axis("tp", 8, 0)))
    assert shardings["embedding.tokens.weight"].num_elements == VOCABULARY * 24
    assert shardings["layers.0.mlp.fc1.weight"].num_elements == COMMON * 24


def test_a_module_that_forgets_a_parameter_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"no sharding, or no parameter: {'0.weight'}"):
        collect_shardings(nn.Sequential(nn.Linear(2, 2, bias=False)))
