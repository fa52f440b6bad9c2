"""NF4 and ALiBi in a dry run: small tables of its own, and the largest piece of a matrix in the place of all.

A matrix in NF4 is dequantised piece by piece, thousands of operators a layer; pieces follow each other and none
outlives the next, so one piece takes the memory of all. Nothing of it is a product that has FLOPs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megatronish.attention.alibi import slopes_on
from megatronish.layers.nf4 import MatrixPiece, NF4Weight
from megatronish.ops.nf4 import table_on

all_pieces = NF4Weight.pieces


@contextmanager
def own_tables() -> Iterator[None]:
    """Meanwhile tables, which a run keeps on a device from their first use on, are tensors of this run alone."""
    _forget()
    try:
        yield
    finally:
        _forget()


@contextmanager
def matrices_by_one_piece() -> Iterator[None]:
    """Meanwhile of each matrix in NF4 its largest piece is dequantised."""
    with patch.object(NF4Weight, "pieces", _largest_piece):
        yield


def _largest_piece(self: NF4Weight) -> Iterator[MatrixPiece]:
    yield max(all_pieces(self), key=lambda piece: piece.rows.stop - piece.rows.start)


def _forget() -> None:
    for table in (slopes_on, table_on):
        table.cache_clear()
