"""Where does each fused operation run, and why there?

An operator is a function of torch's dispatcher, `torch.ops.megatronish.<name>`. Its reference, in torch, runs on every
device; where the library of CUDA kernels has been built, it puts kernels before the references of CUDA tensors. It is
looked for once, beside this file, and never built here: `python setup.py build_ext --inplace` does that.

For tests the same operators exist a second time, in another namespace, with the kernels on the CPU (kernels/emulator).
"""

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.ops.build import SOURCES, sources_hash

NAMESPACE = "megatronish"
LIBRARY = Path(__file__).with_name("kernels_cuda.so")  # where setup.py puts it
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def like(x: Tensor, *_: Any) -> Tensor:
    """A contiguous tensor without values, as kernels make their outputs."""
    return x.new_empty(x.shape)


class Operator(NamedTuple):
    """What torch has to know of an operator: `fake` makes outputs without values, for meta tensors and compilation.

    Unless told otherwise there is one output, like the first argument. `backward(ops, ctx, *grads)` is given the
    namespace it was called in, so that it finds the operators beside it; `setup_context(ctx, inputs, output)` saves
    what it needs.
    """

    schema: str  # "name(Tensor x, float scale) -> Tensor"
    reference: Callable[..., Any]
    fake: Callable[..., Any] = like
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """`scaled_causal_softmax`."""
        return self.schema.partition("(")[0]


class OperatorFamily(NamedTuple):
    """Operators that share a file of kernels: kernels/<name>.cu."""

    name: str
    operators: tuple[Operator, ...]


_REGISTRATIONS: list[torch.library.Library] = []  # torch drops what nobody holds


def define(family: OperatorFamily, *, namespace: str = NAMESPACE) -> Any:
    """Register a family's operators -> `torch.ops.<namespace>`, where they are found."""
    registration = torch.library.Library(namespace, "FRAGMENT")
    _REGISTRATIONS.append(registration)
    ops = getattr(torch.ops, namespace)
    for each in family.operators:
        name = f"{namespace}::{each.name}"
        registration.define(each.schema, tags=(torch.Tag.pt2_compliant_tag,))
        registration.impl(each.name, each.reference, "CompositeExplicitAutograd")
        torch.library.register_fake(name, each.fake, lib=registration)
        if each.backward is not None:
            backward = partial(_differentiate_once, each, ops)
            torch.library.register_autograd(name, backward, setup_context=each.setup_context, lib=registration)
    load_kernels()
    return ops


def _differentiate_once(operator: Operator, ops: Any, ctx: Any, *grads: Any) -> Any:
    if torch.is_grad_enabled():  # torch would take what the kernels of the backward make for constants
        raise RuntimeError(
            f"{operator.name} can be differentiated once: its gradients have no gradient, so create_graph=True is not "
            "for it"
        )
    assert operator.backward is not None
    return operator.backward(ops, ctx, *grads)


@cache
def load_kernels() -> str | None:
    """Load the library of CUDA kernels, once: None, or why there is none. It takes no GPU to load it."""
    if os.environ.get("MEGATRONISH_KERNELS") == "0":
        return "MEGATRONISH_KERNELS is 0"
    if not LIBRARY.exists():
        return "the kernels are not built: python setup.py build_ext --inplace"
    if (SOURCES / "bindings.cpp").exists() and not _is_of_these_sources(LIBRARY):
        return "the kernels were built from other sources than these: python setup.py build_ext --inplace"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY} does not load: {error.__cause__ or error}"
    return None


def _is_of_these_sources(library: Path) -> bool:
    expected = sources_hash().encode()
    with library.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(expected)))
        return file.read() == expected


def report_line(family: OperatorFamily, device: torch.device) -> str:
    """Which implementation a family's operators have on a device, and why not the kernel where it is not."""
    reason = _why_not(family, device)
    return f"{family.name}: {'CUDA kernels' if reason is None else f'torch, because {reason}'}"


def has_kernels(family: OperatorFamily) -> bool:
    """Whether a family's operators run as kernels on CUDA, for those who go another way where they do not."""
    return _why_not(family, torch.device("cuda")) is None


def _why_not(family: OperatorFamily, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the kernels are for CUDA and this runs on {device.type}"
    reason = load_kernels()
    if reason is not None:
        return reason
    names = (f"{NAMESPACE}::{each.name}" for each in family.operators)
    absent = [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
    if absent:
        return f"{LIBRARY.name} has no {', '.join(absent)}: build it again"
    return None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What references compute in: fp32 as kernels do, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
