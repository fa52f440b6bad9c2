"""Layers compiled by torch.compile (--compile): what lies between two collectives becomes one graph.

All layers share one compiled function, so layers that are alike share its graphs. Nothing that changes from step to
step or from layer to layer is a constant of a graph: numbers of steps and layers only name random streams, whose keys
are tensors. What sends, defers weight gradients or has a backward of its own by hand is left as it is, and stands
between the graphs.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from megatronish.config.sections.training import EXPLICIT
from megatronish.layers.linear import ColumnParallelLinear, LinearLayer, RowParallelLinear
from megatronish.layers.norm import AllHeadsNorm, EachHeadNorm
from megatronish.layers.product import DENSE
from megatronish.model.attention import CoreAttention, KeyValueHeads, SelfAttention
from megatronish.model.block import TransformerBlock
from megatronish.model.context import Context
from megatronish.model.experts import MixtureOfExperts
from megatronish.ops.compiled import compile_function
from megatronish.ops.library import accumulation_dtype
from megatronish.ops.triton_host import why_triton_cannot_compile

MAX_GRAPHS = 64
"""Graphs of one function: kinds of layers, each with and without gradients and the first or a later one of its kind."""

PROBE = '#include <Python.h>\n#include <vector>\nextern "C" int probe() { return std::vector<int>{1}[0]; }\n'
MOST_SECONDS_OF_PROBE = 60.0


def why_not_compiled(device_type: str) -> str | None:
    """The reason why --compile cannot compile on a device of this machine, in one sentence; None where it can."""
    reason = why_triton_cannot_compile() if device_type == "cuda" else _why_no_cpp(os.environ.get("CXX", "g++"))
    return None if reason is None else f"--compile has no effect, the layers run eagerly: {reason}"


@cache
def _why_no_cpp(name: str) -> str | None:
    """What is wrong with a C++ compiler and what helps; None where it makes a library, as torch will ask it to."""
    if not name.strip():
        return "CXX is set to nothing; name a C++ compiler in it, or unset it to have g++"
    path = shutil.which(name)  # the whole of it: torch runs a program of this name, without a shell
    if path is None and shutil.which(name.split()[0]) is not None:
        return f"CXX={name!r} is not the name of a program; leave its options out: CXX={name.split()[0]}"
    if path is None:
        return f"there is no C++ compiler {name!r}; install one, or name it in CXX"
    if (said := _failure(path)) is None:
        return None
    return (
        f"the C++ compiler {name!r} cannot build a library with Python's headers ({said}); repair it (it may need "
        "python3-dev), or name another one in CXX"
    )


def _failure(compiler: str) -> str | None:
    """The first line of what a compiler complains about when it makes a small library; None if it makes it."""
    flags = ["-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", "-x", "c++", "-"]
    with TemporaryDirectory() as folder:
        library = Path(folder, "probe.so")
        try:
            done = subprocess.run(
                [compiler, *flags, "-o", str(library)],
                input=PROBE,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=MOST_SECONDS_OF_PROBE,
            )
        except subprocess.TimeoutExpired:
            return f"it did not end within {MOST_SECONDS_OF_PROBE:.0f} s"
        except OSError as error:
            return str(error.strerror)
        if done.returncode == 0 and library.exists():
            return None
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}, and nothing was said"]
    return next((line for line in lines if "error" in line), lines[0]).strip()


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """From now on these layers run compiled, each at its first forward; blocks of plug-ins stay as they are."""
    compiled = compile_function(_forward, most_graphs=MAX_GRAPHS)
    for layer in layers:
        if isinstance(layer, TransformerBlock):
            for module in layer.modules():
                _keep_out(module)
            layer.forward = partial(_run, compiled, layer)  # type: ignore[method-assign]


def _forward(layer: TransformerBlock, *inputs: Any) -> Tensor:
    return type(layer).forward(layer, *inputs)


def _run(compiled: Callable[..., Tensor], layer: TransformerBlock, x: Tensor, *others: Any) -> Tensor:
    """A layer's forward, whose last input is the context; in generation, of changing shapes, as it is."""
    context: Context = others[-1]
    if context.cache is not None:
        return _forward(layer, x, *others)
    _make_mask(layer.attention, context, x)
    return compiled(layer, x, *others)


def _make_mask(attention: SelfAttention, context: Context, x: Tensor) -> None:
    """Make what a layer's graph reads of the mask that layers share: made in a graph, it would be a graph of its own.

    And so would the next forward, which finds what the one before has made.
    """
    mask = context.mask(attention.spec.window, attention.slopes, attention.spec.pattern)
    backend = attention.core.backend if isinstance(attention.core, CoreAttention) else None
    is_explicit = backend in EXPLICIT
    if x.is_cuda and mask.needs_dense and backend in ("auto", None):
        _ = mask.blocks
    drops = context.attention_dropout(rate=attention.config.attention_dropout) is not None
    if backend is None or (drops and not is_explicit) or (x.is_cuda and backend == "auto"):
        return  # the core is between the graphs, or reads blocks alone
    if mask.slopes:
        _ = mask.whole_bias(accumulation_dtype(x.dtype) if is_explicit else x.dtype)
    elif not (backend == "fused_softmax" and mask.document_ids is None and mask.pattern is None):
        _ = mask.whole


def _keep_out(module: nn.Module) -> None:
    """Leave what cannot be part of a graph to run between graphs."""
    if isinstance(module, SelfAttention) and not _is_one_graph(module):
        module.core = torch.compiler.disable(module.core)
    if isinstance(module, MixtureOfExperts) or not _is_local(module):
        module.forward = torch.compiler.disable(module.forward)
    elif isinstance(module, LinearLayer):
        module.sum_of = None  # in a graph the weight gradient is autograd's


def _is_local(module: nn.Module) -> bool:
    """Whether a layer computes with torch's own functions alone."""
    if isinstance(module, SelfAttention):
        return module.is_local
    if isinstance(module, AllHeadsNorm):  # whose sums go over tp
        return module.tp.size == 1
    if isinstance(module, EachHeadNorm | KeyValueHeads):
        return module.sharers == 1
    if isinstance(module, LinearLayer) and (module.weight_gradients is not None or module.product is not DENSE):
        return False
    return not isinstance(module, ColumnParallelLinear | RowParallelLinear) or module.tp.size == 1


def _is_one_graph(attention: SelfAttention) -> bool:
    """Whether a layer's core attention is: on a ring, with sinks, by blocks, or recomputed it has its own backward."""
    core = attention.core
    is_plain = core.cp.size == 1 and not core.recompute and attention.spec.softmax == "vanilla"
    return is_plain and not _goes_by_blocks(attention)


def _goes_by_blocks(attention: SelfAttention) -> bool:
    """Whether a layer's core attention may be that of attention/block_sparse.py."""
    spec, device = attention.spec, next(attention.parameters()).device
    if attention.core.backend in EXPLICIT:
        return False
    if spec.pattern is not None and attention.config.attention_dropout > 0:
        return True
    return device.type == "cpu" and (spec.pattern is not None or spec.window is not None)
