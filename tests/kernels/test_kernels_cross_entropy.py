"""Tests of the cross entropy kernels against fp64: statistics and gradient, for every shard of any vocabulary."""

from typing import NamedTuple

import pytest
import torch
from kernel_runs import DTYPES, LENGTHS, ORDERS, PLACES, Kernels, assert_rounded, kernels, misaligned
from torch import Tensor


class Case(NamedTuple):
    """Logits [T, C], column c of which is token first + c of `first + num_true` or more."""

    logits: Tensor
    labels: Tensor
    first: int
    num_true: int

    def exact(self) -> Tensor:
        """The true logits in fp64."""
        return self.logits[:, : self.num_true].double()

    def here(self) -> Tensor:
        """Bool [T]: whose label is among the true columns."""
        return (self.labels >= self.first) & (self.labels < self.first + self.num_true)

    def statistics(self, run: Kernels) -> tuple[Tensor, Tensor, Tensor]:
        """By the kernels, which leave the logits as they are."""
        before = self.logits.clone()
        found = run.ops.cross_entropy_statistics(self.logits, self.labels, self.first, self.num_true)
        assert torch.equal(bits(self.logits), bits(before))
        return found

    def gradient(self, run: Kernels, maximum: Tensor, factor: Tensor, grad: Tensor) -> Tensor:
        """By the kernels, in place of a copy of the logits that begins as far from a boundary."""
        before = self.logits.storage_offset()
        logits = self.logits.new_empty(before + self.logits.numel())[before:].view_as(self.logits).copy_(self.logits)
        run.ops.cross_entropy_gradient_(logits, self.labels, maximum, factor, grad, self.first, self.num_true)
        return logits


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def cases(columns: int, dtype: torch.dtype, device: torch.device, *, spread: float = 3.0) -> list[Case]:
    """Rows of a length: all true, some, one and none; labels here and elsewhere; padding is NaN."""
    generator = torch.Generator().manual_seed(columns)
    x = (torch.randn(6, columns, generator=generator) * spread).to(device, dtype)
    found = []
    for first, num_true in ((0, columns), (50, max(1, columns - 5)), (columns, 1), (2**33, 0)):
        logits = x.clone() if num_true > 1 else misaligned(x[:2])
        labels = torch.randint(first, first + max(num_true, 1), (len(logits),), generator=generator)
        labels[1] = first - 1  # a label of -1 too
        if len(logits) > 2:
            labels[2:5] = torch.tensor([first + num_true, first + num_true - 1, first + 2**32])
        logits[:, num_true:] = torch.nan
        found.append(Case(logits, labels.to(device), first, num_true))
    return found


def check(case: Case, run: Kernels) -> None:
    exact, here = case.exact(), case.here()
    maximum, total, target = case.statistics(run)
    if case.num_true == 0:
        assert (maximum == -torch.inf).all() and (total == 0).all() and (target == 0).all()
        exponentials = exact
    else:
        assert torch.equal(maximum.double(), exact.amax(-1))
        exponentials = (exact - exact.amax(-1, keepdim=True)).exp()
        assert_rounded(total, exponentials.sum(-1), slack=1e-6 * exponentials.sum(-1))
        columns = (case.labels - case.first).where(here, 0)
        assert torch.equal(target.double(), exact.gather(-1, columns[:, None])[:, 0].where(here, 0.0))

    generator = torch.Generator().manual_seed(1)
    factor, grad = torch.rand(2, len(case.labels), generator=generator).to(run.device)
    factor[-1] = grad[-1] = 0.0  # a token that does not count
    expected = exponentials * factor[:, None].double()
    slack = 1e-5 * expected + 1e-7 * grad[:, None]
    (counted,) = torch.where(here)
    expected[counted, case.labels[counted] - case.first] -= grad[counted].double()
    gradient = case.gradient(run, maximum, factor, grad)
    assert_rounded(gradient[:, : case.num_true], expected, slack=slack)
    assert (gradient[:, case.num_true :] == 0).all() and (gradient[-1] == 0).all()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", LENGTHS)
