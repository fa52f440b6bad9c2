"""Tests of BERT: its losses and gradients are those of its definition in plain torch; what its ends count."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import AttentionBackend
from megatronish.model.batch import MicroBatch, SentencePairs
from megatronish.model.bert import Bert, BertLosses
from megatronish.model.gpt import Execution
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.sharding import collect_shardings, initialize
from megatronish.specs.ends import ends_of

VOCABULARY, S, B, D, HEADS = 37, 12, 3, 16, 4
CONFIG = ModelConfig(
    model_type="bert",
    num_layers=2,
    hidden_size=D,
    num_attention_heads=HEADS,
    ffn_hidden_size=24,
    norm_epsilon=1e-12,
    init_method_std=0.2,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    make_vocab_size_divisible_by=8,
)


def model_of(config: ModelConfig, backend: AttentionBackend = "auto") -> Bert:
    model = Bert(config, vocab_size=VOCABULARY, num_positions=S, execution=Execution(attention_backend=backend))
    initialize(model, collect_shardings(model), seed=3, domains=Mesh.start().domains)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 5)
    return model.double()


def batch_of(*, filler: bool) -> MicroBatch:
    """Three pairs of sentences, of which two end in filler of their own length."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(VOCABULARY, (B, S), generator=generator) for _ in range(2))
    lengths = torch.tensor([S, 7, 9]) if filler else torch.full((B,), S)
    is_filler = torch.arange(S) >= lengths[:, None]
    chosen = (torch.rand(B, S, generator=generator) < 0.4) & ~is_filler
    types = ((torch.arange(S) > 3) & ~is_filler).long()
    positions = torch.arange(S).expand(B, S)
    documents = is_filler.long() if filler else None
    batch = MicroBatch(tokens, labels, chosen, positions, torch.arange(B), documents)
    swapped = torch.tensor([True, False, True])
    return batch.with_sentences(SentencePairs(types, swapped, num_masked=batch.num_loss_tokens))


def by_definition(w: dict[str, Tensor], batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Token losses [S, B] and losses of the order [B] of BERT, sample by sample."""
    assert batch.sentences is not None
    of_tokens, of_pairs = [], []
    for n in range(B):
        seen = torch.ones(S, S, dtype=torch.bool)
        if batch.document_ids is not None:
            seen = batch.document_ids[n][:, None] == batch.document_ids[n]
        table = w["embedding.tokens.weight"]
        x = (
            table[batch.tokens[n]]
            + w["embedding.positions.weight"]
            + w["embedding.types.weight"][batch.sentences.token_types[n]]
        )
        x = norm(x, w, "embedding.norm")
        for layer in range(2):
            name = f"layers.{layer}"
            q, k, v = affine(x, w, f"{name}.attention.qkv").view(S, 3, HEADS, -1).unbind(1)
            scores = torch.einsum("qnh,knh->nqk", q, k) / math.sqrt(D / HEADS)
            attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.transpose(0, 1)
            out = affine(attended.transpose(0, 1).flatten(1), w, f"{name}.attention.out")
            x = norm(x + out, w, f"{name}.attention_norm")
            y = affine(F.gelu(affine(x, w, f"{name}.mlp.fc1")), w, f"{name}.mlp.fc2")
            x = norm(x + y, w, f"{name}.mlp_norm")
        head = norm(F.gelu(affine(x, w, "transform.dense")), w, "transform.norm")
        logits = (head @ table.T + w["head.bias"])[:, :VOCABULARY]
        of_tokens.append(F.cross_entropy(logits, batch.labels[n], reduction="none"))
        order = affine(torch.tanh(affine(x[0], w, "sentence.pooler")), w, "sentence.classifier")
        of_pairs.append(F.cross_entropy(order, batch.sentences.is_swapped[n].long()))
    return torch.stack(of_tokens, 1), torch.stack(of_pairs)


def norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(x, (D,), w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-12)


def affine(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


@pytest.mark.parametrize("filler", [False, True], ids=["full rows", "filler"])
@pytest.mark.parametrize("backend", ["auto", "fused_softmax", "unfused"])
def test_bert_is_what_its_definition_says(backend: AttentionBackend, filler: bool) -> None:
    model, batch = model_of(CONFIG, backend), batch_of(filler=filler)
    weights = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    found, expected = model(None, batch, step=0), by_definition(weights, batch)
    assert isinstance(found, BertLosses)
    for actual, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)
    chosen = batch.loss_mask.t()
    ((found.tokens * chosen).sum() + found.sentences.sum()).backward()
    ((expected[0] * chosen).sum() + expected[1].sum()).backward()
    for name, parameter in model.named_parameters():
        grad, exact = parameter.grad, weights[name].grad
        assert grad is not None and exact is not None, name
        assert (grad - exact).abs().max() <= 1e-5 * exact.abs().max().clamp(min=1e-6), name


def test_filler_changes_nothing_of_what_comes_before_it() -> None:
    model, batch = model_of(CONFIG), batch_of(filler=True)
    before = model.losses(model.hidden(None, batch, step=None), batch)
    assert batch.document_ids is not None
    batch.tokens[batch.document_ids == 1] = 5
    after = model.losses(model.hidden(None, batch, step=None), batch)
    assert isinstance(before, BertLosses) and isinstance(after, BertLosses)
    real = (batch.document_ids == 0).t()
    assert torch.equal(before.tokens[real], after.tokens[real]) and torch.equal(before.sentences, after.sentences)


def test_a_token_is_predicted_from_both_sides() -> None:
    model, batch = model_of(CONFIG), batch_of(filler=False)
    before = model.hidden(None, batch, step=None)
    batch.tokens[:, -1] = (batch.tokens[:, -1] + 1) % VOCABULARY
    after = model.hidden(None, batch, step=None)
    assert all(not torch.equal(before[place], after[place]) for place in range(S))


@pytest.mark.parametrize("no_head", [False, True])
def test_the_specs_of_the_ends_count_the_parameters_of_the_modules(no_head: bool) -> None:
    config = ModelConfig(**{**vars(CONFIG), "bert_no_binary_head": no_head, "num_token_types": 3})
    model, ends = Bert(config, vocab_size=VOCABULARY, num_positions=S), ends_of(config, seq_length=S)
    padded = config.padded_vocab_size(VOCABULARY, 1)
    sizes = {name: each.numel() for name, each in model.named_parameters() if not name.startswith("layers.")}
    before = sum(size for name, size in sizes.items() if name.startswith("embedding."))
    assert before == padded * D + ends.of_embedding(config).total
    assert sum(sizes.values()) - before == ends.of_head(padded).total
