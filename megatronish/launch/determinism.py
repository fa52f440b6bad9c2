"""Determinism and rounding of a process's kernels: torch's switches, set before the device is used."""

import os

import torch

from megatronish.config.sections.training import TrainingConfig

# cuBLAS and NCCL read these when they start: a workspace of its own for each stream, and one order of every sum.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def set_determinism(training: TrainingConfig) -> None:
    """Set torch's switches for --deterministic-mode and --disable-bf16-reduced-precision-matmul.

    With deterministic algorithms, torch's flash attention adds its gradients in one order, and an operation that has no
    deterministic kernel raises instead of computing. A variable that is set already is left as it is.
    """
    torch.use_deterministic_algorithms(training.deterministic_mode)
    if training.deterministic_mode:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch.backends.cudnn.benchmark = False
        # On by default, it writes NaN to whatever is allocated, once more over the memory, in case something reads
        # what it has not written. Nothing here does.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
        not training.disable_bf16_reduced_precision_matmul
    )
