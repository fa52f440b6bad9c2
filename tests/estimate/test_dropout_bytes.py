"""Test of dropout's cost on a GPU by count of bytes: what a layer moves through the device's memory, with and without.

Tensors of h elements a token that each operation of a GPT layer (MLP of 4 h) reads and writes, forward and backward:
products, attention and fused operations read each input once and write each output once. Weights, statistics of a row
and hashes are left out; with them the share of dropout is smaller. kernels/README.md has the table.
"""

import re
from typing import NamedTuple

import pytest
from paths import ROOT

LIMIT = 0.08


class Moved(NamedTuple):
    """Elements a token, in multiples of h."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Read and written."""
        return self.read + self.written


WITHOUT = {
    "norm": Moved(1, 1),
    "qkv": Moved(1, 3),
    "attention": Moved(3, 1),
    "output projection": Moved(1, 1),
    "residual addition and norm": Moved(2, 2),
    "fc1": Moved(1, 4),
    "GELU": Moved(4, 4),
    "fc2": Moved(4, 1),
    "residual addition": Moved(2, 1),
    "fc2, gradients": Moved(1 + 1 + 4, 4),
    "GELU, gradient": Moved(4 + 4, 4),
    "fc1, gradients": Moved(4 + 4 + 1, 1),
    "residual addition and norm, gradient": Moved(3, 1),
    "output projection, gradients": Moved(1 + 1 + 1, 1),
    "attention, gradients": Moved(5, 3),
    "qkv, gradients": Moved(3 + 3 + 1, 1),
    "norm, gradient": Moved(2, 1),
    "sum of the residual's gradients": Moved(2, 1),
}
# What takes the place of these, and what is new. Attention reads and writes the same: its blocks stay in a cache.
WITH = WITHOUT | {
    "residual addition and norm": Moved(1, 1),
    "dropout and residual addition, of attention": Moved(2, 1),
    "residual addition": Moved(0, 0),
    "dropout and residual addition, of the MLP": Moved(2, 1),
    "dropout of the MLP, gradient": Moved(1, 1),
    "residual addition and norm, gradient": Moved(2, 1),
    "sum of the second residual's gradients": Moved(2, 1),
    "dropout of attention, gradient": Moved(1, 1),
}


def moved(operations: dict[str, Moved]) -> int:
    return sum(each.total for each in operations.values())


def test_dropout_moves_at_most_8_percent_more_bytes_of_a_layer() -> None:
    more = moved(WITH) - moved(WITHOUT)
    assert (moved(WITHOUT), more) == (99, 7)
    assert more / moved(WITHOUT) <= LIMIT


@pytest.mark.parametrize(("name", "number"), [("without dropout", moved(WITHOUT)), ("with dropout", moved(WITH))])
def test_the_readme_of_the_kernels_says_so(name: str, number: int) -> None:
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"\| {name} \|.*\| {number} h \|", text)
