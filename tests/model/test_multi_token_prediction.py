"""Multi-token prediction against the formulas, written out in float64 a row at a time: losses and every gradient."""

import math

import pytest
import torch
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.data.loader import Collator
from megatronish.data.sample import Sample
from megatronish.model.batch import MicroBatch, TokensAhead
from megatronish.model.gpt import GPT
from megatronish.objectives.ahead import MultiTokenPrediction
from megatronish.objectives.objective import CausalLM
from megatronish.parallel.mesh import dense_domain
from megatronish.parallel.sharding import collect_shardings, initialize
from megatronish.parallel.streams import numpy_stream

VOCABULARY, EOD, S, B, DEPTHS, FACTOR = 23, 0, 12, 2, 3, 0.3
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    position_embedding_type="none",
    normalization="RMSNorm",
    squared_relu=True,
    disable_bias_linear=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.4,
    make_vocab_size_divisible_by=1,
    mtp_num_layers=DEPTHS,
    mtp_loss_scaling_factor=FACTOR,
)


def batch_of(*, documents: bool, eod_mask_loss: bool = False) -> MicroBatch:
    stream = numpy_stream(3, "rows")
    rows = stream.integers(0, VOCABULARY, (B, S + 1))
    rows[0, 4] = rows[1, 7] = EOD
    collate = Collator(EOD, reset_position_ids=documents, reset_attention_mask=documents, eod_mask_loss=eod_mask_loss)
    return collate([Sample(row) for row in rows], range(B))


def model_of(*, tied: bool) -> GPT:
    config = ModelConfig(**{**vars(MODEL), "untie_embeddings_and_output_weights": not tied})
    gpt = GPT(config, vocab_size=VOCABULARY, num_positions=S)
    initialize(gpt, collect_shardings(gpt), seed=5, domains=dense_domain(gpt.tp.axis))
    return gpt.double()


def written_out(w: dict[str, Tensor], batch: MicroBatch) -> list[tuple[Tensor, int]]:
    """(sum of losses, predictions) of the main model, then of each depth."""
    sums = [(torch.zeros((), dtype=torch.float64), 0)] * (1 + DEPTHS)
    table, head = w["embedding.tokens.weight"], w.get("head.weight", w["embedding.tokens.weight"])
    for row, (tokens, labels, mask) in enumerate(zip(batch.tokens, batch.labels, batch.loss_mask, strict=True)):
        documents = torch.zeros(S) if batch.document_ids is None else batch.document_ids[row]
        x = table[tokens]
        for layer in range(2):
            x = layer_of(w, f"layers.{layer}", x, documents)
        x = norm(x, w["final_norm.weight"])
        for depth in range(1 + DEPTHS):
            if depth:
                ours = f"layers.{1 + depth}"
                later = torch.cat((tokens[depth:], tokens.new_zeros(depth)))
                both = (
                    norm(table[later], w[f"{ours}.embedding_norm.weight"]),
                    norm(x, w[f"{ours}.hidden_norm.weight"]),
                )
                x = layer_of(w, ours, torch.cat(both, dim=-1) @ w[f"{ours}.projection.weight"].T, documents)
                x = norm(x, w[f"{ours}.final_norm.weight"])
            for i in range(S - depth):
                if mask[i + depth] and documents[i] == documents[i + depth]:
                    total, number = sums[depth]
                    sums[depth] = total - (head @ x[i]).log_softmax(0)[labels[i + depth]], number + 1
    return sums


def layer_of(w: dict[str, Tensor], name: str, x: Tensor, documents: Tensor) -> Tensor:
    q, k, v = (norm(x, w[f"{name}.attention_norm.weight"]) @ w[f"{name}.attention.qkv.weight"].T).chunk(3, dim=-1)
    hidden = (documents[:, None] != documents) | torch.ones(S, S).triu(1).bool()
    heads = []
    for own in (slice(0, 4), slice(4, 8)):
        scores = (q[:, own] @ k[:, own].T / math.sqrt(4)).masked_fill(hidden, -math.inf)
        heads.append(scores.softmax(-1) @ v[:, own])
    x = x + torch.cat(heads, dim=-1) @ w[f"{name}.attention.out.weight"].T
    up = norm(x, w[f"{name}.mlp_norm.weight"]) @ w[f"{name}.mlp.fc1.weight"].T
    return x + up.clamp(min=0).square() @ w[f"{name}.mlp.fc2.weight"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + MODEL.norm_epsilon).sqrt() * weight


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("documents", [True, False], ids=["documents", "rows"])
def test_losses_and_gradients_are_those_of_the_formulas(documents: bool, tied: bool) -> None:
    batch, gpt = batch_of(documents=documents), model_of(tied=tied)
    ahead = TokensAhead.of(batch, DEPTHS)
    main, *counts = ahead.counts
    factors = torch.tensor([main / count for count in counts], dtype=torch.float64)
    batch = batch.with_ahead(TokensAhead(ahead.tokens, ahead.labels, ahead.loss_mask, ahead.counts, factors))
    losses = gpt(None, batch, step=0)
    assert losses.shape == (1 + DEPTHS, S, B)
    objective = MultiTokenPrediction(CausalLM(), num_depths=DEPTHS, factor=FACTOR)
    total, sums = objective.sums_ahead(losses, batch)
    (total / main).backward()
    reported = objective.reported({name: float(value.detach()) / main for name, value in sums.items()})

    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in gpt.named_parameters()}
    expected = [(loss / number, number) for loss, number in written_out(weights, batch)]
    (expected[0][0] + FACTOR / DEPTHS * sum(loss for loss, _ in expected[1:])).backward()
    assert [main, *counts] == [number for _, number in expected]
    means = [float(loss.detach()) for loss, _ in expected]
    assert [reported[name] for name in ("loss", *(f"mtp_{d + 1}_loss" for d in range(DEPTHS)))] == pytest.approx(means)
    for name, parameter in gpt.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=name)


def test_a_prediction_counts_inside_of_one_document_where_the_main_loss_counts_its_label() -> None:
    rows = Sample(numpy_stream(0, "row").integers(1, 9, 7))
    rows.tokens[2] = EOD
    apart = Collator(EOD, reset_position_ids=True)([rows], [0])
    assert TokensAhead.of(apart, 2).loss_mask.int().tolist() == [[[1, 1, 0, 1, 1, 0]], [[1, 0, 0, 1, 0, 0]]]
    masked = Collator(EOD, eod_mask_loss=True)([rows], [0])
    assert TokensAhead.of(masked, 1).loss_mask.int().tolist() == [[[1, 0, 1, 1, 1, 0]]]
    assert TokensAhead.of(masked, 1).counts == (5, 4)
    assert TokensAhead.of(apart, 9).counts[-1] == 0


def test_evaluation_reports_the_main_loss_alone() -> None:
    objective = MultiTokenPrediction(CausalLM(), num_depths=2, factor=0.1)
    sums = dict.fromkeys(objective.names, 0.0) | {"loss": 3.0}
    assert objective.reported(sums) == {"loss": 3.0}
    batch = batch_of(documents=False)
    assert model_of(tied=True)(None, batch, step=None).shape == (S, B)
