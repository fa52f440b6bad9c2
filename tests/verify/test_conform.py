"""Tests of `megatronish conform`: right dumps of another trainer, and ones with mistakes that the field has made."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatronish.commands.main import run
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats import safetensors
from megatronish.formats.convert import FORMATS
from megatronish.formats.prove import build_model
from megatronish.formats.weights import Description, LazyTensor, Model, from_ours
from megatronish.model.batch import MicroBatch
from megatronish.verify.conform import LOSSES, batch_of, serial_gradients

VOCAB_SIZE, SEQ_LENGTH = 32, 8
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=32,
    kv_channels=4,
    max_position_embeddings=SEQ_LENGTH,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
BIASED = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=4,
    ffn_hidden_size=64,
    kv_channels=4,
    max_position_embeddings=SEQ_LENGTH,
    openai_gelu=True,
)
OPT = replace(BIASED, openai_gelu=False, relu=True, position_offset=2)
EXPERTS = replace(LLAMA, num_experts=4, moe_ffn_hidden_size=32)
MODELS = {"llama": LLAMA, "gpt2": BIASED, "mixtral": EXPERTS}


def lazy(tensors: dict[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: LazyTensor(tuple(each.shape), each.dtype, each.clone) for name, each in tensors.items()}


class Trainer:
    """Another trainer: its weights in a Hugging Face folder, and the dump of a step in which mistakes can be made."""

    def __init__(self, folder: Path, model: ModelConfig, *, loss_of: str = "predictions") -> None:
        self.weights, self.dump = folder / "weights", folder / "dump"
        description = Description(model, VOCAB_SIZE, SEQ_LENGTH)
        torch.manual_seed(1)
        weights = {name: torch.randn(each.shape) * 0.3 for name, each in description.shardings().items()}
        rules = FORMATS["hf"].rules(description)
        FORMATS["hf"].write(self.weights, Model(description, from_ours(lazy(weights), rules).tensors))
        tokens = torch.randint(VOCAB_SIZE // 2, (3, SEQ_LENGTH))
        labels = torch.randint(VOCAB_SIZE, (3, SEQ_LENGTH))
        mask = torch.ones_like(labels)
        mask[0, 3:] = 0
        self.rows = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        positions = torch.arange(SEQ_LENGTH).expand_as(tokens).contiguous()
        batch = MicroBatch(tokens, labels, mask.bool(), positions, torch.arange(3))
        built = build_model(description, lazy(weights), source=self.weights)
        made = serial_gradients(built, batch, LOSSES[loss_of])
        self.loss = made.loss
        self.gradients = {
            name: each.read() for name, each in from_ours(made.by_name(description), rules).tensors.items()
        }

    def write(self) -> None:
        (self.dump / "gradients").mkdir(parents=True)
        safetensors.write_file(self.dump / "batch.safetensors", lazy(self.rows))
        safetensors.write_file(self.dump / "gradients" / "model.safetensors", lazy(self.gradients))
        (self.dump / "gradients" / "config.json").write_text((self.weights / "config.json").read_text())
        (self.dump / "dump.json").write_text(json.dumps({"loss": self.loss, "trainer": "other 1.0", "layout": "tp 2"}))

    def scale(self, pattern: str, factor: float) -> None:
        names = [name for name in self.gradients if re.search(pattern, name)]
        assert names
        for name in names:
            self.gradients[name] = self.gradients[name] * factor


def conform(trainer: Trainer, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    trainer.write()
    status = run(["conform", str(trainer.dump), "--load", str(trainer.weights), *flags])
    streams = capsys.readouterr()
    return status, streams.out + streams.err


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_same_step_agree(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = conform(Trainer(tmp_path, MODELS[name]), capsys, "--tolerance", "1e-5")
    assert status == 0, said
    assert "gradients agree: at most" in said and "(other 1.0, tp 2)" in said


def test_a_gradient_that_is_rounding_alone_is_compared_with_the_largest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without RoPE the bias of keys changes no softmax: its gradient is 0, and what each trainer has is rounding."""
    name, at_most = "model.decoder.layers.1.self_attn.k_proj.bias", ("--tolerance", "1e-5")
    trainer = Trainer(tmp_path / "a", OPT)
    assert float(trainer.gradients[name].norm()) < 1e-7
    trainer.gradients[name] = trainer.gradients[name].flip(0)
    status, said = conform(trainer, capsys, *at_most)
    assert status == 0, said
    trainer = Trainer(tmp_path / "b", OPT)
    trainer.gradients[name] += 0.01
    status, said = conform(trainer, capsys, *at_most)
    assert status == 1 and f"the first is {name}" in said


