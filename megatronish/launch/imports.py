"""Imports of a start: without garbage collection, which finds nothing in them and costs a quarter of their time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatronish.core.garbage import uncollected


@contextmanager
def importing() -> Iterator[None]:
    """Import meanwhile without garbage collection, and never look through what is there at the end.

    Forked ranks then share the memory of all modules: a collection would write into every object of them.
    """
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()
