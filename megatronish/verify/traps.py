"""Likely traps: what a pattern of wrong gradients looks like, and where the field has met it.

A trap looks at all gradients that differ. The first one that recognises its pattern is named. Sources: issues of
Megatron-LM, torchtitan, transformers and TransformerEngine, in docs/CONFORM.md.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from megatronish.verify.conform import Compared, Conformance


class Evidence(NamedTuple):
    """What traps look at: the comparison, the gradients that differ, and the names of ours that agree."""

    comparison: Conformance
    differing: Sequence[Compared]
    agreeing: frozenset[str]
    tolerance: float

    @property
    def ours(self) -> frozenset[str]:
        """Our names of what differs."""
        return frozenset(each.ours for each in self.differing)

    def all_are(self, *parts: str) -> bool:
        """Whether each gradient that differs has one of these parts in our name."""
        return all(any(part in name for part in parts) for name in self.ours)

    @property
    def factor(self) -> float | None:
        """What all that differ are multiples of ours by; None if there is no such number."""
        factors = [each.factor for each in self.differing]
        known = [factor for factor in factors if factor is not None]
        if len(known) < len(factors) or max(known) - min(known) > 10 * self.tolerance * abs(known[0]):
            return None
        return known[0]


def likely_trap(comparison: Conformance, tolerance: float) -> str:
    """Sentence on what is probably wrong where gradients differ."""
    differing = comparison.differing(tolerance)
    agreeing = frozenset(each.ours for each in comparison.gradients) - {each.ours for each in differing}
    evidence = Evidence(comparison, differing, agreeing, tolerance)
    return next((sentence for trap in TRAPS if (sentence := trap(evidence)) is not None), NO_PATTERN)


NO_PATTERN = (
    "no known pattern: compare the dumps of two layouts of the same trainer, and halve the layout until they agree"
)


def _not_finite(evidence: Evidence) -> str | None:
    broken = [each.name for each in evidence.differing if not each.is_finite]
    return None if not broken else f"{broken[0]} is not finite: an overflow, or a mask that leaves a row with no key"


def _forward(evidence: Evidence) -> str | None:
    one = evidence.comparison
    if one.loss_error <= evidence.tolerance:
        return None
    ratio = (one.loss or 0.0) / one.expected_loss
    factor = evidence.factor
    if factor is not None and abs(ratio / factor - 1) <= 10 * evidence.tolerance:
        return f"loss and gradients are {factor:.6g} times ours: {_divisors(factor, one)}"
    return (
        f"the loss is {one.loss:.7g} and ours {one.expected_loss:.7g}, so the forward differs before any gradient: "
        "other weights, labels or masks than the dump says, dropout that was on, an auxiliary loss that was added, "
        "positions that restart at documents, rows of padding of the vocabulary that are in the softmax (Megatron-LM), "
        "or, where the loss is a mean of means, --loss-of samples"
    )


def _all_scaled(evidence: Evidence) -> str | None:
    if evidence.agreeing or evidence.factor is None:
        return None
    return f"all gradients are {evidence.factor:.6g} times ours: {_divisors(evidence.factor, evidence.comparison)}"


def _divisors(factor: float, comparison: Conformance) -> str:
    """What a common factor may come from, by the numbers of the batch."""
    mask = comparison.batch.loss_mask
    numbers = {
        "the number of samples": mask.shape[0],
        "the number of predictions": int(mask.sum()),
        "the number of tokens": mask.numel(),
        "tokens over predictions": mask.numel() / int(mask.sum()),
    }
    for name, number in numbers.items():
        for sign, value in (("", float(number)), ("one over ", 1.0 / number)):
            if number != 1 and abs(factor / value - 1) < 1e-4:
                return f"{sign}{name}, so the divisor of the loss is another one"
    return (
        "a divisor of the loss, such as dp or cp counted twice or not at all, or a loss scale that was not taken back"
    )


def _absent(evidence: Evidence) -> str | None:
    absent = [each.name for each in evidence.differing if each.is_absent]
    if not absent:
        return None
    return (
        f"no gradient came to {len(absent)} tensors, {absent[0]} first: frozen, detached, or a hook that reads .grad "
        "where the trainer keeps main_grad"
    )


def _tied(evidence: Evidence) -> str | None:
    if not evidence.all_are("embedding.tokens"):
        return None
    (each, *_), tokens = evidence.differing, evidence.comparison.batch.tokens
    rows = (each.theirs - each.expected).norm(dim=1) > evidence.tolerance * each.expected.norm(dim=1) + each.noise
    looked_up = set(tokens.unique().tolist())
    wrong = set(rows.nonzero().flatten().tolist())
    if len(wrong) == 1 < len(looked_up) and wrong <= looked_up:
        return (
            f"only row {wrong.pop()} of {each.name} differs: an embedding gives its padding_idx (pad_token_id) no "
            "gradient, wherever that token is; dump a batch without it"
        )
    if wrong <= looked_up:
        return (
            f"only {each.name} differs, only in rows of tokens of the batch: of a tied table the part of the embedding "
            "is missing, or counted twice (first and last pipeline stage add theirs up once)"
        )
    return f"only {each.name} differs, in {len(wrong)} rows: of a tied table the part of the output layer is wrong"


def _norms(evidence: Evidence) -> str | None:
    if not evidence.all_are("_norm.", "norm.weight", "norm.bias", "out.bias", "fc2.bias", "router"):
        return None
    if evidence.all_are("q_norm", "k_norm"):
        return (
            "only norms of queries and keys differ: each tp rank has some heads, and their gradients are not summed "
            "over tp"
        )
    if not any("norm" in name for name in evidence.ours):
        return None
    return (
        "only what every tp rank holds whole differs (norms, biases after the sum): under sequence parallelism each "
        "rank has the gradient of its part of the sequence, and they are not summed over tp"
    )


def _biases(evidence: Evidence) -> str | None:
    factor = evidence.factor
    if (
        not all(name.endswith(".bias") for name in evidence.ours)
        or factor is None
        or abs(factor - round(factor)) > 1e-3
    ):
        return None
    return f"only biases differ, {factor:.3g} times ours: each of {round(factor)} tp ranks adds the bias before the sum"


def _routers(evidence: Evidence) -> str | None:
    if not evidence.all_are("router"):
        return None
    return (
        "only routers differ: a loss of balance or a z-loss is in the dump (set its coefficient to 0), or the gradient "
        "through the weights of the chosen experts is lost where tokens are exchanged"
    )


def _experts(evidence: Evidence) -> str | None:
    if not evidence.all_are(".experts."):
        return None
    factor = evidence.factor
    scaled = "" if factor is None else f", {factor:.6g} times ours"
    return (
        f"only experts differ{scaled}: their gradients are averaged over the ranks that share them (dp over ep), and "
        "the divisor is that of the whole dp; or parts of etp ranks are mixed where etp is not tp"
    )


def _shared_heads(evidence: Evidence) -> str | None:
    parts = [each for each in evidence.differing if "qkv" in each.ours]
    if len(parts) < len(evidence.differing) or not all(_is_of_keys(each.name) for each in parts):
        return None
    return (
        "only keys and values differ: a key/value head that several tp ranks hold (fewer heads than tp), or several "
        "cp ranks pass round, has not the sum of their gradients"
    )


def _is_of_keys(name: str) -> bool:
    return (
        any(part in name for part in ("k_proj", "v_proj", "key", "value", ".wk.", ".wv.")) and "query_key" not in name
    )


def _sinks(evidence: Evidence) -> str | None:
    if not evidence.all_are("sinks"):
        return None
    return "only sinks of attention differ: counted once a block of the ring, or not summed over cp"


def _other_order(evidence: Evidence) -> str | None:
    """Rows that are all there, in another order."""
    first = evidence.differing[0]
    if first.theirs.dim() < 2 or abs(float(first.theirs.norm() / first.expected.norm()) - 1) > evidence.tolerance:
        return None
    mine, yours = (_row_norms(each).sort().values for each in (first.expected, first.theirs))
    if float((mine - yours).norm()) > evidence.tolerance * float(mine.norm()):
        return None
    return (
        f"rows of {first.name} are ours in another order: pairs of rotary channels (halves or interleaved), or the "
        "order of q, k, v, of gate and up, or of the parts of tp ranks"
    )


def _row_norms(matrix: Tensor) -> Tensor:
    return matrix.flatten(1).norm(dim=1)


def _some_rows(evidence: Evidence) -> str | None:
    """One part of a tensor, as a rank holds it."""
    first = evidence.differing[0]
    for dim, word in ((0, "rows"), (1, "columns")):
        if first.theirs.dim() <= dim:
            continue
        others = [number for number in range(first.theirs.dim()) if number != dim]
        difference = first.theirs - first.expected
        norms = difference.square().sum(others).sqrt() if others else difference.abs()
        size = first.expected.shape[dim]
        wrong = (
            (norms > evidence.tolerance * float(first.expected.norm()) / size**0.5 + first.noise).nonzero().flatten()
        )
        if 0 < len(wrong) < size and int(wrong[-1] - wrong[0]) + 1 == len(wrong):
            why = "the part of one rank, whose gradient is not reduced, or padding that is counted"
            if "kv_down" in first.ours and int(wrong[-1]) + 1 == size:
                why = "the rope key that all heads share has the gradient of the heads of one tp rank alone"
            span = f"{word} {int(wrong[0])} to {int(wrong[-1])} of {size}"
            return f"{span} of {first.name} differ and the others agree: {why}"
    return None


def _from_a_layer_on(evidence: Evidence) -> str | None:
    """All gradients before one layer."""
    comparison, first = evidence.comparison, evidence.differing[0]
    place = [each.name for each in comparison.gradients].index(first.name)
    before, after = comparison.gradients[:place], comparison.gradients[place:]
    wrong = sum(1 for each in after if not each.error <= evidence.tolerance)
    if not before or wrong < 0.9 * len(after):
        return None
    return (
        f"{len(before)} gradients after {first.name} agree, and nearly all before it differ: what the backward sends "
        "down from there is wrong (a collective of tp, a border of stages, a recomputed layer)"
    )


TRAPS: tuple[Callable[[Evidence], str | None], ...] = (
    _not_finite,
    _forward,
    _all_scaled,
    _absent,
    _tied,
    _norms,
    _biases,
    _routers,
    _experts,
    _shared_heads,
    _sinks,
    _other_order,
    _some_rows,
    _from_a_layer_on,
)
"""From the most certain pattern to the least."""
