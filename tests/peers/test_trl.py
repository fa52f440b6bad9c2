"""Preference objectives against TRL: the loss, the gradients and what is reported, of the same weights and tokens."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conversions import to_ours
from torch import Tensor, nn

from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.data.loader import Collator
from megatronish.data.sample import Sample
from megatronish.inference.load import load_model
from megatronish.model.batch import MicroBatch, StepNumbers
from megatronish.model.gpt import GPT
from megatronish.objectives.objective import metrics_of
from megatronish.objectives.pairs import PairObjective, PairScores, pair_scores
from megatronish.objectives.table import OBJECTIVES
from megatronish.parallel.mesh import Axis

pytestmark = pytest.mark.peers("trl")
peer: Any = pytest.importorskip(
    "random_models",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
trl: Any = pytest.importorskip("trl", reason="TRL is not installed here; see `make test-peers`", exc_type=ImportError)

PAIRS = 4
S = 28
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"beta": 0.3}),
    "hinge": ("dpo", {"beta": 0.3, "dpo_loss_type": "hinge"}),
    "robust": ("dpo", {"beta": 0.3, "dpo_loss_type": "robust", "label_smoothing": 0.2}),
    "dpo, ipo": ("dpo", {"beta": 0.3, "dpo_loss_type": "ipo"}),
    "ipo": ("ipo", {"beta": 0.3}),
    "simpo": ("simpo", {"beta": 2.0, "simpo_gamma": 0.7}),
    "simpo with nll": ("simpo", {"beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.5, "label_smoothing": 0.1}),
    "cpo": ("cpo", {"beta": 0.3}),
    "cpo, smoothed": ("cpo", {"beta": 0.3, "label_smoothing": 0.1, "cpo_alpha": 0.4}),
    "orpo": ("orpo", {"beta": 0.3}),
    "kto": ("kto", {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}),
}


class Text:
    """A prompt and a completion as tokens."""

    def __init__(self, prompt: list[int], completion: list[int]) -> None:
        self.tokens, self.mask = prompt + completion, [0] * len(prompt) + [1] * len(completion)


def pairs() -> list[tuple[Text, Text]]:
    """Completions of different lengths, two of each prompt."""
    stream = np.random.default_rng(3)

    def drawn(size: int) -> list[int]:
        return stream.integers(3, peer.VOCABULARY, size).tolist()

    found = []
    for a, b, c in ((3, 5, 2), (1, 9, 4), (6, 3, 8), (4, 1, 7)):
        prompt = drawn(a)
        found.append((Text(prompt, drawn(b)), Text(prompt, drawn(c))))
    return found


LABELS = [True, False, False, True]


# ours


def batch_of(texts: Sequence[tuple[Text, Text]]) -> MicroBatch:
    """Pairs in rows, two pairs in the first row."""
    samples = []
    for row in ([0, 1], [2], [3]):
        both = [text for number in row for text in texts[number]]
        sizes = [len(text.tokens) for text in both]
        left = S + 1 - sum(sizes)
        samples.append(
            Sample(
                np.array([*(token for text in both for token in text.tokens), *[0] * left]),
                np.array([*(bool(each) for text in both for each in text.mask), *[False] * left]),
                np.repeat(np.arange(len(sizes) + 1), [*sizes, left]),
                pair_labels=np.array([LABELS[number] for number in row]),
            )
        )
    return Collator(None)(samples, range(3))


def scores_of(model: GPT, batch: MicroBatch) -> PairScores:
    return pair_scores(model(None, batch, step=None), batch, Axis("cp"))


def ours(name: str, folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of one step."""
    objective_name, numbers = CASES[name]
    objective = OBJECTIVES[objective_name](**numbers)
    assert isinstance(objective, PairObjective)
    model, reference = (load_model(folder / each).model for each in ("ours", "reference"))
    batch = batch_of(pairs())
    assert batch.pairs is not None
    with torch.no_grad():
        q, p = scores_of(reference, batch).log_probs, scores_of(model, batch).log_probs
    lengths = [each[:, 0].double().mean().item() for each in (batch.pairs.lengths, batch.pairs.text_lengths)]
    kl = max((p - q)[:, 1].mean().item(), 0.0)
    needed = {"reference": q} if OBJECTIVE_NAMES[objective_name].has_reference else {}
    batch = batch.with_pairs(replace(batch.pairs, of_step=StepNumbers(lengths[0], lengths[1], kl), **needed))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    sums = objective.sums_of_pairs(scores_of(model, batch))
    (sums["loss"] / objective.weight(batch)).backward()
    metrics = metrics_of(objective, {key: value.item() for key, value in sums.items()}, weight=PAIRS)
    return metrics, {key: each.grad for key, each in model.named_parameters() if each.grad is not None}


# TRL's


def padded(texts: Sequence[Text], *, prefix: str = "") -> dict[str, Tensor]:
    size = max(len(text.tokens) for text in texts)
    rows = [size - len(text.tokens) for text in texts]
    return {
        f"{prefix}input_ids": torch.tensor([text.tokens + [0] * n for text, n in zip(texts, rows, strict=True)]),
        f"{prefix}attention_mask": torch.tensor([[1] * (size - n) + [0] * n for n in rows]),
        f"{prefix}completion_mask": torch.tensor([text.mask + [0] * n for text, n in zip(texts, rows, strict=True)]),
    }


