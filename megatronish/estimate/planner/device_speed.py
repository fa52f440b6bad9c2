"""Speed of a device: a matrix product by tiles, waves over the SMs and the memory's bandwidth; transfers by alpha-beta.

Groups of a transfer lie in a node, or over several.
"""

from functools import lru_cache
from math import ceil, log2
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


class Links(NamedTuple):
    """Bytes a second inside a node and over the network card of one device, latency, and devices of a node."""

    node: float
    network: float
    latency: float
    gpus_per_node: int
    hop: float

    @classmethod
    def of(cls, device: Device, efficiencies: Efficiencies) -> "Links":
        """The links of a device's nodes."""
        measured = device.network_all_reduce_gb_s
        return cls(
            device.ring_bytes_per_second * efficiencies.node,
            1e9 * (measured if measured is not None else device.network_gb_s * efficiencies.network),
            1e-6 * device.latency_us,
            device.gpus_per_node,
            efficiencies.hop,
        )

    def bandwidth(self, size: int, stride: int) -> float:
        """Bytes a second of a ring over ranks that are `stride` apart; those of one node use a network card each."""
        in_node = max(1, min(size, self.gpus_per_node // stride))
        if in_node >= size and size * stride <= self.gpus_per_node:
            return self.node
        return min(in_node * self.network, self.node)

    def gather(self, size: int, stride: int, nbytes: float) -> float:
        """Seconds of an all-gather of `nbytes` in all, or of a reduce-scatter."""
        if size == 1:
            return 0.0
        return (size - 1) / size * nbytes / self.bandwidth(size, stride) + log2(size) * self.latency

    def all_reduce(self, size: int, stride: int, nbytes: float) -> float:
        """Seconds of an all-reduce of `nbytes` on each rank."""
        return 2 * self.gather(size, stride, nbytes)

    def all_to_all(self, size: int, stride: int, nbytes: float) -> float:
        """Seconds of an all-to-all in which each rank sends `nbytes`, to all ranks alike."""
        if size == 1:
            return 0.0
        in_node = max(1, min(size, self.gpus_per_node // stride))
        inside, outside = nbytes * (in_node - 1) / size, nbytes * (size - in_node) / size
        return max(inside / self.node, outside / self.network) + 2 * self.latency

    def send(self, stride: int, nbytes: float) -> float:
        """Seconds of a transfer to the rank that is `stride` away, for which both sides have to meet."""
        return self.hop * nbytes / (self.node if stride < self.gpus_per_node else self.network) + self.latency
