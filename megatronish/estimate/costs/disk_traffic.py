"""Traffic of a local disk in a step: what --offload-folder has ranks read and write, in bytes of each parameter.

The optimizer reads and writes fp32 masters and moments. Masters that are apart from what is computed with are read once
more, to be rounded into it; parameters that are offloaded themselves are read for every forward and every backward.
Muon goes through the momenta and the masters of matrices twice: before and after these are orthogonalised. An outer
step reads masters and outer parameters twice and their momentum once, and writes all three.
"""

from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.core.names import OPTIMIZER_NAMES

ELEMENT = 4  # bytes: all that lies on a disk is fp32, but for what is frozen


class DiskTraffic(NamedTuple):
    """Bytes of a parameter of a rank's share: of one that learns once a step, and of any for each micro-batch.

    `held` lie on the disk: its master, its moments, and with islands the outer parameter and its momentum.
    """

    step_read: float = 0.0
    step_written: float = 0.0
    pass_read: float = 0.0
    held: float = 0.0

    @property
    def step(self) -> float:
        """Bytes once a step, both ways."""
        return self.step_read + self.step_written


def disk_traffic(config: Config, *, in_matrices: float = 1.0) -> DiskTraffic:
    """The traffic of a config, where so much of the parameters is in matrices of layers; none without a folder."""
    parallel, optimizer = config.parallel, OPTIMIZER_NAMES[config.optimizer.optimizer]
    if parallel.offload_folder is None:
        return DiskTraffic()
    once = ELEMENT * (1.0 + optimizer.moments)
    read = written = once
    if optimizer.matrix_moments is not None:
        read = (1 - in_matrices) * once + in_matrices * ELEMENT * (3 + optimizer.matrix_moments)
        written = (1 - in_matrices) * once + in_matrices * ELEMENT * (2 + optimizer.matrix_moments)
    held = once
    if parallel.outer_optimizer is not None:
        held += 2 * ELEMENT
        read += 5 * ELEMENT / parallel.outer_interval
        written += 3 * ELEMENT / parallel.outer_interval
    if parallel.param_cpu_offload:
        return DiskTraffic(read, written, 2 * ELEMENT, held)
    return DiskTraffic(read + ELEMENT, written, held=held)
