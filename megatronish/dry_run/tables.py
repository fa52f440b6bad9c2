"""Small tables that the run keeps on a device from their first use on: a dry run makes its own, and leaves none."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatronish.attention.alibi import slopes_on
from megatronish.ops.nf4 import table_on


@contextmanager
def own_tables() -> Iterator[None]:
    """Meanwhile tables are tensors of this run alone."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for table in (slopes_on, table_on):
        table.cache_clear()
