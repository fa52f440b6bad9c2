"""Counts of the launch scripts that were tried: what becomes of the flags they use. A test counts them again."""

from typing import NamedTuple


class Tried(NamedTuple):
    """Launch script, or a set of configs, with the numbers of its uses of flags."""

    name: str
    counts: tuple[int, int, int, int, int, int]  # used, work, idle, computed more exactly, refused, unknown
    is_script: bool = True


TRIED: tuple[Tried, ...] = ()
