"""Layers compiled by torch.compile (--compile): what lies between two collectives becomes one graph.

All layers share one compiled function, so layers that are alike share its graphs. Nothing that changes from step to
step or from layer to layer is a constant of a graph: numbers of steps and layers only name random streams, whose keys
are tensors. What sends, defers weight gradients or has a backward of its own by hand is left as it is, and stands
between the graphs.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from megatronish.layers.linear import ColumnParallelLinear, LinearLayer, RowParallelLinear
from megatronish.layers.norm import AllHeadsNorm
from megatronish.layers.product import DENSE
from megatronish.model.attention import Attention
from megatronish.model.block import TransformerBlock
from megatronish.model.context import Context
from megatronish.model.experts import MixtureOfExperts

MAX_GRAPHS = 64
"""Graphs of one function: kinds of layers, each with and without gradients and the first or a later one of its kind."""


def why_not_compiled(device_type: str) -> str | None:
    """The reason why --compile cannot compile on a device of this machine, in one sentence; None where it can."""
    if device_type == "cuda":
        missing, remedy = find_spec("triton") is None, "triton is not installed; pip install triton"
    else:
        name = os.environ.get("CXX", "g++")
        missing = shutil.which(name.split()[0]) is None if name.strip() else True
        remedy = f"there is no C++ compiler {name!r}; install one, or name it in CXX"
    return f"--compile has no effect, the layers run eagerly: {remedy}" if missing else None


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """From now on these layers run compiled, each at its first forward; blocks of plug-ins stay as they are."""
    compiled = torch.compile(_forward)  # which imports the compiler: a run without --compile does not wait for that
    settings = torch._dynamo.config  # of the process: not every version of torch takes this limit with the function
    settings.recompile_limit = max(settings.recompile_limit, MAX_GRAPHS)
    for layer in layers:
        if isinstance(layer, TransformerBlock):
            for module in layer.modules():
                _keep_out(module)
            layer.forward = partial(_run, compiled, layer)  # type: ignore[method-assign]


def _forward(layer: TransformerBlock, x: Tensor, context: Context) -> Tensor:
    return TransformerBlock.forward(layer, x, context)


def _run(compiled: Callable[..., Tensor], layer: TransformerBlock, x: Tensor, context: Context) -> Tensor:
    """A layer's forward; in generation, whose shapes change with every token, as it is."""
    if context.cache is not None:
        return _forward(layer, x, context)
    # The mask that layers share is made here: a first layer that made it would be a graph of its own.
    mask = context.mask(layer.attention.spec.window, layer.attention.slopes)
    if x.is_cuda and mask.needs_dense:
        _ = mask.blocks
    return compiled(layer, x, context)


def _keep_out(module: nn.Module) -> None:
    """Leave what cannot be part of a graph to run between graphs."""
    if isinstance(module, Attention) and not _is_one_graph(module):
        module.core = torch.compiler.disable(module.core)
    if isinstance(module, MixtureOfExperts) or not _is_local(module):
        module.forward = torch.compiler.disable(module.forward)
    elif isinstance(module, LinearLayer):
        module.sum_of = None  # in a graph the weight gradient is autograd's


def _is_local(module: nn.Module) -> bool:
    """Whether a layer computes with torch's own functions alone."""
    if isinstance(module, AllHeadsNorm):
        return module.tp.size == 1
    if isinstance(module, LinearLayer) and (module.weight_gradients is not None or module.product is not DENSE):
        return False
    return not isinstance(module, ColumnParallelLinear | RowParallelLinear) or module.tp.size == 1


def _is_one_graph(attention: Attention) -> bool:
    """Whether a layer's core attention is: on a ring, with sinks, or recomputed it has a backward of its own."""
    core = attention.core
    return core.cp.size == 1 and not core.recompute and attention.spec.softmax == "vanilla"
