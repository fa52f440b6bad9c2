"""Tests of sharding: every element of a parameter is held once over tp, with the same values in any layout."""

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.model.gpt import GPT, ModelChunk
from megatronish.parallel.mesh import Axis, Domain, TensorParallel, dense_domain
from megatronish.parallel.sharding import Cut, Piece, Sharding, collect_shardings, flat_pieces, initialize
from megatronish.parallel.streams import normal_rectangle

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
        for piece in sharding.pieces({"tp": tp}):
            Piece((), piece.global_offset, piece.sizes).view(count).add_(1)
    return count


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_the_pieces_of_a_cut_parameter_cover_it_once(tp_size: int) -> None:
    padded = -(-VOCABULARY // (4 * tp_size)) * 4 * tp_size
    cut = [
        Sharding((VOCABULARY, 3), cuts=(Cut(0, "tp", (padded,)),)),
        Sharding((4 * COMMON, 3), cuts=(Cut(0, "tp", (2 * COMMON, COMMON, COMMON)),)),
        Sharding((2 * COMMON,), cuts=(Cut(0, "tp", (COMMON, COMMON)),)),
        Sharding((3, COMMON), cuts=(Cut(1, "tp"),)),
    ]
    for sharding in cut:
        assert torch.equal(held(sharding, tp_size), torch.ones(sharding.shape))
    replicated = Sharding((5, 3))
    assert torch.equal(held(replicated, tp_size), torch.full((5, 3), float(tp_size)))


def test_a_rank_of_padding_alone_holds_nothing() -> None:
    sharding = Sharding((131, 2), cuts=(Cut(0, "tp", (160,)),))
    rows = [sum(piece.sizes[0] for piece in sharding.pieces({"tp": tp})) for tp in axes(8)]
    assert rows == [20, 20, 20, 20, 20, 20, 11, 0]


def test_a_rank_holds_its_part_of_each_section_side_by_side() -> None:
    sharding = Sharding((12,), cuts=(Cut(0, "tp", (8, 2, 2)),))
    assert list(sharding.pieces({"tp": Axis("tp", 2, 1)})) == [
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
    initialize(serial, collect_shardings(serial), seed=3, domains=dense_domain(serial.tp.axis))
    expected = dict(serial.named_parameters())
    for tp_size in (2, 3, 8):
        covered = {name: torch.zeros_like(values) for name, values in expected.items()}
        for tp in axes(tp_size):
            model = gpt(tp, **options)
            shardings = collect_shardings(model)
            initialize(model, shardings, seed=3, domains=dense_domain(tp))
            for name, local in model.named_parameters():
                padding = local.detach().clone()
                for piece in shardings[name].pieces({"tp": tp}):
                    there = Piece((), piece.global_offset, piece.sizes)
                    assert torch.equal(piece.view(local), there.view(expected[name])), name
                    there.view(covered[name]).add_(1)
                    piece.view(padding).zero_()
                assert not padding.any()
        assert all(bool(count[:VOCABULARY].all()) for count in covered.values())


@pytest.mark.long
def test_a_stage_has_the_names_and_values_of_its_part_of_the_model() -> None:
    whole = gpt(Axis("tp"), num_layers=4)
    initialize(whole, collect_shardings(whole), seed=3, domains=dense_domain(whole.tp.axis))
    expected = dict(whole.named_parameters())
    seen: list[str] = []
    for layers in (range(0, 2), range(2, 3), range(3, 4)):
        stage = gpt(Axis("tp"), num_layers=4, layers=layers)
        initialize(stage, collect_shardings(stage), seed=3, domains=dense_domain(stage.tp.axis))
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, expected[name])
            seen.append(name)
    assert sorted(seen) == sorted([*expected, "embedding.tokens.weight"])  # tied: the last stage has it too


def test_values_have_the_spread_that_their_sharding_says() -> None:
    model = gpt(Axis("tp"))
    shardings = collect_shardings(model)
    initialize(model, shardings, seed=3, domains=dense_domain(model.tp.axis))
    for name, parameter in model.named_parameters():
        std = shardings[name].init.std
        if std is None:
            assert bool((parameter == shardings[name].init.value).all())
        else:
            true = parameter[:VOCABULARY] if "tokens" in name else parameter
            assert true.std().item() == pytest.approx(std, rel=0.1), name
    stds = {name.split(".", 2)[-1]: shardings[name].init.std for name in shardings if name.startswith("layers.0")}
    assert (stds["attention.qkv.weight"], stds["mlp.fc1.weight"]) == (0.02, 0.02)
    assert stds["attention.out.weight"] == stds["mlp.fc2.weight"] == pytest.approx(0.02 / 2)  # / sqrt(2 * 2 layers)


def test_another_seed_is_another_model() -> None:
    model = gpt(Axis("tp"))
    weight = dict(model.named_parameters())["layers.0.mlp.fc1.weight"]
    initialize(model, collect_shardings(model), seed=3, domains=dense_domain(model.tp.axis))
    before = weight.detach().clone()
    initialize(model, collect_shardings(model), seed=4, domains=dense_domain(model.tp.axis))
    assert (weight == before).float().mean() < 0.01


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    shardings = collect_shardings(gpt(Axis("tp")))
    still = {name for name, sharding in shardings.items() if not sharding.decays}
    assert still == {name for name in shardings if "norm" in name or name.endswith("bias")}


def test_the_roles_of_a_model_name_its_vocabulary_and_the_norms_of_queries_and_keys() -> None:
    options = {"qk_layernorm": True, "softmax_type": "learnable", "embed_layernorm": True}
    shardings = collect_shardings(gpt(Axis("tp"), untie_embeddings_and_output_weights=True, **options))
    assert {name for name, each in shardings.items() if each.is_vocabulary} == {
        "embedding.tokens.weight",
        "head.weight",
    }
    assert {name for name, each in shardings.items() if each.role == "qk_norm"} == {
        f"layers.{layer}.attention.{norm}.{kind}"
        for layer in (0, 1)
        for norm in ("q_norm", "k_norm")
        for kind in ("weight", "bias")
    }
    assert shardings["embedding.positions.weight"].role == "positions"
    for name in ("layers.0.attention.sinks", "embedding.norm.weight"):
        assert shardings[name].role == "vector" and not shardings[name].decays


def test_the_true_vocabulary_counts_not_its_padding() -> None:
    shardings = collect_shardings(gpt(Axis("tp", 8, 0)))
    assert shardings["embedding.tokens.weight"].num_elements == VOCABULARY * 24
    assert shardings["layers.0.mlp.fc1.weight"].num_elements == COMMON * 24


def test_a_module_that_forgets_a_parameter_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"no sharding, or no parameter: {'0.weight'}"):
        collect_shardings(nn.Sequential(nn.Linear(2, 2, bias=False)))


