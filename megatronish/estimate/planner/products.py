"""Time of a matrix product on a device: tiles, waves over the SMs, and the memory's bandwidth."""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from megatronish.estimate.planner.devices import Device
from megatronish.estimate.planner.efficiencies import Efficiencies

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.6))
"""Rows and columns of the tiles of libraries, and the part of the rate that each reaches."""
WITHOUT_TENSOR_CORES = 3.0  # sizes that are no multiple of 16 bytes
ALIGNED = 8  # elements of 16 bits


class Machine(NamedTuple):
    """Rates of a device as the model uses them: FLOP/s of large products, bytes a second of its memory, its SMs."""

    flops: float
    hbm: float
    sms: int
    prologue: int
    element_bytes: int

    @classmethod
    def of(cls, device: Device, efficiencies: Efficiencies, precision: str) -> "Machine":
        """The rates for a precision of training."""
        return cls(
            device.flops(precision) * efficiencies.gemm,
            1e9 * device.hbm_gb_s * efficiencies.hbm,
            device.sms,
            efficiencies.prologue,
            4 if precision == "fp32" else 2,
        )


@lru_cache(maxsize=200_000)
def product_seconds(machine: Machine, rows: int, inner: int, columns: int, groups: int = 1) -> float:
    """Seconds of `groups` products [rows, inner] x [inner, columns], started together."""
    if min(rows, inner, columns) < 1:
        return 0.0
    flops, sms = machine.flops, machine.sms
    quantised = min(
        ceil(groups * ceil(rows / tm) * ceil(columns / tn) / sms)
        * (2.0 * tm * tn * (inner + machine.prologue) * sms / (flops * rate))
        for tm, tn, rate in TILES
    )
    plain = 2.0 * groups * rows * inner * columns / flops
    moved = machine.element_bytes * groups * (rows * inner + inner * columns + rows * columns) / machine.hbm
    slower = WITHOUT_TENSOR_CORES if rows % ALIGNED or inner % ALIGNED or columns % ALIGNED else 1.0
    return max(slower * (quantised + plain) / 2, moved)


def gradient_seconds(machine: Machine, rows: int, inner: int, columns: int, groups: int = 1) -> float:
    """Seconds of the weight gradients of such products, which are added to sums in fp32."""
    product = product_seconds(machine, columns, rows, inner, groups)
    return max(product, 8.0 * groups * columns * inner / machine.hbm)
