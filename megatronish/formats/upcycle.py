"""Upcycling: the weights of a dense model as those of a model with experts, each expert a copy of the dense MLP.

Routers are not among them: they keep the initial values that a run draws for them by name. Where the weights of a
token's experts sum to one, the first output is that of the dense model (Komatsuzaki et al. 2023, arXiv:2212.05055).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.weights import LazyTensor


def upcycled(dense: Mapping[str, LazyTensor], model: ModelConfig) -> dict[str, LazyTensor]:
    """Lazy tensors of `model`, by our names, from those of a dense model of the same sizes; routers are left out.

    UserError, when they are loaded, if the dense model has other shapes.
    """
    found = dict(dense)
    sections = 2 if model.is_gated else 1
    for layer in (n for n, has_experts in enumerate(model.expert_layers) if has_experts):
        mlp = f"layers.{layer}.mlp"
        for dense_name, name, shape in (
            ("fc1", "gate_up", (sections, model.ffn_size, model.hidden_size)),
            ("fc2", "down", (model.hidden_size, model.ffn_size)),
        ):
            if (matrix := found.pop(f"{mlp}.{dense_name}.weight", None)) is not None:
                found[f"{mlp}.experts.{name}.weight"] = _copies(matrix, model.num_experts or 0, shape)
    return found


def _copies(matrix: LazyTensor, number: int, shape: tuple[int, ...]) -> LazyTensor:
    """Stack [number, *shape] of one matrix, of whose rows gate and up-projection are halves."""
    fits = matrix.like().numel() == torch.Size(shape).numel()
    shape = shape if fits else matrix.shape

    def part(start: int, stop: int) -> Tensor:
        return matrix.read().view(shape).expand(stop - start, *shape)

    return LazyTensor((number, *shape), matrix.dtype, lambda: part(0, number), part)
