"""Settings of the data ranks: what ZeRO shards, in which precision, and what overlaps with computing."""

from dataclasses import dataclass
from typing import Literal

import torch

from megatronish.config.sections.parallel import ParallelConfig


@dataclass(frozen=True)
class DataParallelSettings:
    """What a config says of the data ranks.

    `dtype` is that of the model, `reduce_dtype` that of gradients on their way. `bucket_size` counts elements.
    `offload` says what lives in the CPU's memory: masters and optimizer states, or the parameters with them (ZeRO-3).
    """

    zero_stage: int = 0
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    bucket_size: int = 8_000_000
    overlap_reduce: bool = True
    overlap_gather: bool = True
    offload: Literal["none", "optimizer", "parameters"] = "none"

    @property
    def masters_on(self) -> torch.device | None:
        """Device of the masters, if it is not that of the parameters."""
        return torch.device("cpu") if self.offload == "optimizer" else None

    @property
    def alignment(self) -> int:
        """Elements of the model's precision in 16 bytes."""
        return 16 // self.dtype.itemsize

    @classmethod
    def of(cls, parallel: ParallelConfig, dtype: torch.dtype) -> "DataParallelSettings":
        """As the flags say. Parameters that are offloaded take their masters along."""
        offload: Literal["none", "optimizer", "parameters"] = "none"
        if parallel.param_cpu_offload:
            offload = "parameters"
        elif parallel.optimizer_cpu_offload:
            offload = "optimizer"
        return cls(
            zero_stage=parallel.zero,
            dtype=dtype,
            reduce_dtype=torch.bfloat16 if parallel.grad_reduce_in_bf16 else torch.float32,
            bucket_size=parallel.ddp_bucket_size,
            overlap_reduce=parallel.overlap_grad_reduce,
            overlap_gather=parallel.overlap_param_gather,
            offload=offload,
        )
