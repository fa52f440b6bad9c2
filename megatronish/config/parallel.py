"""How is the model spread over ranks?"""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh's axes, and how the axes talk."""

    tensor_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """tp: ranks that share every layer."""
    pipeline_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 1
    """pp: stages that the layers are cut into."""
    data_parallel_size: Annotated[int | None, tyro.conf.arg(aliases=["--dp"])] = None
    """dp: copies of the model. Derived: all ranks / (tp pp cp), or 1 on a plain start."""
    context_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--cp"])] = 1
    """cp: ranks that share one sequence."""
    sequence_parallel: bool = False
    """Norms, dropout and the residual stream hold 1/tp of the sequence (needs tp > 1)."""
    pipeline_schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Order of forward and backward passes over the stages."""
    overlap_grad_reduce: bool = True
    """Start each gradient bucket's all-reduce during the last backward pass."""
    ddp_bucket_size: int = 8_000_000
    """Elements of one gradient bucket."""
    distributed_backend: str = "auto"
    """auto: nccl on CUDA, gloo on CPU; or any that torch.distributed knows, a plug-in's too."""
    distributed_timeout_minutes: float = 10.0
    """A collective that waits longer than this ends the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: tp * pp * cp."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
