"""Tests of the model against a plain float64 model written from the formulas: loops over heads, no fused operation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_model import (
    GPT2,
    LLAMA,
    VARIANTS,
    VOCABULARY,
    B,
    S,
    batch_of,
    logits_of,
    model_of,
    plain_frequency,
    plain_logits,
)
from torch import Tensor

from megatronish.attention.cached import KeyValueCache
from megatronish.config.sections.model import ModelConfig
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT, Execution, ModelChunk
from megatronish.model.rope import RotaryEmbedding, Rotation, rotate


@pytest.mark.long
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_a_plain_model(name: str, documents: bool) -> None:
    config, batch = VARIANTS[name], batch_of(documents=documents)
    model = model_of(config)
    expected = plain_logits(config, model, batch)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(model, batch).double(), expected, rtol=0, atol=2e-5 * float(expected.std()))


def test_every_parameter_of_every_variant_matters() -> None:
    """Else the comparison with the plain model would be blind to it."""
    for name, config in VARIANTS.items():
        model = model_of(config)
        model(None, batch_of(documents=True), step=0).sum().backward()
        idle = {key for key, parameter in model.named_parameters() if not bool(parameter.grad.abs().sum() > 1e-4)}  # type: ignore[union-attr]
        assert idle == set(), name


def test_scaled_ropes_keep_blend_and_stretch_their_wavelengths() -> None:
    """Else the comparison would try one branch of each formula alone."""
    size = LLAMA.head_size
    plain = [plain_frequency(LLAMA, pair, size) for pair in range(size // 2)]
    for name in ("rope llama3", "rope yarn"):
        ratios = [plain[pair] / plain_frequency(VARIANTS[name], pair, size) for pair in range(size // 2)]
        assert ratios[0] == 1
        assert ratios[-1] == pytest.approx(4)
        assert any(1.01 < ratio < 3.99 for ratio in ratios)


def test_longrope_turns_each_text_by_its_own_length() -> None:
    """The first texts of both rows are as long as what was the context, or one longer; filler follows them."""
    model, batch = model_of(VARIANTS["rope longrope"]), batch_of()
    told = logits_of(model, batch.with_text_lengths(torch.tensor([16, 17])))
    for row, length in enumerate((16, 17)):
        alone = logits_of(model, _cut(batch, length))
        torch.testing.assert_close(told[row, :length], alone[row], rtol=1e-5, atol=1e-5)
    short, long = (logits_of(model, _cut(batch, length))[:, :16] for length in (16, 17))
    assert float((short - long).abs().max()) > 0.01
    scaled = model_of(VARIANTS["rope longrope, scaled"])
    told = logits_of(scaled, batch.with_text_lengths(torch.tensor([16, 17])))
    for row, length in enumerate((16, 17)):
        alone = logits_of(scaled, _cut(batch, length))
        torch.testing.assert_close(told[row, :length], alone[row], rtol=1e-5, atol=1e-5)
    both = replace(VARIANTS["rope longrope"], rope_short_factor=VARIANTS["rope longrope"].rope_long_factor)
    torch.testing.assert_close(logits_of(model_of(both), _cut(batch, 16)), long, rtol=1e-5, atol=1e-5)


def _cut(batch: MicroBatch, length: int) -> MicroBatch:
    return batch.at(torch.arange(length))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_losses_are_those_of_every_token_over_the_true_vocabulary(name: str) -> None:
    config, batch = VARIANTS[name], batch_of()
    model = model_of(config)
    expected = -plain_logits(config, model, batch).log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    found = model(None, batch, step=None).detach()
    assert found.shape == (S, B) and found.dtype == torch.float32
    torch.testing.assert_close(found, expected.t().float(), rtol=1e-5, atol=1e-5)


def changed(batch: MicroBatch, places: slice) -> MicroBatch:
    """With other tokens at these places of both samples."""
    tokens = batch.tokens.clone()
    tokens[:, places] = (tokens[:, places] + 1) % VOCABULARY
    return replace(batch, tokens=tokens)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen"])
def test_a_later_token_never_changes_an_earlier_prediction(name: str) -> None:
    model, batch = model_of(VARIANTS[name]), batch_of()
    before = logits_of(model, batch)
    for place in (1, 7, S - 1):
        after = logits_of(model, changed(batch, slice(place, None)))
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.isclose(after[:, place], before[:, place]).all()


def test_forwards_without_documents_share_the_masks_that_they_make() -> None:
    model = model_of(VARIANTS["alibi in a window"])
    made = [model.masks.of(batch_of(seed=seed), seq_length=S, cache=None) for seed in (0, 1)]
    assert made[0] is made[1]
    assert model.masks.of(batch_of(), seq_length=S - 1, cache=None).seq_length == S - 1
    packed = [model.masks.of(batch_of(documents=True), seq_length=S, cache=None) for _ in range(2)]
    assert packed[0] is not packed[1]
    cache = KeyValueCache(9)
    cache.advance(3)
    after_some = model.masks.of(batch_of(), seq_length=S, cache=cache)
    assert (after_some.seq_length, after_some.first_query, after_some.in_generation) == (S + 3, 3, True)
    assert not made[0].in_generation and not packed[0].in_generation


def test_a_window_ends_what_a_token_sees() -> None:
    model, batch = model_of(replace(VARIANTS["mistral"], num_layers=1)), batch_of()
    before, after = logits_of(model, batch), logits_of(model, changed(batch, slice(3, 4)))
    moved = ~torch.isclose(before, after).all(-1).all(0)
    assert moved.nonzero().flatten().tolist() == list(range(3, 3 + 6))


def test_a_document_does_not_see_the_one_before_it() -> None:
    model, batch = model_of(VARIANTS["llama"]), batch_of(documents=True)
    before, after = logits_of(model, batch), logits_of(model, changed(batch, slice(0, 7)))
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert not torch.isclose(before[1, 7:], after[1, 7:]).all()


def test_a_document_reads_as_if_it_stood_alone() -> None:
    model, batch = model_of(VARIANTS["gpt2"]), batch_of(documents=True)
    tokens = batch.tokens[:1, 7:12]
    alone = MicroBatch(
        tokens=tokens,
        labels=tokens,
        loss_mask=tokens > -1,
        position_ids=torch.arange(5)[None],
        sample_ids=torch.tensor([0]),
    )
    torch.testing.assert_close(logits_of(model, alone)[0], logits_of(model, batch)[0, 7:12], rtol=1e-5, atol=1e-5)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    model = model_of(replace(LLAMA, window_size=S))
    assert torch.equal(logits_of(model, batch_of()), logits_of(model_of(LLAMA), batch_of()))


def loss_of(config: ModelConfig, *, step: int | None, **changes: Any) -> float:
    return float(model_of(config)(None, replace(batch_of(), **changes), step=step).detach().sum())


@pytest.mark.parametrize("rates", [(0.5, 0.0), (0.0, 0.5), (0.3, 0.3)])
def test_evaluation_drops_nothing_and_every_step_something_else(rates: tuple[float, float]) -> None:
    dropping = replace(LLAMA, hidden_dropout=rates[0], attention_dropout=rates[1])
    assert loss_of(dropping, step=None) == loss_of(LLAMA, step=None) == loss_of(LLAMA, step=3)
    assert loss_of(dropping, step=3) == loss_of(dropping, step=3)
    seen = {
        loss_of(dropping, step=None),
        loss_of(dropping, step=3),
        loss_of(dropping, step=4),
        loss_of(dropping, step=3, sample_ids=torch.tensor([10, 12])),
    }
    assert len(seen) == 4


def test_a_hardly_dropping_model_is_nearly_the_plain_one() -> None:
    dropping = replace(LLAMA, hidden_dropout=1e-9, attention_dropout=1e-9)
    assert loss_of(dropping, step=0) == pytest.approx(loss_of(LLAMA, step=0), rel=1e-6)


def test_a_turn_keeps_lengths_and_depends_on_the_distance_alone() -> None:
    angles = torch.arange(S)[:, None, None, None] * torch.tensor([1.0, 0.1, 0.01])
    turn = Rotation(angles.cos(), angles.sin())
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 6, generator=generator).expand(S, 1, 1, 6) for _ in range(2))
    for interleaved in (False, True):
        turned_q, turned_k = rotate(q, turn, interleaved=interleaved), rotate(k, turn, interleaved=interleaved)
        torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
        scores = (turned_q[:, 0, 0] @ turned_k[:, 0, 0].T).diagonal(-3)
        torch.testing.assert_close(scores, scores[:1].expand_as(scores))


def test_the_frequencies_of_rope_are_computed_once_and_stay_in_fp32_whatever_the_model_becomes() -> None:
    with torch.device("meta"):
        model = GPT(LLAMA, vocab_size=VOCABULARY, num_positions=S)
    assert not list(model.buffers()) and model.rotary is not None
    positions = torch.arange(S)[None]
    first, second = (model.bfloat16().rotary(positions).everywhere for _ in range(2))
    expected = RotaryEmbedding(LLAMA)(positions).everywhere
    for found in (first, second):
        assert torch.equal(found.cos, expected.cos) and torch.equal(found.sin, expected.sin)
        assert found.cos.dtype == torch.float32 and found.cos.device.type == "cpu"
    model.rotary(positions.to("meta"))
    kept = model.rotary._on(torch.device("meta"))
    assert kept is model.rotary._on(torch.device("meta"))


def test_pieces_of_a_model_in_a_row_are_the_model() -> None:
    batch = batch_of()
    whole = model_of(GPT2)
    values = dict(whole.named_parameters())
    x: Tensor | None = None
    for layers, is_first, is_last in (([0], True, False), ([1], False, True)):
        chunks = [ModelChunk(layers, is_first, is_last)]
        piece = GPT(GPT2, vocab_size=VOCABULARY, num_positions=S, chunks=chunks, execution=Execution(dropout_seed=5))
        piece.load_state_dict({name: values[name] for name, _ in piece.named_parameters()})
        x = piece(x, batch, step=None)
    assert x is not None
    assert torch.equal(x, whole(None, batch, step=None))


def test_in_bf16_the_model_is_the_same_to_its_precision() -> None:
    config = VARIANTS["qwen"]
    model, batch = model_of(config), batch_of()
    exact = logits_of(model, batch)
    rounded = logits_of(model.bfloat16(), batch)
    assert rounded.dtype == torch.bfloat16
    # A value keeps 8 bits, 2^-9 of it lost on average; some twenty roundings in a row add up to about 2^-7.
    assert float((rounded.float() - exact).std() / exact.std()) < 2**-5
