"""megatron-core in a process group, without a GPU and without Transformer Engine."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """What megatron-core puts on a GPU whatever it is told."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@contextlib.contextmanager
def core_on_cpu(tp_size: int, pp_size: int, ep_size: int = 1) -> Iterator[None]:
    """megatron-core's process groups, within a default group that ends with them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)  # before a checkpoint is written
    patch.setattr(Tensor, "cuda", lambda self, *_args, **_kwargs: self)
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # routers ask for it, with the engine or without
    patch.setattr(multi_latent_attention, "TELinear", type("TELinear", (), {}))  # asked for by isinstance
    parallel_state.initialize_model_parallel(tp_size, pp_size, expert_model_parallel_size=ep_size)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # the others ask CUDA for its generator
    try:
        with _OnCpu():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        patch.undo()
