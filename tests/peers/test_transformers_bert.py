"""Tests of BERT against transformers: losses, gradients, and every bit of a round trip. Run by `make test-peers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import to_hf, to_ours

from megatronish.formats.prove import compare_logits, our_model
from megatronish.model.batch import MicroBatch, SentencePairs
from megatronish.model.bert import BertLosses

pytestmark = pytest.mark.peers("transformers")
transformers: Any = pytest.importorskip(
    "transformers",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
VOCABULARY, S, B = 37, 12, 3
CLASSES = ("BertForPreTraining", "BertForMaskedLM")


def random_bert(name: str, **changes: Any) -> Any:
    config = transformers.BertConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 24,
            "max_position_embeddings": 20,
        }
        | changes
    )
    model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    model.tie_weights()
    return model


def batch_of() -> MicroBatch:
    """Pairs of sentences, of which two end in filler, with labels at some places."""
    generator = torch.Generator().manual_seed(1)
    # Without token 0: transformers takes the filler's row of the embedding out of the gradient of lookups.
    tokens, labels = (torch.randint(1, VOCABULARY, (B, S), generator=generator) for _ in range(2))
    is_filler = torch.arange(S) >= torch.tensor([S, 7, 9])[:, None]
    chosen = (torch.rand(B, S, generator=generator) < 0.4) & ~is_filler
    positions = torch.arange(S).expand(B, S)
    batch = MicroBatch(tokens, labels, chosen, positions, torch.arange(B), is_filler.long())
    types = ((torch.arange(S) > 3) & ~is_filler).long()
    pairs = SentencePairs(types, torch.tensor([True, False, True]), num_masked=batch.num_loss_tokens)
    return batch.with_sentences(pairs)


@pytest.mark.parametrize("name", CLASSES)
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs, batch = random_bert(name), batch_of()
    assert batch.document_ids is not None and batch.sentences is not None
    theirs.save_pretrained(tmp_path / "theirs")
    labels = {"labels": batch.labels.masked_fill(~batch.loss_mask, -100)}
    if name == "BertForPreTraining":
        labels["next_sentence_label"] = batch.sentences.is_swapped.long()
    expected = theirs(
        input_ids=batch.tokens,
        token_type_ids=batch.sentences.token_types,
        attention_mask=(batch.document_ids == 0).long(),
        **labels,
    ).loss
    expected.backward()

    ours = our_model(tmp_path / "theirs").model.requires_grad_()
    found = ours(None, batch, step=None)
    tokens, pairs = found if isinstance(found, BertLosses) else (found, torch.zeros(1))
    loss = (tokens * batch.loss_mask.t()).sum() / batch.num_loss_tokens + pairs.mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    gradients = {
        "embedding.tokens.weight": theirs.bert.embeddings.word_embeddings.weight.grad,
        "embedding.types.weight": theirs.bert.embeddings.token_type_embeddings.weight.grad,
        "head.bias": theirs.cls.predictions.bias.grad,
        "transform.dense.weight": theirs.cls.predictions.transform.dense.weight.grad,
        "layers.1.mlp.fc1.weight": theirs.bert.encoder.layer[1].intermediate.dense.weight.grad,
        "layers.0.attention_norm.weight": theirs.bert.encoder.layer[0].attention.output.LayerNorm.weight.grad,
        "layers.0.attention.qkv.weight": torch.cat(
            [
                getattr(theirs.bert.encoder.layer[0].attention.self, each).weight.grad
                for each in ("query", "key", "value")
            ]
        ),
    }
    if name == "BertForPreTraining":
        gradients["sentence.pooler.weight"] = theirs.bert.pooler.dense.weight.grad
        gradients["sentence.classifier.bias"] = theirs.cls.seq_relationship.bias.grad
    here = dict(ours.named_parameters())
    for key, exact in gradients.items():
        grad = here[key].grad
        assert grad is not None
        assert (grad[: len(exact)] - exact).abs().max() <= 1e-5 * exact.abs().max(), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_a_round_trip_keeps_every_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = random_bert(name, hidden_act="gelu_new", type_vocab_size=3).to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    found = getattr(transformers, name).from_pretrained(tmp_path / "back", dtype="auto").state_dict()
    assert found.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert found[key].dtype == dtype and torch.equal(found[key], tensor), key
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    assert compare_logits(tmp_path / "back").startswith("proved: logits of")
