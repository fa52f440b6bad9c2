"""Registration of the fused operators with torch, and the library of their CUDA kernels.

An operator is a function of torch's dispatcher, `torch.ops.megatronish.<name>`. Its reference, in torch, runs on every
device. Where the library of CUDA kernels has been built, the dispatcher prefers a kernel to the reference for CUDA
tensors. The library is looked for once, next to this file, and never built here: `python setup.py build_ext --inplace`
builds it.

For tests the same operators exist a second time, in another namespace, with the kernels on the CPU (kernels/emulator).
"""

import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.ops.build import SOURCES, sources_hash
from megatronish.ops.triton_host import why_triton_cannot_compile

NAMESPACE = "megatronish"
LIBRARY = Path(__file__).with_name("kernels_cuda.so")  # where setup.py puts it
OLDEST_GPU = (8, 0)  # of bf16 in Triton
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def like(x: Tensor, *_: Any) -> Tensor:
    """An uninitialised contiguous tensor of the shape and dtype of x, as kernels allocate their outputs."""
    return x.new_empty(x.shape)


class Operator(NamedTuple):
    """An operator's schema, reference, fake implementation (for meta tensors and torch.compile) and gradient.

    By default there is one output, of the shape and dtype of the first argument. `setup_context(ctx, inputs, output)`
    saves what the backward needs; `backward(ops, ctx, *grads)` gets the namespace that it runs in, so that it calls the
    operators of the same namespace. `on_cpu` takes the place of the reference on the CPU, `triton` on
    CUDA where there is no kernel of the library: "norm.rms_norm" is a function of ops/triton/norm.py.
    """

    schema: str  # "name(Tensor x, float scale) -> Tensor"
    reference: Callable[..., Any]
    fake: Callable[..., Any] = like
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    on_cpu: Callable[..., Any] | None = None
    triton: str | None = None

    @property
    def name(self) -> str:
        """The operator's name in its namespace, such as `scaled_causal_softmax`."""
        return self.schema.partition("(")[0]


class OperatorFamily(NamedTuple):
    """Operators whose kernels share a source file, kernels/<name>.cu, unless Triton alone has them (not `in_cuda`).

    `why_not_on_cpu` is of a family that has C++ for the CPU: the reason why it cannot run, or None.
    """

    name: str
    operators: tuple[Operator, ...]
    why_not_on_cpu: Callable[[], str | None] | None = None
    in_cuda: bool = True


_IN_TRITON: set[str] = set()  # operators whose kernel for CUDA is in Triton
_REGISTRATIONS: list[torch.library.Library] = []  # torch unregisters a Library that is not kept


def define(family: OperatorFamily, *, namespace: str = NAMESPACE) -> Any:
    """Register the operators of a family with torch; return their namespace, `torch.ops.<namespace>`."""
    registration = torch.library.Library(namespace, "FRAGMENT")
    _REGISTRATIONS.append(registration)
    ops = getattr(torch.ops, namespace)
    for each in family.operators:
        name = f"{namespace}::{each.name}"
        # 1. The schema; the tag declares the operator ready for torch.compile.
        registration.define(each.schema, tags=(torch.Tag.pt2_compliant_tag,))
        # 2. The reference, for every device. This key ranks below "CUDA", so the kernel of a device takes precedence.
        registration.impl(each.name, each.reference, "CompositeExplicitAutograd")
        if each.on_cpu is not None and namespace == NAMESPACE:  # in others the CPU has the emulated kernels
            registration.impl(each.name, each.on_cpu, "CPU")
        # 3. Shapes and dtypes of the outputs without computing, for meta tensors and torch.compile.
        torch.library.register_fake(name, each.fake, lib=registration)
        # 4. The gradient; a backward operator of its own needs none.
        if each.backward is not None:
            backward = partial(_differentiate_once, each, ops)
            torch.library.register_autograd(name, backward, setup_context=each.setup_context, lib=registration)
    # 5. The kernels: the library's loader registers them for the key "CUDA" of these schemas.
    load_kernels()
    # 6. Kernels in Triton, where the library has none.
    if namespace == NAMESPACE and why_no_triton() is None:
        for each in family.operators:
            if each.triton is not None and not _has_cuda_kernel(each):
                _IN_TRITON.add(f"{namespace}::{each.name}")
                registration.impl(each.name, in_triton(each), "CUDA")
    return ops


