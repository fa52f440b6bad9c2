"""Settings of the data ranks: what ZeRO shards, in which precision, and what overlaps with computing."""

from dataclasses import dataclass

import torch

from megatronish.config.parallel import ParallelConfig


@dataclass(frozen=True)
class DataParallelSettings:
    """What a config says of the data ranks.

    `dtype` is that of the model, `reduce_dtype` that of gradients on their way. `masters_on` is where masters live if
    not where the parameters do. `bucket_size` counts elements.
    """

    zero_stage: int = 0
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    bucket_size: int = 8_000_000
    overlap_reduce: bool = True
    overlap_gather: bool = True
    masters_on: torch.device | None = None
    offload_parameters: bool = False

    @property
    def alignment(self) -> int:
        """Elements of the model's precision in 16 bytes."""
        return 16 // self.dtype.itemsize

    @classmethod
    def of(cls, parallel: ParallelConfig, dtype: torch.dtype) -> "DataParallelSettings":
        """As the flags say. Parameters that are offloaded take their masters along."""
        offloads_masters = parallel.optimizer_cpu_offload and not parallel.param_cpu_offload
        return cls(
            zero_stage=parallel.zero,
            dtype=dtype,
            reduce_dtype=torch.bfloat16 if parallel.grad_reduce_in_bf16 else torch.float32,
            bucket_size=parallel.ddp_bucket_size,
            overlap_reduce=parallel.overlap_grad_reduce,
            overlap_gather=parallel.overlap_param_gather,
            masters_on=torch.device("cpu") if offloads_masters else None,
            offload_parameters=parallel.param_cpu_offload,
        )
