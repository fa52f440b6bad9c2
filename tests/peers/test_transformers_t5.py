"""Tests of T5 against transformers: losses, gradients, and every bit of a round trip. Run by `make test-peers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import to_hf, to_ours
from safetensors.torch import load_file, save_file

from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.data.chat.dataset import open_chats
from megatronish.data.chat.setup import ChatSetup, SideLimits
from megatronish.data.sample import DatasetSettings, DatasetSource
from megatronish.data.spans import SideRows, side_by_side
from megatronish.data.text_pairs import TextPairCollator
from megatronish.formats.prove import compare_logits, our_model
from megatronish.inference.generate import Sampling, generate
from megatronish.inference.load import load_model
from megatronish.model.batch import MicroBatch
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.control_tokens import SpanTokens

pytestmark = pytest.mark.peers("transformers")
transformers: Any = pytest.importorskip(
    "transformers",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
VOCABULARY, SE, SD = 37, 40, 30
SPECIAL = SpanTokens(start=0, end=1, filler=0, sentinels=range(36, 30, -1))
KINDS: dict[str, dict[str, Any]] = {
    "1.0": {"feed_forward_proj": "relu"},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def random_t5(kind: str, **changes: Any) -> Any:
    config = transformers.T5Config(
        **{
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 5,
            "num_heads": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "relative_attention_num_buckets": 12,
            "relative_attention_max_distance": 20,
            "decoder_start_token_id": 0,
        }
        | KINDS[kind]
        | changes
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    model.tie_weights()
    return model


def batch_of() -> MicroBatch:
    """Rows of two sides, of which two end in filler on each side."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(SE, SD), (17, 9), (28, 21)]
    texts = [[torch.randint(2, VOCABULARY, (size,), generator=generator).numpy() for size in row] for row in lengths]
    rows = [SideRows(*row) for row in texts]
    return side_by_side(rows, range(3), special=SPECIAL, encoder_length=SE, decoder_length=SD)


