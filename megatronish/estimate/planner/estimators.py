"""DeepSpeed's memory estimators: the formulas of its `estimate_zero2_...` and `estimate_zero3_...`, by their settings.

They count model state alone, with a factor of 1.5 for buffers on the CPU, and no activations. P is the number of
parameters, L that of the largest module; sizes are bytes. The code of DeepSpeed has 2P + 18P/n for ZeRO-2 without
offload where its documentation still prints 4P + 16P/n: both are here.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatronish.estimate.planner.workload import Workload

BUFFERS = 1.5
GIB = 2**30


class Estimate(NamedTuple):
    """Bytes on the CPU of a node and on each device, under some settings."""

    cpu: float
    gpu: float
    settings: str


class Cluster(NamedTuple):
    """Devices of a node, and nodes."""

    gpus_per_node: int
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """Devices of all nodes together."""
        return self.gpus_per_node * self.nodes


def zero2(parameters: int, cluster: Cluster) -> Iterator[Estimate]:
    """ZeRO-2 with the optimizer on the CPU, without, and without by the documentation's formula."""
    n = cluster.gpus
    yield Estimate(parameters * max(4 * n, 16) * BUFFERS, 2 * parameters, "offload_optimizer=cpu")
    host = parameters * 4 * cluster.gpus_per_node * BUFFERS
    yield Estimate(host, 2 * parameters + int(18 * parameters / n), "offload_optimizer=none")
    yield Estimate(host, 4 * parameters + int(16 * parameters / n), "offload_optimizer=none (documentation)")


def zero3(parameters: int, largest: int, cluster: Cluster) -> Iterator[Estimate]:
    """ZeRO-3 with parameters and optimizer on the CPU, the optimizer alone, and neither, each with zero_init or not."""
    n, g, share = cluster.gpus, cluster.gpus_per_node, 1 / cluster.nodes
    for zero_init in (True, False):
        cpu = parameters * 18 * share if zero_init else parameters * max(4 * g, 18 * share)
        yield Estimate(cpu * BUFFERS, 4 * largest, _settings("cpu", "cpu", zero_init))
    for zero_init in (True, False):
        cpu = parameters * 16 * share if zero_init else parameters * max(4 * g, 16 * share)
        yield Estimate(cpu * BUFFERS, 4 * largest + int(2 * parameters / n), _settings("none", "cpu", zero_init))
    for zero_init in (True, False):
        cpu = 4.0 * (largest if zero_init else parameters) * g
        yield Estimate(cpu * BUFFERS, 4 * largest + int(18 * parameters / n), _settings("none", "none", zero_init))


def _settings(parameters: str, optimizer: str, zero_init: bool) -> str:
    return f"offload_param={parameters:<4} offload_optimizer={optimizer:<4} zero_init={int(zero_init)}"


def largest_module(work: Workload) -> int:
    """Parameters of the largest module by those that it has itself, as DeepSpeed's `model_to_params` counts.

    They are the embedding and the linear layers; each expert has its own.
    """
    linears = (linear.parameters.total // linear.copies for kind in work.kinds for linear in kind.cost.linears)
    return max(work.vocab_size * work.model.hidden_size, *linears)


def deepspeed_report(parameters: int, largest: int, cluster: Cluster) -> str:
    """Both tables as DeepSpeed prints them: GiB on the CPU of a node, GiB on a device, settings."""
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    lines = [
        f"DeepSpeed's estimates of model state for {parameters:,} parameters, {largest:,} in the largest module, "
        f"{nodes} of {cluster.gpus_per_node} devices; no activations are counted"
    ]
    for name, rows in (("ZeRO-2", zero2(parameters, cluster)), ("ZeRO-3", zero3(parameters, largest, cluster))):
        lines += ["", f"{name}: GiB a node's CPU | GiB a device | settings"]
        lines += [f"{row.cpu / GIB:9.2f} | {row.gpu / GIB:7.2f} | {row.settings}" for row in rows]
    return "\n".join(lines)