def lost_heads(trainer: Trainer) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    trainer.gradients[name][8:] *= 0.5


def lost_row(trainer: Trainer) -> None:
    """Only what the embedding adds to a tied table: rows of tokens that are in the batch."""
    grad = trainer.gradients["transformer.wte.weight"]
    grad[trainer.rows["tokens"].unique()] *= 0.5


def padding_row(trainer: Trainer) -> None:
    trainer.gradients["model.embed_tokens.weight"][trainer.rows["tokens"][0, 0]] = 0.0


def lost_head(trainer: Trainer) -> None:
    trainer.scale("wte", 0.5)


def other_pairs(trainer: Trainer) -> None:
    for name, grad in trainer.gradients.items():
        if "q_proj" in name or "k_proj" in name:
            trainer.gradients[name] = grad.unflatten(0, (-1, 2, 2)).transpose(1, 2).flatten(0, 2)


def upstream(trainer: Trainer) -> None:
    """What flows down from layer 1 is wrong."""
    torch.manual_seed(2)
    for name, grad in trainer.gradients.items():
        if "layers.0" in name or "embed" in name:
            trainer.gradients[name] = grad * (1 + 0.1 * torch.randn_like(grad))


def scaled(pattern: str, factor: float) -> Callable[[Trainer], None]:
    return lambda trainer: trainer.scale(pattern, factor)


def endless(trainer: Trainer) -> None:
    trainer.gradients["lm_head.weight"][0, 0] = torch.nan


def other_loss(trainer: Trainer) -> None:
    trainer.loss *= 1.5
    other_pairs(trainer)


def scaled_with_loss(trainer: Trainer) -> None:
    trainer.loss *= 1 / 3
    trainer.scale("", 1 / 3)


NORMS = r"norm\.weight"
MISTAKES: tuple[tuple[str, Callable[[Trainer], None], str, str], ...] = (
    ("llama", endless, "lm_head.weight", "is not finite"),
    ("llama", scaled_with_loss, "lm_head.weight", "one over the number of samples"),
    ("llama", other_loss, "layers.1.self_attn.q_proj", "so the forward differs before any gradient"),
    ("llama", scaled("", 0.25), "lm_head.weight", "all gradients are 0.25 times ours"),
    ("llama", scaled("layers.0.mlp.up_proj", 0.0), "layers.0.mlp.up_proj", "no gradient came to 1 tensors"),
    ("llama", scaled(NORMS, 0.5), "model.norm.weight", "are not summed over tp"),
    ("gpt2", scaled(r"c_proj\.bias", 2.0), "h.1.mlp.c_proj.bias", "each of 2 tp ranks adds the bias"),
    ("llama", padding_row, "embed_tokens", "gives its padding_idx (pad_token_id) no gradient"),
    ("gpt2", lost_row, "wte", "the part of the embedding is missing"),
    ("gpt2", lost_head, "wte", "the part of the output layer is wrong"),
    ("mixtral", scaled(r"\.gate\.weight", 1.3), "gate.weight", "only routers differ"),
    ("mixtral", scaled(r"\.experts\.", 2.0), "experts", "only experts differ, 2 times ours"),
    ("llama", scaled("[kv]_proj", 0.7), "self_attn.k_proj", "only keys and values differ"),
    ("llama", lost_heads, "layers.1.self_attn.q_proj", "rows 8 to 15 of 16 of model.layers.1.self_attn.q_proj"),
    ("llama", other_pairs, "layers.1.self_attn.q_proj", "ours in another order"),
    ("llama", upstream, "layers.0", "what the backward sends down from there is wrong"),
)


