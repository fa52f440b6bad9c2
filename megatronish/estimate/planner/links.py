"""Time of transfers: alpha-beta over links, with groups that lie in a node or over several."""

from math import log2
from typing import NamedTuple

from megatronish.estimate.planner.devices import Device
from megatronish.estimate.planner.efficiencies import Efficiencies


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
