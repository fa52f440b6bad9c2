"""Data parallelism as the engine sees it: its settings, and what every stage of ZeRO has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel.block_codes import CodeType
from megatronish.parallel.mesh import Domain
from megatronish.parallel.sharding import Shard


class DataParallel(Protocol):
    """Parameters and gradients of one rank's stage, shared with other data ranks as a stage of ZeRO says.

    `shards` is what this rank keeps of each parameter for the optimizer, `gradients` the gradients of these elements,
    complete between `wait_for_offload` and the next `zero`. Both lack parameters of which it keeps nothing, and
    `gradients` the frozen ones (`requires_grad` is False). `counted` names the parameters of `shards` that this rank
    counts where every element must count once over `counting_axes` of its domain and pp (replicas count it, too).
    """

    domains: Mapping[str, Domain]
    shards: dict[str, Shard]
    gradients: dict[str, Tensor]
    counted: set[str]

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Buffer in which the gradient of each parameter adds up, where it is kept whole (stages 0 and 1)."""
        ...

    @property
    def sum_of(self) -> Callable[[nn.Parameter], GradientSum] | None:
        """Where a layer may add the gradient of a parameter itself, in stage 3 None. In stage 2 it is of a backward."""
        ...

    def zero(self) -> None:
        """Begin a step: every gradient is zero."""
        ...

    def begin_action(self, action: tuple[str, int, int], is_last: bool) -> None:
        """(kind, chunk, micro-batch) comes next, and is the last one of its kind in its chunk or not."""
        ...

    def weight_gradient_ready(self, parameter: nn.Parameter) -> None:
        """The W action at work has added all that it adds to this gradient."""
        ...

    def finish_reduction(self) -> None:
        """Returns once every gradient is summed: over data ranks, then over replicas, tp and tied stages."""
        ...

    def counted_gradients(self) -> Mapping[str, list[Tensor]]:
        """Flat tensors with the gradients that this rank counts, and zeros, by domain."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply every gradient of this rank by `factor`."""
        ...

    def wait_for_offload(self) -> None:
        """Returns once the gradients are where the optimizer reads them."""
        ...

    def gather_parameters(self, *, frozen: bool = False) -> None:
        """Round the masters into the model, on every rank; where they were loaded, the `frozen` ones too."""
        ...

    def wait_for_parameters(self) -> None:
        """Returns once the parameters that `gather_parameters` has rounded are there, for who reads them outside."""
        ...

    def gather_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """From now on the module's forward begins by waiting for these parameters."""
        ...


@dataclass(frozen=True)
class Offload:
    """What lives apart from the device: masters and optimizer states, or the parameters with them (ZeRO-3).

    It lives in the CPU's memory, or in a file in `folder` (parallel/disk.py).
    """

    what: Literal["nothing", "optimizer", "parameters"] = "nothing"
    folder: Path | None = None

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "Offload":
        """As the flags say. Parameters that are offloaded take their masters along."""
        folder = Path(parallel.offload_folder) if parallel.offload_folder is not None else None
        if parallel.param_cpu_offload:
            return cls("parameters", folder)
        return cls("optimizer", folder) if parallel.optimizer_cpu_offload else cls()

    @property
    def masters_on(self) -> torch.device | None:
        """Device of the masters, if it is not that of the parameters."""
        return torch.device("cpu") if self.what == "optimizer" else None

    @property
    def gradients_on(self) -> torch.device | None:
        """Device of the gradients that the optimizer reads, if they are copies.

        An optimizer that goes through masters on a disk chunk by chunk copies what it needs of gradients elsewhere.
        """
        return self.masters_on if self.folder is None else None


@dataclass(frozen=True)
class Overlap:
    """Which exchanges are in progress while layers compute: sums of gradients, and parameters gathered after a step."""

    reduce: bool = True
    gather: bool = True


@dataclass(frozen=True)
class DataParallelSettings:
    """What a config says of the data ranks.

    `dtype` is that of the model, `reduce_as` the form of gradients on their way: codes (coded_sums.py) are for those of
    matrices, and the others are in fp32. Matrices are used and sent as codes (coded_weights.py) in blocks of
    `weight_block` elements, if that is given. `bucket_size` counts elements.
    """

    zero_stage: int = 0
    dtype: torch.dtype = torch.float32
    reduce_as: Literal["fp32", "bf16"] | CodeType = "fp32"
    bucket_size: int = 8_000_000
    overlap: Overlap = Overlap()
    offload: Offload = Offload()
    weight_block: int | None = None

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of gradients on their way, if they are no codes."""
        return torch.bfloat16 if self.reduce_as == "bf16" else torch.float32

    @property
    def codes(self) -> CodeType | None:
        """Type of the codes, if there are any."""
        return self.reduce_as if self.reduce_as in ("int8", "int4") else None

    @property
    def alignment(self) -> int:
        """Elements of the model's precision in 16 bytes."""
        return 16 // self.dtype.itemsize

    @classmethod
    def of(cls, parallel: ParallelConfig, dtype: torch.dtype) -> "DataParallelSettings":
        """As the flags say."""
        return cls(
            zero_stage=parallel.zero,
            dtype=dtype,
            reduce_as=parallel.zero_quantized_gradients or ("bf16" if parallel.grad_reduce_in_bf16 else "fp32"),
            bucket_size=parallel.ddp_bucket_size,
            overlap=Overlap(parallel.overlap_grad_reduce, parallel.overlap_param_gather),
            offload=Offload.of(parallel),
            weight_block=parallel.zero_quantized_weights_block if parallel.zero_quantized_weights else None,
        )