@pytest.mark.parametrize(("name", "mistake", "first", "trap"), MISTAKES, ids=[each[3] for each in MISTAKES])
def test_the_first_gradient_that_differs_is_named_with_the_likely_trap(
    name: str,
    mistake: Callable[[Trainer], None],
    first: str,
    trap: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer(tmp_path, MODELS[name])
    mistake(trainer)
    status, said = conform(trainer, capsys)
    assert status == 1
    assert first in re.findall(r"the first is (\S+)", said)[0], said
    assert trap in said.splitlines()[-1], said


def test_means_of_samples_are_named_and_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(tmp_path, LLAMA, loss_of="samples")
    status, said = conform(trainer, capsys)
    assert status == 1 and "--loss-of samples" in said
    assert run(["conform", str(trainer.dump), "--load", str(trainer.weights), "--loss-of", "samples"]) == 0


def test_labels_are_the_next_tokens_where_none_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(tmp_path, LLAMA)
    trainer.rows = {"tokens": trainer.rows["tokens"]}
    status, said = conform(trainer, capsys)
    assert status == 1 and "so the forward differs" in said  # the dump is of other labels


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda trainer: trainer.rows.pop("tokens"), "must hold `tokens`"),
        (lambda trainer: trainer.rows.update(masks=trainer.rows["tokens"]), "holds masks"),
        (lambda trainer: trainer.rows.update(labels=trainer.rows["labels"][:2].clone()), "holds labels [2, 8]"),
        (lambda trainer: trainer.rows["loss_mask"].zero_(), "predicts nothing"),
        (lambda trainer: trainer.rows.update(tokens=torch.zeros(2, 0, dtype=torch.int64)), "holds labels [3, 8]"),
        (lambda trainer: trainer.rows.update(loss_mask=torch.full((3, 8), 0.5)), "other numbers than 0 and 1"),
        (lambda trainer: trainer.rows.update(labels=torch.full((3, 8), 0.5)), "labels of type torch.float32"),
        (lambda trainer: trainer.rows.update(position_ids=torch.full((3, 8), -1)), "holds positions -1 to -1"),
        (lambda trainer: setattr(trainer, "loss", math.nan), "loss is nan and must be a number"),
        (lambda trainer: trainer.rows["tokens"].fill_(32), "the batch holds token 32; the model knows 0 to 31"),
        (lambda trainer: trainer.gradients.pop("lm_head.weight"), "lm_head.weight"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    change: Callable[[Trainer], None], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tmp_path, LLAMA)
    change(trainer)
    status, said = conform(trainer, capsys)
    assert status == 2 and sentence in said, said


def test_tokens_after_the_last_learned_position_are_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tmp_path, BIASED)
    trainer.rows = {"tokens": torch.zeros((1, 99), dtype=torch.int64)}
    status, said = conform(trainer, capsys)
    assert status == 2 and f"holds positions 0 to 98; the model knows 0 to {SEQ_LENGTH - 1}" in said, said


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "cannot be read"), ("", "must hold an object"), ("[]", "must hold")]
)
def test_a_dump_that_says_nothing_of_itself_is_a_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tmp_path, LLAMA)
    trainer.write()
    (trainer.dump / "dump.json").write_text(text)
    assert run(["conform", str(trainer.dump), "--load", str(trainer.weights)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_batch_without_tokens_predicts_nothing() -> None:
    with pytest.raises(UserError, match="predicts nothing"):
        batch_of({"tokens": torch.zeros((2, 0), dtype=torch.int64)}, Path("batch"))


def test_a_folder_without_a_dump_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["conform", str(tmp_path), "--load", str(tmp_path)]) == 2
    assert "is not a dump of gradients" in capsys.readouterr().err