def save_untied(model: Any, folder: Path) -> Any:
    """Save a T5 1.1 as transformers 4 did, with an output layer of its own, and load it again."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(2)) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("scale_decoder_outputs")
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2, sort_keys=True))
    return transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()


def their_loss(theirs: Any, batch: MicroBatch) -> Any:
    assert batch.document_ids is not None
    return theirs(
        input_ids=batch.tokens[:, :SE],
        attention_mask=(batch.document_ids[:, :SE] == 0).long(),
        labels=batch.labels.masked_fill(~batch.loss_mask, -100)[:, SE:].contiguous(),
    ).loss


@pytest.mark.parametrize("kind", [*KINDS, "untied"])
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs, batch = random_t5("1.1" if kind == "untied" else kind), batch_of()
    if kind == "untied":
        theirs = save_untied(theirs, tmp_path / "theirs")
        assert theirs.lm_head.weight is not theirs.shared.weight
    else:
        theirs.save_pretrained(tmp_path / "theirs")
    expected = their_loss(theirs, batch)
    expected.backward()

    ours = our_model(tmp_path / "theirs").model.requires_grad_()
    loss = (ours(None, batch, step=None) * batch.loss_mask.t()).sum() / batch.num_loss_tokens
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    encoder, decoder = theirs.encoder, theirs.decoder
    cross = decoder.block[2].layer[1].EncDecAttention
    exact = {
        "embedding.tokens.weight": theirs.shared.weight.grad,
        "encoder_bias.weight": encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad,
        "decoder_bias.weight": decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad,
        "layers.1.final_norm.weight": encoder.final_layer_norm.weight.grad,
        "final_norm.weight": decoder.final_layer_norm.weight.grad,
        "layers.1.mlp.fc2.weight": encoder.block[1].layer[1].DenseReluDense.wo.weight.grad,
        "layers.4.cross_attention.q.weight": cross.q.weight.grad,
        "layers.4.cross_attention.kv.weight": torch.cat([cross.k.weight.grad, cross.v.weight.grad]),
        "layers.2.attention_norm.weight": decoder.block[0].layer[0].layer_norm.weight.grad,
    }
    if kind == "untied":
        exact["head.weight"] = theirs.lm_head.weight.grad
    here = dict(ours.named_parameters())
    for key, gradient in exact.items():
        grad = here[key].grad
        assert grad is not None
        assert (grad[: len(gradient)] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), key


TEXTS = [("translate: the house", "la maison"), ("sum: 1 2", "3"), ("x" * 30, "y" * 21), ("a long one " * 9, "z" * 40)]
"""Inputs and targets, of which the last ones are longer than a row."""


def pairs_from_a_file(folder: Path, texts: list[tuple[str, str]]) -> MicroBatch:
    """The micro-batch that a run makes of pairs of texts in a file, in bytes, of which 256 ends a row."""
    lines = [json.dumps({"input": asked, "target": told}) for asked, told in texts]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    data = DataConfig(dataset_type="chat", tokenizer_type="bytes")
    setup = ChatSetup.of(ChatConfig(), data, build_tokenizer(data), sides=SideLimits(256, SE, SD))
    settings = DatasetSettings(seq_length=SE + SD, seed=1, vocab_size=300, eod=256, chats=setup)
    found = open_chats(DatasetSource("training", str(folder / "pairs.jsonl")), settings)
    collate = TextPairCollator(SpanTokens(start=0, end=256, filler=0, sentinels=()), SE, SD, 4)
    return collate([found.sample(number) for number in range(len(texts))], range(len(texts)))


def theirs_of(texts: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """What transformers is given of the same texts: ids with their end, a mask of filler, and labels."""
    asked, told = zip(*texts, strict=True)
    ids = [[*text.encode()[: SE - 1], 256] for text in asked]
    labels = [[*text.encode(), 256][:SD] for text in told]
    longest, most = max(map(len, ids)), max(map(len, labels))
    return {
        "input_ids": torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
        "labels": torch.tensor([[*row, *[-100] * (most - len(row))] for row in labels]),
    }


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:2]], ids=["cut", "short"])
def test_pairs_of_texts_have_the_loss_and_gradients_of_transformers(
    tmp_path: Path, texts: list[tuple[str, str]]
) -> None:
    theirs = random_t5("1.0", vocab_size=300, eos_token_id=256)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs(**theirs_of(texts)).loss
    expected.backward()

    batch, ours = pairs_from_a_file(tmp_path, texts), our_model(tmp_path / "theirs").model.requires_grad_()
    loss = (ours(None, batch, step=None) * batch.loss_mask.t()).sum() / batch.num_loss_tokens
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    cross = theirs.decoder.block[0].layer[1].EncDecAttention
    exact = {
        "embedding.tokens.weight": theirs.shared.weight.grad,
        "layers.0.mlp.fc2.weight": theirs.encoder.block[0].layer[1].DenseReluDense.wo.weight.grad,
        "layers.2.cross_attention.kv.weight": torch.cat([cross.k.weight.grad, cross.v.weight.grad]),
        "layers.4.mlp.fc1.weight": theirs.decoder.block[2].layer[2].DenseReluDense.wi.weight.grad,
        "final_norm.weight": theirs.decoder.final_layer_norm.weight.grad,
    }
    here = dict(ours.named_parameters())
    for key, gradient in exact.items():
        grad = here[key].grad
        assert grad is not None
        assert (grad[: len(gradient)] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), key


def test_the_likeliest_text_is_the_same(tmp_path: Path) -> None:
    prompts = [[5, 6, 7, 8, 9, 1], [10, 1], [11, 12, 13, 1], [20, 21, 22, 1]]
    for kind in KINDS:
        # transformers makes a cache of as many layers as the encoder has.
        model, folder = random_t5(kind, num_decoder_layers=2), tmp_path / kind
        model.save_pretrained(folder)
        to_ours(folder, folder / "ours")
        expected = []
        for prompt in prompts:
            found = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
            expected.append([token for token in found[1:] if token != 1])
        texts: list[list[int]] = [[] for _ in prompts]
        greedy = {"sampling": Sampling(temperature=0.0), "stops": {1}, "decoder_start": 0}
        trained = load_model(folder / "ours").model
        for number, token in generate(trained, prompts, num_tokens=12, seq_length=8, batch_size=3, **greedy):
            texts[number] += [] if token is None else [token]
        assert texts == expected and any(texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_every_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = random_t5(kind).to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "back", dtype="auto")
    assert back.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert back.state_dict()[key].dtype == dtype and torch.equal(back.state_dict()[key], tensor), key
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    assert compare_logits(tmp_path / "back").startswith("proved: logits of")