def in_triton(operator: Operator) -> Callable[..., Any]:
    """The operator as Triton's kernel computes it, or its reference where the kernel does not take the arguments.

    Triton is imported at the first call, and compiles the kernel then.
    """
    assert operator.triton is not None
    module, _, name = operator.triton.partition(".")

    @cache
    def function() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"megatronish.ops.triton.{module}"), name)
        return found

    def run(*given: Any) -> Any:
        device = given[0].device
        known = all(each.dtype != torch.float64 for each in given if isinstance(each, Tensor))
        if known and _is_new_enough(device):
            try:
                # Triton launches on the current device.
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    answer = function()(*given)
            except Exception as error:
                error.add_note(f"{operator.name} is a kernel in Triton; MEGATRONISH_KERNELS=0 takes torch's operations")
                raise
            if answer is not NotImplemented:
                return answer
        return operator.reference(*given)

    return run


@cache
def _is_new_enough(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_GPU


def fuses_dropout(device_type: str) -> bool:
    """Whether dropout's masks and the scores of attention with dropout need no memory: Triton has all these kernels."""
    return device_type == "cuda" and why_no_triton() is None


@cache
def why_no_triton() -> str | None:
    """The reason why no kernel in Triton runs on a GPU, or None. CUDA builds of torch bring Triton along."""
    if os.environ.get("MEGATRONISH_KERNELS") == "0":
        return "MEGATRONISH_KERNELS is 0"
    return None if os.environ.get("MEGATRONISH_KERNELS") == ASSUMED else why_triton_cannot_compile()


def _differentiate_once(operator: Operator, ops: Any, ctx: Any, *grads: Any) -> Any:
    if torch.is_grad_enabled():  # with create_graph=True torch would treat the gradients as constants
        raise RuntimeError(
            f"{operator.name} can be differentiated once: its gradients have no gradient, so create_graph=True is not "
            "for it"
        )
    assert operator.backward is not None
    return operator.backward(ops, ctx, *grads)


ASSUMED = "assumed"
"""Value of MEGATRONISH_KERNELS with which operators take the way of their kernels and none is loaded: of a dry run."""


@cache
def load_kernels() -> str | None:
    """Load the library of CUDA kernels, once: None if it is loaded, else the reason. Loading needs no GPU."""
    if os.environ.get("MEGATRONISH_KERNELS") == "0":
        return "MEGATRONISH_KERNELS is 0"
    if os.environ.get("MEGATRONISH_KERNELS") == ASSUMED:
        return None
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
    """The implementation of a family's operators on a device; where it is not the kernels, with the reason."""
    reason = _why_not(family, device)
    kernels = "C++" if device.type == "cpu" else "CUDA kernels" if _why_no_cuda(family) is None else "Triton"
    return f"{family.name}: {kernels if reason is None else f'torch, because {reason}'}"


def has_kernels(family: OperatorFamily) -> bool:
    """Whether all operators of a family have kernels on CUDA; without them, callers use torch's own functions."""
    return _why_not(family, torch.device("cuda")) is None


def _why_not(family: OperatorFamily, device: torch.device) -> str | None:
    if device.type == "cpu" and family.why_not_on_cpu is not None:
        return family.why_not_on_cpu()
    if device.type != "cuda":
        return f"the kernels are for CUDA and this runs on {device.type}"
    in_cuda = _why_no_cuda(family)
    if in_cuda is None or (all(each.triton for each in family.operators) and why_no_triton() is None):
        return None
    return in_cuda if family.in_cuda else why_no_triton()


def _why_no_cuda(family: OperatorFamily) -> str | None:
    """The reason why the library of CUDA kernels does not run a family, or None."""
    if not family.in_cuda:
        return "it is in Triton alone"
    reason = load_kernels()
    if reason is not None or os.environ.get("MEGATRONISH_KERNELS") == ASSUMED:
        return reason
    absent = [f"{NAMESPACE}::{each.name}" for each in family.operators if not _has_cuda_kernel(each)]
    if absent:
        return f"{LIBRARY.name} has no {', '.join(absent)}: build it again"
    return None


def _has_cuda_kernel(operator: Operator) -> bool:
    """Whether the library has it."""
    name = f"{NAMESPACE}::{operator.name}"
    return name not in _IN_TRITON and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that references compute in: fp32, as kernels do, and fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)