# Tensors of any number of dims, cut over any number of axes


def random_case(random_: random.Random) -> tuple[Sharding, dict[str, Axis], list[int]]:
    """A sharding of up to four dims, the axes of one rank, and the shape of what that rank holds."""
    axes = {name: (size := random_.choice((1, 2, 3)), Axis(name, size, random_.randrange(size)))[1] for name in "abc"}
    shape, cuts, local = [], [], []
    names = random_.sample("abc", 3)
    for dim in range(random_.randint(1, 4)):
        axis = axes[names.pop()] if names and random_.random() < 0.7 else None
        if axis is None:
            shape.append(random_.randint(1, 4))
            local.append(shape[-1])
            continue
        sections = tuple(axis.size * random_.randint(1, 3) for _ in range(random_.randint(1, 3)))
        shape.append(sum(sections))
        local.append(sum(sections) // axis.size)
        cuts.append(Cut(dim, axis.name, sections if len(sections) > 1 else ()))
    return Sharding(tuple(shape), tuple(cuts)), axes, local


@pytest.mark.parametrize("seed", range(200))
def test_any_run_of_elements_is_made_of_rectangles_of_the_global_tensor(seed: int) -> None:
    """Sections on a dim other than the first are not consecutive in a flat tensor."""
    random_ = random.Random(seed)
    sharding, axes, shape = random_case(random_)
    whole = torch.arange(sharding.num_elements).view(sharding.shape)
    pieces = list(sharding.pieces(axes))
    local = torch.full(shape, -1)
    for piece in pieces:
        place = tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.sizes, strict=True))
        piece.view(local).copy_(whole[place])
    assert local.min() >= 0
    start, stop = sorted(random_.randint(0, local.numel()) for _ in range(2))
    run = local.view(-1)[start:stop]
    covered = torch.zeros_like(run)
    for flat_piece in flat_pieces(pieces, shape, start, stop):
        place = tuple(slice(o, o + n) for o, n in zip(flat_piece.global_offset, flat_piece.sizes, strict=True))
        assert torch.equal(flat_piece.view(run), whole[place])
        flat_piece.view(covered).add_(1)
    assert bool((covered == 1).all())


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 2, 600), (3, 2, 5, 520)])
def test_a_rectangle_of_any_number_of_dims_is_drawn_as_the_whole_is(shape: tuple[int, ...]) -> None:
    whole = normal_rectangle(shape, (0,) * len(shape), shape, names=("w",))
    offset = tuple(size // 3 for size in shape)
    sizes = tuple(max(size // 2, 1) for size in shape)
    place = tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))
    assert torch.equal(normal_rectangle(shape, offset, sizes, names=("w",)), whole[place])
    assert whole.flatten().unique().numel() > 0.999 * whole.numel()  # no tile is drawn twice


def test_a_parameter_without_a_role_is_a_matrix_or_a_vector() -> None:
    assert Sharding((3, 4)).role == "matrix" and Sharding((3, 4)).decays
    assert Sharding((3,)).role == "vector" and not Sharding((3,)).decays
    assert Sharding((3, 4), role="embedding").decays


def test_of_the_ranks_that_hold_copies_the_first_one_counts() -> None:
    expert = Sharding((8, 2, 6, 4), (Cut(0, "ep"), Cut(2, "etp")), domain="expert")
    bias = Sharding((8, 6), (Cut(0, "ep"),), domain="expert", partial_over=frozenset({"etp"}))
    for ep, etp in product(range(2), range(2)):
        model = {"ep": Axis("ep", 2, ep), "etp": Axis("etp", 2, etp)}
        domain = Domain("expert", model=model)
        assert expert.is_counted(domain) and expert.sums_over(domain) == ()
        assert bias.is_counted(domain) == (etp == 0)
        assert bias.sums_over(domain) == (model["etp"],)
