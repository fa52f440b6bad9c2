"""Launches of the kernels in Triton by Triton's own launcher, down to a driver that starts nothing.

    TRITON_LIBCUDA_PATH=FOLDER LD_LIBRARY_PATH=FOLDER python tests/support/triton_launches.py

FOLDER has the stand-in for CUDA's driver of `build_driver`. It prints a line for each launch: the kernel, its grid and
its threads. What a launch does on a GPU before the device runs is done here: arguments are told apart, kernels are
compiled for an H100 and loaded, Triton's C is built and flattens tuples of arguments.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatronish.attention import dropout_attention
from megatronish.ops import cross_entropy, dropout, nf4, norm, permutation, rope
from megatronish.ops.library import OperatorFamily, in_triton

DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef int R;
R cuInit(unsigned f) { return 0; }
R cuGetErrorString(R e, const char **s) { *s = "none"; return 0; }
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuDeviceGet(int *d, int i) { *d = i; return 0; }
R cuDeviceGetCount(int *n) { *n = 1; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = 232448; return 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
R cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
R cuCtxSetCurrent(void *c) { return 0; }
R cuCtxGetDevice(int *d) { *d = 0; return 0; }
R cuCtxGetLimit(size_t *v, int l) { *v = 0; return 0; }
R cuCtxSetLimit(int l, size_t v) { return 0; }
R cuModuleLoadData(void **m, const void *data) { *m = (void *)data; return memcmp(data, "\x7f" "ELF", 4); }
R cuModuleUnload(void *m) { return 0; }
R cuModuleGetFunction(void **f, void *m, const char *name) { *f = strdup(name); return 0; }
R cuFuncGetAttribute(int *v, int a, void *f) { *v = 1024; return 0; }
R cuFuncSetAttribute(void *f, int a, int v) { return 0; }
R cuFuncSetCacheConfig(void *f, int c) { return 0; }
R cuStreamIsCapturing(void *s, int *status) { *status = 0; return 0; }
R cuPointerGetAttribute(void *to, int a, uint64_t p) { *(uint64_t *)to = p; return 0; }
R cuLaunchKernelEx(const unsigned *config, void *f, void **arguments, void **extra) {
  printf("%s %u %u %u\n", (char *)f, config[0], config[1], config[3]);
  return fflush(stdout);
}
"""


def build_driver(folder: Path, compiler: str) -> None:
    """Make the stand-in for libcuda.so.1."""
    command = [compiler, "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=DRIVER, text=True, check=True)


def launch(family: OperatorFamily, name: str, *given: Any) -> Any:
    """Call an operator as Triton computes it."""
    (operator,) = (each for each in family.operators if each.name == name)
    return in_triton(operator)(*given)


def launch_all() -> None:
    """Call every operator that is in Triton, in bf16, twice: the second time with what the first has compiled."""
    half: Callable[..., torch.Tensor] = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)  # noqa: E731
    order, keys, samples = torch.arange(12), torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    place, row = (keys, samples, torch.zeros(2, 40, dtype=torch.int64), torch.zeros(6)), torch.zeros(4, 1)
    qkv = half(40, 2, 10, 64)
    q, k, v = qkv.split((6, 2, 2), dim=2)
    seen = (*place, 0, 16, True, 0.1)
    for _ in range(2):
        out, lse = launch(dropout_attention.FAMILY, "dropped_attention", q, k, v, half(6), *seen)
        given = (out, q, k, v, half(6), out, lse, *seen)
        launch(dropout_attention.FAMILY, "dropped_attention_backward", *given)
        launch(dropout.FAMILY, "dropout_add", qkv, qkv, keys, samples, torch.arange(40), 0.1)
        tile = (*place, 0, 0, 0, None, True, 0.1, 0.1)
        scores, rows = torch.zeros(2, 6, 40, 40), torch.zeros(2, 6, 40)
        launch(dropout.FAMILY, "softmax_dropout", scores, rows, *tile)
        launch(dropout.FAMILY, "softmax_dropout_backward", scores, scores.clone(), rows, rows, *tile)
        launch(rope.FAMILY, "rotate", q, torch.zeros(40, 1, 1, 32), torch.zeros(40, 1, 1, 32), False, False)
        launch(nf4.FAMILY, "nf4_unpack_", half(4, 128), torch.zeros(4, 66).byte(), torch.zeros(3), 0, 2, 0)
        logits, labels, number = half(4, 5000), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
        launch(cross_entropy.FAMILY, "cross_entropy_statistics", logits, labels, 0, 4990)
        launch(cross_entropy.FAMILY, "cross_entropy_gradient_", logits, labels, number, number, number, 0, 4990)
        x, weight = half(4, 96), half(96)
        launch(norm.FAMILY, "add_layer_norm", x, x, weight, weight, 1e-5, False)
        launch(norm.FAMILY, "layer_norm_backward", x, x, x, weight, row, row, False)
        launch(norm.FAMILY, "rms_norm", x, weight, 1e-5, True)
        launch(norm.FAMILY, "rms_norm_backward", x, None, x, weight, row, True)
        launch(permutation.FAMILY, "spread", x, order, order, 3)
        launch(permutation.FAMILY, "collect", half(12, 96), torch.zeros(4, 3), order, order, 3)
        launch(permutation.FAMILY, "collect_backward", x, half(12, 96), torch.zeros(4, 3), order, order)


if __name__ == "__main__":
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    stream = SimpleNamespace(cuda_stream=0)
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "get_device_capability": lambda *_: (9, 0),
    }
    with patch.multiple(torch.cuda, **answers):
        driver.set_active(CudaDriver())
        launch_all()