def trainer_of(kind: type[Any], model: Any, reference: Any, **settings: Any) -> Any:
    """TRL's trainer with what its loss reads, without a data set and a loop."""
    found = kind.__new__(kind)
    gather = {"gather": lambda x: x, "gather_for_metrics": lambda x: x}
    for name, value in {
        "accelerator": SimpleNamespace(device=torch.device("cpu"), unwrap_model=lambda x: x, **gather),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "model": model,
        "ref_model": reference,
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "is_encoder_decoder": False,
        "pad_token_id": 0,
        "padding_value": 0,
        **settings,
    }.items():
        setattr(found, name, value)
    return found


def fused(model: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model


def dpo(kind: str, numbers: dict[str, Any], model: Any, reference: Any) -> tuple[Tensor, dict[str, float]]:
    trainer = trainer_of(
        trl.DPOTrainer,
        fused(model),
        fused(reference),
        beta=numbers["beta"],
        label_smoothing=numbers.get("label_smoothing", 0.0),
        loss_types=[kind],
        loss_weights=[1.0],
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
    )
    both = [*(first for first, _ in pairs()), *(second for _, second in pairs())]
    loss = trainer._compute_loss(model, padded(both), False)
    return loss, {name: values[-1] for name, values in trainer._metrics["eval"].items()}


def kto(numbers: dict[str, Any], model: Any, reference: Any) -> tuple[Tensor, dict[str, float]]:
    trainer = trainer_of(trl.KTOTrainer, fused(model), fused(reference), calculate_KL=True, loss_type="kto", **numbers)
    first, second = ([pair[half] for pair in pairs()] for half in (0, 1))
    inputs = {**padded(first), **padded(second, prefix="KL_"), "label": torch.tensor(LABELS)}
    loss = trainer._compute_loss(model, inputs, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["eval"].items()}


def without_reference(name: str, numbers: dict[str, Any], model: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    alpha = {"simpo": 0.0, "cpo": 1.0, "orpo": 0.0}[name]
    settings = {"cpo_alpha": alpha, "alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.5, **numbers}
    loss_type = "simpo" if name == "simpo" else "sigmoid"
    trainer = trainer_of(ORPOTrainer if name == "orpo" else CPOTrainer, model, None, loss_type=loss_type, **settings)
    inputs: dict[str, Tensor] = {}
    for half, prefix in enumerate(("chosen_", "rejected_")):
        inputs |= padded([pair[half] for pair in pairs()], prefix=prefix)
        mask = inputs.pop(f"{prefix}completion_mask")
        inputs[f"{prefix}labels"] = inputs[f"{prefix}input_ids"].masked_fill(mask == 0, -100)
    loss, metrics = trainer.get_batch_loss_metrics(model, inputs)
    return loss, {key: float(value) for key, value in metrics.items()}


def theirs(name: str, model: Any, reference: Any) -> tuple[Tensor, dict[str, float]]:
    kind, numbers = CASES[name]
    if kind in ("dpo", "ipo"):
        return dpo("ipo" if kind == "ipo" else numbers.get("dpo_loss_type", "sigmoid"), numbers, model, reference)
    return kto(numbers, model, reference) if kind == "kto" else without_reference(kind, numbers, model)


NAMES = {
    "model.embed_tokens.weight": "embedding.tokens.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
    **{
        f"model.layers.{layer}.{theirs}.weight": f"layers.{layer}.{ours}.weight"
        for layer in (0, 1)
        for theirs, ours in (("self_attn.o_proj", "attention.out"), ("mlp.down_proj", "mlp.fc2"))
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its reference, in our format."""
    found = tmp_path_factory.mktemp("models")
    for name, model in zip(("ours", "reference"), models(), strict=True):
        model.save_pretrained(found / f"hf_{name}")
        to_ours(found / f"hf_{name}", found / name)
    return found


def models() -> tuple[Any, Any]:
    """A model of random weights, and one that is near to it."""
    model, reference = peer.random_model("llama"), peer.random_model("llama")
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model, reference


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_reports_are_those_of_trl(name: str, folder: Path) -> None:
    model, reference = models()
    assert isinstance(model, nn.Module)
    loss, reported = theirs(name, model, reference)
    loss.backward()
    metrics, gradients = ours(name, folder)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    of_tokens = {"logps/chosen", "logps/rejected"} if name.startswith(("simpo", "orpo")) else set()  # TRL's are means
    for key in (set(metrics) & set(reported)) - of_tokens:
        assert metrics[key] == pytest.approx(reported[key], rel=1e-5, abs=1e-5), key
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"} <= set(metrics) & set(reported)
    for their_name, expected in ((each, dict(model.named_parameters())[each].grad) for each in NAMES):
        found = gradients[NAMES[their_name]][: len(expected)]
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), their_name