def test_every_length_in_every_dtype_with_padding_and_labels_elsewhere(
    columns: int, dtype: torch.dtype, where: str
) -> None:
    run = kernels(where, order=ORDERS[(LENGTHS.index(columns) + DTYPES.index(dtype)) % 3], seed=columns)
    for case in cases(columns, dtype, run.device):
        check(case, run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_parts_of_a_vocabulary_make_its_loss(dtype: torch.dtype, tp: int, where: str) -> None:
    run, vocab_size, tokens = kernels(where, order=ORDERS[tp % 3]), 50257, 2
    columns = -(-vocab_size // (128 * tp)) * 128
    generator = torch.Generator().manual_seed(tp)
    whole = (torch.randn(tokens, columns * tp, generator=generator) * 3).to(run.device, dtype)
    labels = torch.tensor([vocab_size - 1, 7], device=run.device)
    parts = []
    for rank, part in enumerate(whole.split(columns, dim=-1)):
        num_true = min(columns, vocab_size - rank * columns)
        parts.append(Case(part.contiguous(), labels, rank * columns, num_true))
    statistics = [case.statistics(run) for case in parts]
    maximum = torch.stack([each[0] for each in statistics]).amax(0)
    total = torch.stack([each[1] * (each[0] - maximum).exp() for each in statistics]).sum(0)
    losses = total.log() - (torch.stack([each[2] for each in statistics]).sum(0) - maximum)

    leaf = whole[:, :vocab_size].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)

    grad = torch.tensor([1.0, 0.25], device=run.device)
    (expected * grad).sum().backward()
    gradients = []
    for case, (mine, _, _) in zip(parts, statistics, strict=True):
        gradients.append(case.gradient(run, mine, grad / total * (mine - maximum).exp(), grad))
    gradient = torch.cat(gradients, dim=-1)
    assert leaf.grad is not None and (gradient[:, vocab_size:] == 0).all()
    assert_rounded(gradient[:, :vocab_size], leaf.grad, slack=1e-5 * leaf.grad.abs() + 1e-7 * grad[:, None])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", [33, 1025, 9000])
def test_the_order_of_lanes_changes_nothing(columns: int, order: str) -> None:
    case = cases(columns, torch.float32, torch.device("cpu"))[1]
    factor = grad = torch.ones(len(case.labels))
    found = []
    for run in (kernels("cpu"), kernels("cpu", order=order, seed=5)):
        statistics = case.statistics(run)
        found.append((*statistics, case.gradient(run, statistics[0], factor, grad)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [31, 1025, 4097])
def test_the_largest_logits_do_not_overflow(columns: int, dtype: torch.dtype, where: str) -> None:
    run = kernels(where)
    largest = torch.finfo(dtype).max
    for case in cases(columns, dtype, run.device, spread=1e4)[:2]:
        case.logits[0, :2] = torch.tensor([largest, -largest])
        case.logits[1, :2] = -torch.inf
        case.logits[4, 1:] = -largest
        check(case, run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("columns", [9, 600, 9000])
def test_a_broken_logit_stays_in_its_row_and_is_not_hidden(columns: int, where: str) -> None:
    run = kernels(where)
    case = cases(columns, torch.float32, run.device)[0]
    case.logits[0, -1], case.logits[1, 3] = torch.nan, torch.inf
    maximum, total, _ = case.statistics(run)
    assert total[:2].isnan().all() and total[2:].isfinite().all()
    ones = torch.ones_like(total)
    gradient = case.gradient(run, maximum, ones / total, ones)
    assert gradient[:2].isnan().all() and gradient[2:].isfinite().all()


@pytest.mark.parametrize("where", PLACES)
def test_numbers_a_token_may_have_strides_and_there_may_be_no_token(where: str) -> None:
    run = kernels(where)
    case = cases(33, torch.float32, run.device)[0]
    maximum, _, _ = case.statistics(run)
    one = torch.ones((), device=run.device).expand(len(case.labels))
    expected = case.gradient(run, maximum, one.contiguous(), one.contiguous())
    strided = case._replace(labels=case.labels.repeat_interleave(2)[::2])
    assert torch.equal(strided.gradient(run, maximum.repeat_interleave(2)[::2], one, one), expected)
    assert all(torch.equal(a, b) for a, b in zip(strided.statistics(run), case.statistics(run), strict=True))
    nobody = Case(case.logits[:0], case.labels[:0], 0, 33)
    assert [x.shape for x in nobody.statistics(run)] == [(0,)] * 3
    assert nobody.gradient(run, maximum[:0], one[:0], one[:0]).shape == (0, 33)


@pytest.mark.parametrize("where", PLACES)
def test_what_no_kernel_can_do_is_said(where: str) -> None:
    run = kernels(where)
    logits, labels = torch.zeros(3, 4, device=run.device), torch.zeros(3, dtype=torch.int64, device=run.device)
    number = torch.zeros(3, device=run.device)
    with pytest.raises(RuntimeError, match="take float32, float16 and bfloat16 alone"):
        Case(logits.double(), labels, 0, 4).gradient(run, number, number, number)
    with pytest.raises(RuntimeError, match=r"logits must be \[tokens, columns\], contiguous"):
        run.ops.cross_entropy_statistics(logits[:, :3], labels, 0, 3)
    with pytest.raises(RuntimeError, match=r"a cross entropy over more than 2\^30 columns"):
        run.ops.cross_entropy_statistics(logits.new_empty(0, 2**30 + 1), labels[:0], 0, 1)
    with pytest.raises(RuntimeError, match=r"labels must be \[tokens\], int64"):
        run.ops.cross_entropy_statistics(logits, labels.int(), 0, 4)
    with pytest.raises(RuntimeError, match="num_true must be at most the number of columns"):
        run.ops.cross_entropy_statistics(logits, labels, 0, 5)
    with pytest.raises(RuntimeError, match=r"maximum, factor and grad must be \[tokens\], float32"):
        run.ops.cross_entropy_gradient_(logits, labels, number, number[:2], number, 0, 4)


@pytest.mark.gpu
def test_indices_beyond_2_to_the_31() -> None:
    run = kernels("cuda")
    columns, tokens = 50304, 43000  # 4.3 GB of logits
    logits = torch.zeros(tokens, columns, device=run.device, dtype=torch.bfloat16)
    last = cases(columns, torch.bfloat16, run.device)[1]
    logits[-6:] = last.logits
    whole = Case(logits, last.labels.repeat(tokens // 6 + 1)[-tokens:], last.first, last.num_true)
    ends = whole._replace(logits=logits[-6:].clone(), labels=whole.labels[-6:])
    found = run.ops.cross_entropy_statistics(*whole)
    for all_of_it, expected in zip(found, ends.statistics(run), strict=True):
        assert torch.equal(all_of_it[-6:], expected)
    factor = torch.ones(tokens, device=run.device)
    expected = ends.gradient(run, found[0][-6:], factor[-6:], factor[-6:])
    run.ops.cross_entropy_gradient_(logits, whole.labels, found[0], factor, factor, *whole[2:])
    assert torch.equal(logits[-6:], expected)
