"""Which fused operations are there, and what does a run say of them?"""

import torch

from megatronish.ops import activation, cross_entropy, norm, softmax
from megatronish.ops.library import OperatorFamily, report_line

FAMILIES: tuple[OperatorFamily, ...] = (softmax.FAMILY, cross_entropy.FAMILY, activation.FAMILY, norm.FAMILY)


def kernels_report(device: torch.device | str) -> list[str]:
    """One line a family, for a run's first lines: where its operations run on this device, and why."""
    return [report_line(family, torch.device(device)) for family in FAMILIES]


def kernels_line(device: torch.device | str) -> str:
    """The same in one line, families of the same answer together."""
    families: dict[str, list[str]] = {}
    for line in kernels_report(device):
        name, _, where = line.partition(": ")
        families.setdefault(where, []).append(name)
    return "fused operations: " + "; ".join(f"{', '.join(names)} by {where}" for where, names in families.items())
