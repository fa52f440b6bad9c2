"""Rules between the tensors of a foreign format and ours: which of theirs make one of ours, joined and split how.

The rules of a format can be listed without torch: it is imported where tensors are really joined.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorRule:
    """Rule: tensors `theirs` of a foreign format make the tensor `ours`, by `join`; `split` is the inverse.

    With a `row` they make that row of ours alone: one expert of a stack. A stack has a rule for each of its rows.
    `by_row`: they are stacks, too, and join and split take each row by itself.
    """

    ours: str
    theirs: tuple[str, ...]
    join: "Callable[[Sequence[Tensor]], Tensor]" = lambda parts: parts[0]
    split: "Callable[[Tensor], Sequence[Tensor]]" = lambda whole: (whole,)
    row: int | None = None
    by_row: bool = False


def same_tensors(ours: str, theirs: str, *, bias: bool) -> Iterator[TensorRule]:
    """Rules of a weight, and of its bias, that are the same tensors here and there."""
    for kind in ("weight", "bias")[: 1 + bias]:
        yield TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",))


def transposed_tensors(ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of a linear layer whose weight is [in, out] there and [out, in] here."""
    yield TensorRule(f"{ours}.weight", (f"{theirs}.weight",), lambda parts: parts[0].t(), lambda whole: (whole.t(),))
    yield TensorRule(f"{ours}.bias", (f"{theirs}.bias",))


def concatenated_tensors(ours: str, theirs: Sequence[str], sizes: Sequence[int], *, bias: bool) -> Iterator[TensorRule]:
    """Rules of one tensor here whose rows are those of several tensors there, one below the other."""
    for kind in ("weight", "bias")[: 1 + bias]:
        parts = tuple(f"{name}.{kind}" for name in theirs)
        yield TensorRule(f"{ours}.{kind}", parts, concatenate, lambda whole: whole.split(list(sizes)))


def concatenate(parts: "Sequence[Tensor]") -> "Tensor":
    """Tensor of all rows of the parts."""
    import torch  # late: rules are listed without it

    return torch.cat(tuple(parts))


def stack(parts: "Sequence[Tensor]") -> "Tensor":
    """Tensor with a new first dim, along which the parts lie."""
    import torch  # late, as above

    return torch.stack(tuple(parts))
