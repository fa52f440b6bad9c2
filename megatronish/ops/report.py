"""Table of the fused operator families, and the lines that a run prints about them."""

import torch

from megatronish.ops import activation, cross_entropy, dropout, nf4, norm, permutation, rope, softmax, windowed
from megatronish.ops.library import OperatorFamily, report_line

FAMILIES: tuple[OperatorFamily, ...] = (
    softmax.FAMILY,
    cross_entropy.FAMILY,
    activation.FAMILY,
    norm.FAMILY,
    dropout.FAMILY,
    rope.FAMILY,
    nf4.FAMILY,
    permutation.FAMILY,
)


def kernels_report(device: torch.device | str, *, drops: bool = True, has_windows: bool = False) -> list[str]:
    """One line a family: the implementation of its operators on this device, and the reason if not the kernels.

    A run that drops nothing is not told about dropout, for to know whether its C++ runs it is built; windows are of a
    CPU alone.
    """
    device = torch.device(device)
    families = FAMILIES if drops else tuple(family for family in FAMILIES if family is not dropout.FAMILY)
    families += (windowed.FAMILY,) if has_windows and device.type == "cpu" else ()
    return [report_line(family, device) for family in families]


def kernels_line(device: torch.device | str, *, drops: bool = True, has_windows: bool = False) -> str:
    """The report in one line, for a run's first lines: families with the same implementation together."""
    families: dict[str, list[str]] = {}
    for line in kernels_report(device, drops=drops, has_windows=has_windows):
        name, _, where = line.partition(": ")
        families.setdefault(where, []).append(name)
    return "fused operations: " + "; ".join(f"{', '.join(names)} by {where}" for where, names in families.items())
