"""Quantisation of the frozen linear layers of a stage (QLoRA): which of them, and how each lies on this rank.

Those that may have an adapter: embedding, output layer, norms and routers stay in the precision of the run.
"""

from collections.abc import Iterator

import torch
from torch import nn

from megatronish.layers.experts import StackedLinear
from megatronish.layers.linear import ALONE, ColumnParallelLinear, LinearLayer, RowParallelLinear
from megatronish.layers.nf4 import NF4Experts, NF4Form, NF4Product, NF4Weight
from megatronish.parallel.sharding import HasShardings


def quantise_base(model: nn.Module, *, double: bool) -> None:
    """From now on these layers of the model hold their weights in NF4, with values for a loader to fill in."""
    for layer in list(model.modules()):
        if isinstance(layer, LinearLayer) and layer.section_names:
            _quantise(layer, double=double)


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, str, NF4Weight]]:
    """(name of the weight, name of its scales, how they are stored) of each layer with a weight in NF4."""
    for name, module in model.named_modules():
        if isinstance(module, NF4Weight):
            yield f"{name.rpartition('.')[0]}.weight", f"{name}.scales", module


def _quantise(layer: LinearLayer, *, double: bool) -> None:
    assert isinstance(layer, HasShardings)
    dense, local = layer.shardings()["weight"], layer.weight
    held: NF4Weight
    if isinstance(layer, StackedLinear):
        form = NF4Form(layer.shape[-2:-1] * len(layer.section_names), layer.shape[-1], double)
        etp, cuts_columns = layer.parallel.etp, layer.cut_dim == len(layer.shape) - 1
        rows, columns = (ALONE.axis, etp) if cuts_columns else (etp, ALONE.axis)
        held = layer.grouped = NF4Experts(form, dense, rows=rows, columns=columns, num_local=local.shape[0])
    elif isinstance(layer, ColumnParallelLinear):
        form = NF4Form(layer.sections, layer.in_features, double)
        held = layer.product = NF4Product(form, dense, rows=layer.tp.axis, columns=ALONE.axis, num_local=None)
    else:
        assert isinstance(layer, RowParallelLinear)
        form = NF4Form((layer.out_features,), layer.in_features, double)
        held = layer.product = NF4Product(form, dense, rows=ALONE.axis, columns=layer.tp.axis, num_local=None)
    shape = held.stored_shape(tuple(local.shape))
    layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=local.device), requires_grad=False)
