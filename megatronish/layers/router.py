"""Router of a mixture of experts: the experts that each token chooses, their weights, and what balances the load.

Logits, scores and the choice are in fp32 whatever the model's precision: in bf16 one token in 25 has a tie at its last
place (64 experts, 8 chosen). Scores follow the field's formulas:

    softmax, after the choice     w = softmax of the K chosen logits                      (Mixtral, gpt-oss)
    softmax, before the choice    w = the K chosen of softmax(logits)                     (OLMoE, Qwen2-MoE)
    sigmoid                      s = sigmoid(logits), chosen by s + bias, w = s / sum s (DeepSeek-V3, arXiv:2412.19437)
    sparsemixer                  w_k = that of k in a softmax of its rivals' logits      (Phi-3.5-MoE, arXiv:2409.12136)

SparseMixer takes one expert after the other. The rivals of expert k, of logit m, are itself and those that are neither
chosen before it nor far below it: m - logit <= 2 eps max(|logit|, m). Its paper chooses at random in training, by a
Gumbel distribution, and corrects the gradient for that; here training computes what evaluation does, whose gradient is
that of the formula, and the rivals are given.

With groups, the experts of a token come from the `group_topk` groups whose `scores_per_group` best scores add up to
most; with a softmax after the choice, whose logits do, as in Megatron-LM. It has K / group_topk, DeepSeek-V3 two of
them, DeepSeek-V2 the best alone.

Every number that balances the load is a sum over tokens or sequences, divided by a count that is known before the step,
so no layout changes it (the field's per-micro-batch and per-rank means are changed by it):

    sequence loss   coefficient / (samples of the step) * sum over sequences of sum_i f_i P_i,
                    f_i = E / (K S) * choices of expert i, P_i = 1 / S * sum of its normalised scores (eq. 17 there)
    z-loss          coefficient / (tokens of the step) * sum of logsumexp(logits)^2         (ST-MoE, arXiv:2202.08906)
    bias            after the step, bias_i += rate * sign(mean choices - choices of i)      (arXiv:2408.15664)
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.parallel.sharding import Init, Sharding

ScoreFunction = Literal["softmax", "sigmoid", "sparsemixer"]


class RouterSettings(NamedTuple):
    """How a router scores and chooses; the same for all layers of a model."""

    num_experts: int
    num_chosen: int
    score_function: ScoreFunction = "softmax"
    before_choice: bool = False
    """Softmax over all experts before the choice instead of over the chosen ones."""
    normalised: bool = False
    """With `before_choice`: the chosen weights are divided by their sum."""
    num_groups: int | None = None
    group_topk: int | None = None
    scores_per_group: int | None = None
    scaling_factor: float = 1.0
    has_bias: bool = False
    """A bias that the choices of each step move towards balance."""
    logit_bias: bool = False
    """A bias of the logits, which learns as any other (gpt-oss)."""
    bias_rate: float = 1e-3
    rival_epsilon: float = 0.01
    """Of sparsemixer: rivals of an expert are at most twice this below it, relative to the larger logit."""
    counts_before: bool = False
    """The global-batch loss: scores are weighed by the choices of the step before."""


class Balance(NamedTuple):
    """Factors of the balancing losses in a step: of each sequence's loss, and of each token's z-loss.

    `gradient` is the loss scale over the number of sequences of the step: the gradient of a loss per sequence.
    `pads` says that rows may be sent as a `RowRoom` has it: not in a step that is computed again for lack of room.
    """

    gradient: float
    seq_length: int
    sequence_coefficient: float = 0.0
    global_coefficient: float = 0.0
    z_coefficient: float = 0.0
    pads: bool = True


class Routing(NamedTuple):
    """Choices of T tokens: `choices` [T, K] int64, their `weights` [T, K] fp32, and what balancing reads.

    `logits` [T, E] and `scores` [T, E] (which sum to 1 for each token) are fp32 with their graph.
    """

    choices: Tensor
    weights: Tensor
    logits: Tensor
    scores: Tensor


class Router(nn.Module):
    """Router of one layer: a matrix [E, D], perhaps with a bias, whose product with each token scores the experts.

    Each tp rank routes tokens of its own, so the gradient is partial over tp (`partial_over`). `state` are fp32 tensors
    [E] that no gradient changes and every checkpoint holds: "bias", which is added for the choice alone, and "load",
    the choices of the step before. They are no buffers, which the precision of the model would round.
    """

    def __init__(self, hidden_size: int, settings: RouterSettings, *, init_std: float) -> None:
        super().__init__()
        self.settings, self.hidden_size, self.init_std = settings, hidden_size, init_std
        self.weight = nn.Parameter(torch.empty(settings.num_experts, hidden_size))
        self.logit_bias = nn.Parameter(torch.empty(settings.num_experts)) if settings.logit_bias else None
        names = [*(["bias"] if settings.has_bias else []), *(["load"] if settings.counts_before else [])]
        with torch.device("cpu"):  # a model may be built on another device, "meta" included
            self.state = {name: torch.zeros(settings.num_experts) for name in names}

    def shardings(self) -> dict[str, Sharding]:
        """Whole on every rank; each rank of tp sees a part of the tokens."""
        shape, over = (self.settings.num_experts, self.hidden_size), frozenset({"tp"})
        shardings = {"weight": Sharding(shape, partial_over=over, role="router", init=Init(self.init_std))}
        if self.logit_bias is not None:
            shardings["logit_bias"] = Sharding(shape[:1], partial_over=over)
        return shardings

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Routing:
        """[T, D] -> the routing of T tokens; `chosen` [T, K] replays the choices of an earlier forward."""
        settings = self.settings
        logits = self.logits(x)
        scores = self.scores(logits)
        if chosen is None:
            chosen = self.choose(self.compared(logits).detach())
        if settings.score_function == "sigmoid":
            weights = scores.gather(1, chosen)
            if settings.num_chosen > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        elif settings.score_function == "sparsemixer":
            weights = _mixed(logits, chosen, settings.rival_epsilon)
        elif settings.before_choice:
            weights = scores.gather(1, chosen)
            if settings.normalised:
                weights = weights / weights.sum(-1, keepdim=True)
        else:
            weights = logits.gather(1, chosen).softmax(-1)
        return Routing(chosen, weights * settings.scaling_factor, logits, scores)

    def logits(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, E], in fp32."""
        bias = None if self.logit_bias is None else self.logit_bias.float()
        return F.linear(x.float(), self.weight.float(), bias)

    def scores(self, logits: Tensor) -> Tensor:
        """[T, E] -> [T, E]: scores of the experts; those of the softmax sum to 1 for each token."""
        return logits.sigmoid() if self.settings.score_function == "sigmoid" else logits.softmax(-1)

    def compared(self, logits: Tensor) -> Tensor:
        """[T, E] -> [T, E]: what the choice compares, of experts and of groups: scores with the bias added.

        A softmax that comes after the choice leaves it logits, and so does sparsemixer.
        """
        after_choice = self.settings.score_function != "sigmoid" and not self.settings.before_choice
        scores = logits if after_choice else self.scores(logits)
        return scores + self.on_device("bias", scores.device) if "bias" in self.state else scores

    def choose(self, scores: Tensor) -> Tensor:
        """[T, E] as `compared` -> [T, K]: the experts with the highest, in falling order."""
        settings = self.settings
        if settings.num_groups is not None and settings.group_topk is not None:
            scores = scores.masked_fill(~_in_best_groups(scores, settings), -torch.inf)
        return scores.topk(settings.num_chosen, dim=-1).indices

    def margins(self, scores: Tensor) -> Tensor:
        """[T, E] as `compared` -> [T]: by how much the scores of the last choice and of the first one left out differ.

        With groups the margin of the choice of groups counts, too, and of sparsemixer what makes a rival of an expert,
        and the order of the chosen. Noise below half a margin changes no choice.
        """
        settings = self.settings
        margins = torch.full_like(scores[:, 0], torch.inf)
        if settings.num_groups is not None and settings.group_topk is not None:
            margins = _last_margin(_group_scores(scores, settings), settings.group_topk)
            scores = scores.masked_fill(~_in_best_groups(scores, settings), -torch.inf)
        if settings.score_function == "sparsemixer":
            margins = margins.minimum(_mixing_margin(scores, settings))
        return margins.minimum(_last_margin(scores, settings.num_chosen))

    def on_device(self, name: str, device: torch.device) -> Tensor:
        """[E] of the state, on the device of the tokens from its first use on."""
        self.state[name] = self.state[name].to(device, non_blocking=device.type != "cpu")
        return self.state[name]

    @torch.no_grad()
    def end_step(self, counts: Tensor) -> None:
        """Move the state by the choices of a step, int64 [E], summed over all ranks and micro-batches.

        The choices are on the host, which does not wait until they are on a device.
        """
        if "bias" in self.state:
            # The mean may be no integer: num_experts * count is compared with the sum, exactly.
            bias, difference = self.state["bias"], counts.sum() - counts.numel() * counts
            bias += self.settings.bias_rate * _sent(difference.sign().to(bias.dtype), bias.device)
        if "load" in self.state:
            load = self.state["load"]
            load.copy_(_sent(counts, load.device))


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, from pinned memory: from other memory CUDA may have the host wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _in_best_groups(scores: Tensor, settings: RouterSettings) -> Tensor:
    """[T, E] -> bool [T, E]: whether an expert is in one of the groups that a token may choose from."""
    assert settings.num_groups is not None and settings.group_topk is not None
    best = _group_scores(scores, settings)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(settings.group_topk, dim=-1).indices, True)
    return kept.repeat_interleave(scores.shape[1] // settings.num_groups, dim=1)


def _group_scores(scores: Tensor, settings: RouterSettings) -> Tensor:
    """[T, E] -> [T, groups]: the sum of the best scores of each group."""
    assert settings.num_groups is not None and settings.group_topk is not None
    by_group = scores.unflatten(1, (settings.num_groups, -1))
    number = settings.scores_per_group or settings.num_chosen // settings.group_topk
    return by_group.topk(number, dim=-1).values.sum(-1)


def _last_margin(scores: Tensor, num_chosen: int) -> Tensor:
    """[T, E] -> [T]: the num_chosen-th highest score minus the next; infinite where none is left out."""
    if num_chosen == scores.shape[1]:
        return torch.full_like(scores[:, 0], torch.inf)
    best = scores.topk(num_chosen + 1, dim=-1).values
    return best[:, -2] - best[:, -1]


def _rivals(logits: Tensor, chosen: Tensor, epsilon: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each choice of [T, K]: the expert [T, 1], logits [T, E] without those before it, -inf, and distances [T, E].

    A rival has a distance of at least 0: that by which it is not too far below the expert.
    """
    left = logits
    for expert in chosen.split(1, dim=1):
        best = logits.gather(1, expert)
        with torch.no_grad():
            distances = 2 * epsilon * logits.abs().clamp(min=best) - (best - left)
        yield expert, left, distances
        left = left.scatter(1, expert, -torch.inf)


def _mixed(logits: Tensor, chosen: Tensor, epsilon: float) -> Tensor:
    """[T, E], [T, K] -> [T, K]: the weight of each chosen expert among its rivals."""
    weights = [
        left.masked_fill(distances < 0, -torch.inf).softmax(-1).gather(1, expert)
        for expert, left, distances in _rivals(logits, chosen, epsilon)
    ]
    return torch.cat(weights, dim=1)


def _mixing_margin(logits: Tensor, settings: RouterSettings) -> Tensor:
    """[T, E] -> [T]: by how much the logits of two chosen experts, or of a rival and of one that is none, differ."""
    best, chosen = logits.topk(settings.num_chosen, dim=-1)
    margin = torch.full_like(logits[:, 0], torch.inf)
    for expert, _, distances in _rivals(logits, chosen, settings.rival_epsilon):
        margin = margin.minimum(distances.scatter(1, expert, torch.inf).abs().amin(-1))
    return margin if settings.num_chosen == 1 else margin.minimum(-best.diff(dim=-1).amax(-1))


def choices_of_sequences(routing: Routing, num_sequences: int) -> Tensor:
    """int64 [B, E], choices of each expert by this rank's tokens of each sequence; tokens [T] are [s, B]."""
    num_tokens, num_experts = routing.scores.shape
    chosen = torch.zeros(
        num_tokens // num_sequences, num_sequences, num_experts, dtype=torch.int64, device=routing.choices.device
    )
    return chosen.scatter_(2, routing.choices.view(*chosen.shape[:2], -1), 1).sum(0)


def sequence_loss(routing: Routing, counts: Tensor, *, seq_length: int) -> Tensor:
    """This rank's part of the sum over its sequences of sum_i f_i P_i; tokens [T] are [s, B].

    `counts` [B, E] are the choices of whole sequences, summed over the ranks that hold parts of them. The scores are
    not summed: the parts of all ranks add up to the loss, and the gradient of each part is right.
    """
    (num_sequences, num_experts), num_chosen = counts.shape, routing.choices.shape[1]
    frequency = counts * (num_experts / (num_chosen * seq_length))
    mean_scores = routing.scores.view(-1, num_sequences, num_experts).sum(0) / seq_length
    return (frequency * mean_scores).sum()


def global_loss(routing: Routing, load: Tensor, *, seq_length: int) -> Tensor:
    """This rank's part of sum_i f_i P_i with the frequencies f of the whole step before, by its choices `load` [E].

    The choices of the step itself are known only when its last forward is over.
    """
    frequency = load * (load.numel() / load.sum().clamp(min=1))
    return (frequency * routing.scores.sum(0)).sum() / seq_length


def z_loss(routing: Routing) -> Tensor:
    """Sum over this rank's tokens of logsumexp(logits)^2."""
    return routing.logits.logsumexp(-1).square().sum()


class _AttachLoss(torch.autograd.Function):
    """Identity on x, whose backward gives the scalar `loss` a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, gradient: float) -> Tensor:
        ctx.gradient = gradient
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.full_like(loss, ctx.gradient), None


def attach_loss(x: Tensor, loss: Tensor, *, gradient: float) -> Tensor:
    """x unchanged; in the backward the scalar `loss` starts with `gradient`, as if it had been added to the loss.

    A pipeline stage needs no other stage for it: the factor is known before the step.
    """
    return _AttachLoss.apply(x, loss, gradient)
