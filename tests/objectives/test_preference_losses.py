"""Tests of preference losses: each against its formula in plain torch, values and gradients."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.engine.forward import PairPreparation, Scorer
from megatronish.model.batch import CompletionPairs, MicroBatch, StepNumbers
from megatronish.objectives.objective import CausalLM
from megatronish.objectives.pairs import PairObjective, PairScores, counted_once, pair_scores
from megatronish.objectives.preference import CPO, DPO, IPO, KTO, ORPO, SimPO
from megatronish.parallel.mesh import Axis, Mesh

CP = Axis("cp")
P = 5
LENGTHS = torch.tensor([[3, 7], [1, 1], [12, 2], [5, 5], [9, 4]])
TEXTS = LENGTHS + 4
LABELS = torch.tensor([True, False, True, True, False])
NUMBERS = StepNumbers(LENGTHS[:, 0].double().mean().item(), TEXTS[:, 0].double().mean().item(), 0.3)


def scores_of(log_probs: Tensor) -> PairScores:
    """Scores with texts twice as improbable, and a reference."""
    reference = log_probs.detach() - torch.linspace(-0.5, 0.7, 2 * P).view(P, 2)
    pairs = CompletionPairs(torch.empty(0), LENGTHS, TEXTS, LABELS, reference, NUMBERS)
    return PairScores(log_probs, 2 * log_probs, pairs)


def drawn() -> Tensor:
    """[P, 2] log-probabilities of completions; those of the second pair are near to certain."""
    values = -LENGTHS * torch.linspace(0.2, 2.0, 2 * P).view(P, 2)
    values[1] = torch.tensor([-1e-3, -0.7])
    return values.requires_grad_()


def h(scores: PairScores) -> Tensor:
    assert scores.pairs.reference is not None
    ratios = scores.log_probs - scores.pairs.reference
    return ratios[:, 0] - ratios[:, 1]


def nll(scores: PairScores) -> Tensor:
    """Mean loss of all chosen tokens."""
    return -scores.log_probs[:, 0].sum() / LENGTHS[:, 0].sum()


def orpo(scores: PairScores) -> Tensor:
    p = (scores.log_probs.double() / LENGTHS).exp()
    odds = p / (1 - p)
    of_text = -scores.texts[:, 0].sum() / TEXTS[:, 0].sum()
    return of_text - 0.3 * torch.sigmoid((odds[:, 0] / odds[:, 1]).log()).log().mean()


def kto(scores: PairScores) -> Tensor:
    assert scores.pairs.reference is not None
    r = scores.log_probs[:, 0] - scores.pairs.reference[:, 0]
    each = [
        1.5 * (1 - 1 / (1 + torch.exp(-0.4 * (x - 0.3))))
        if label
        else 0.7 * (1 - 1 / (1 + torch.exp(-0.4 * (0.3 - x))))
        for x, label in zip(r, LABELS.tolist(), strict=True)
    ]
    return torch.stack(each).mean()


def ipo(scores: PairScores) -> Tensor:
    assert scores.pairs.reference is not None
    means = (scores.log_probs - scores.pairs.reference) / LENGTHS
    return (means[:, 0] - means[:, 1] - 1 / (2 * 0.4)).square().mean()


def swapped(x: Tensor, e: float) -> Tensor:
    return (-(1 - e) * torch.sigmoid(x).log() - e * torch.sigmoid(-x).log()).mean()


def means(scores: PairScores) -> Tensor:
    of_tokens = scores.log_probs / LENGTHS
    return of_tokens[:, 0] - of_tokens[:, 1]


def difference(scores: PairScores) -> Tensor:
    return scores.log_probs[:, 0] - scores.log_probs[:, 1]


FORMULAS: dict[str, tuple[PairObjective, Callable[[PairScores], Tensor]]] = {
    "dpo": (DPO(beta=0.4), lambda s: -F.logsigmoid(0.4 * h(s)).mean()),
    "dpo, smoothed": (DPO(beta=0.4, label_smoothing=0.1), lambda s: swapped(0.4 * h(s), 0.1)),
    "hinge": (DPO(beta=0.4, dpo_loss_type="hinge"), lambda s: torch.relu(1 - 0.4 * h(s)).mean()),
    "robust": (
        DPO(beta=0.4, dpo_loss_type="robust", label_smoothing=0.1),
        lambda s: (0.9 * -F.logsigmoid(0.4 * h(s)) + 0.1 * F.logsigmoid(-0.4 * h(s))).mean() / 0.8,
    ),
    "ipo": (IPO(beta=0.4), ipo),
    "dpo, ipo": (DPO(beta=0.4, dpo_loss_type="ipo"), ipo),
    "simpo": (SimPO(beta=2.0, simpo_gamma=0.7), lambda s: swapped(2.0 * means(s) - 0.7, 0.0)),
    "simpo with nll": (SimPO(beta=2.0, cpo_alpha=0.5), lambda s: swapped(2.0 * means(s) - 0.5, 0.0) + 0.5 * nll(s)),
    "cpo": (CPO(beta=0.4, label_smoothing=0.1), lambda s: swapped(0.4 * difference(s), 0.1) + nll(s)),
    "cpo without nll": (CPO(beta=0.4, cpo_alpha=0.0), lambda s: swapped(0.4 * difference(s), 0.0)),
    "orpo": (ORPO(beta=0.3), orpo),
    "kto": (KTO(beta=0.4, desirable_weight=1.5, undesirable_weight=0.7), kto),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_and_its_gradient_are_those_of_its_formula(name: str) -> None:
    objective, formula = FORMULAS[name]
    mine, plain = drawn(), drawn()
    sums = objective.sums_of_pairs(scores_of(mine))
    assert tuple(sums) == objective.names
    loss, expected = sums["loss"] / P, formula(scores_of(plain))
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert mine.grad is not None and mine.grad.isfinite().all()
    torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-5, atol=1e-6)


def test_odds_of_the_certain_and_of_the_impossible_have_finite_gradients() -> None:
    log_probs = torch.tensor([[-1e-6, -80.0]] * P, requires_grad=True)
    loss = ORPO(beta=0.3).sums_of_pairs(scores_of(log_probs))["loss"]
    loss.backward()
    assert math.isfinite(loss.item()) and log_probs.grad is not None and log_probs.grad.isfinite().all()


def test_what_is_reported_is_rewards_and_log_probabilities() -> None:
    found = {name: value.item() / P for name, value in DPO(beta=0.4).sums_of_pairs(scores_of(drawn())).items()}
    ratios, log_probs = torch.linspace(-0.5, 0.7, 2 * P).view(P, 2), drawn().detach()
    assert found["rewards/chosen"] == pytest.approx(0.4 * ratios[:, 0].mean().item(), abs=1e-5)
    assert found["rewards/margins"] == pytest.approx(0.4 * (ratios[:, 0] - ratios[:, 1]).mean().item(), abs=1e-5)
    assert found["rewards/accuracies"] == 0.0
    assert found["logps/rejected"] == pytest.approx(log_probs[:, 1].mean().item(), rel=1e-5)


def test_completions_as_probable_as_in_the_reference_are_tied_whatever_rounding_says() -> None:
    log_probs = drawn().detach()
    noise = 1 + 2e-7 * torch.tensor([[1, -1], [-1, 1], [0, 0], [1, 1], [2, -2]])
    pairs = CompletionPairs(torch.empty(0), LENGTHS, TEXTS, LABELS, log_probs * noise, NUMBERS)
    for objective in (DPO(beta=0.4), IPO(beta=0.4)):
        sums = objective.sums_of_pairs(PairScores(log_probs, 2 * log_probs, pairs))
        assert sums["rewards/accuracies"].item() == P / 2
    away = replace(pairs, reference=log_probs - torch.tensor([[1e-2, 0.0]] * 2 + [[0.0, 1e-2]] + [[0.0, 0.0]] * 2))
    assert DPO(beta=0.4).sums_of_pairs(PairScores(log_probs, log_probs, away))["rewards/accuracies"].item() == 3.0
    alike = torch.full((P, 2), -3.0)
    same = CompletionPairs(torch.empty(0), LENGTHS[:, :1].expand(P, 2), TEXTS, LABELS, None, NUMBERS)
    assert SimPO(beta=2.0).sums_of_pairs(PairScores(alike, alike, same))["rewards/accuracies"].item() == P / 2


@pytest.mark.parametrize(("moved", "kl"), [(-0.75, 0.0), (0.75, 0.75)])
def test_the_point_of_comparison_of_kto_is_a_mean_log_ratio_and_not_below_zero(moved: float, kl: float) -> None:
    pairs = CompletionPairs(torch.empty(0), LENGTHS, TEXTS, LABELS, torch.zeros(P, 2))
    places = torch.arange(4).expand(P, 4)
    batch = MicroBatch(places, places, places > 0, places, torch.arange(P)).with_pairs(pairs)
    reference = torch.linspace(-9.0, -1.0, 2 * P).view(P, 2)
    mesh = cast(Mesh, SimpleNamespace(device=torch.device("cpu"), dp=Axis("dp")))
    policy = cast(Scorer, lambda batches: [reference + moved + torch.tensor([[3.0, 0.0]]) for _ in batches])
    prepare = PairPreparation(mesh, policy, lambda batches: [reference for _ in batches], needs_kl=True)
    for prepared in prepare([batch, batch]):
        assert prepared.pairs is not None and prepared.pairs.of_step.kl == pytest.approx(kl)


def test_kto_reports_means_of_the_wanted_and_of_the_unwanted() -> None:
    objective = KTO(beta=0.4)
    sums = objective.sums_of_pairs(scores_of(drawn()))
    found = objective.reported({name: value.item() / P for name, value in sums.items()})
    log_probs = drawn().detach()[:, 0]
    assert found["logps/chosen"] == pytest.approx(log_probs[LABELS].mean().item(), rel=1e-5)
    assert found["logps/rejected"] == pytest.approx(log_probs[~LABELS].mean().item(), rel=1e-5)
    assert found["kl"] == pytest.approx(0.3)
    assert found["rewards/margins"] == pytest.approx(found["rewards/chosen"] - found["rewards/rejected"])


def test_log_probabilities_of_completions_leave_prompts_and_padding_out() -> None:
    of_labels = torch.tensor([[0, 0, 0, 4, 1, 1], [2, 2, 4, 3, 3, 4]])
    mask = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 1, 0, 0, 1, 0]], dtype=torch.bool)
    pairs = CompletionPairs(of_labels, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, dtype=torch.bool))
    places = torch.arange(6).expand(2, 6)
    batch = MicroBatch(places, places, mask, places, torch.arange(2)).with_pairs(pairs)
    losses = torch.arange(12.0).view(2, 6).t()
    scores = pair_scores(losses, batch, CP)
    assert scores.log_probs.tolist() == [[-3.0, -5.0], [-13.0, -10.0]]
    assert scores.texts.tolist() == [[-3.0, -9.0], [-13.0, -19.0]]


def test_a_sum_that_several_ranks_hold_counts_on_the_first_and_has_its_gradient_on_all() -> None:
    x: Any = torch.tensor(3.0, requires_grad=True)
    second = Axis("cp", size=2, rank=1)
    counted = counted_once({"loss": x * x}, second)["loss"]
    counted.backward()
    assert (counted.item(), x.grad.item()) == (0.0, 6.0)


def test_losses_of_tokens_are_no_losses_of_pairs() -> None:
    assert not isinstance(CausalLM(), PairObjective)
    assert isinstance(KTO(beta=0.1), PairObjective)
