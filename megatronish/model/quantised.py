"""Quantisation of the frozen linear layers of a stage (QLoRA, LLM.int8): which of them, and how each lies on this rank.

Those that may have an adapter: embedding, output layer, norms and routers stay in the precision of the run.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.layers.experts import StackedLinear
from megatronish.layers.int8 import Int8Form
from megatronish.layers.linear import ALONE, ColumnParallelLinear, LinearLayer, RowParallelLinear, WholeLinear
from megatronish.layers.nf4 import NF4Form
from megatronish.layers.quantised import QuantisedExperts, QuantisedProduct, QuantisedWeight, StoredForm
from megatronish.parallel.sharding import HasShardings

MakeForm = Callable[[tuple[int, ...], int], StoredForm]
"""(rows of each section, inputs) of a matrix -> how it is stored."""


def form_of(config: AdapterConfig) -> MakeForm | None:
    """The form of --quantize-base; None without it."""
    if config.quantize_base is None:
        return None
    forms: dict[str, MakeForm] = {"nf4": partial(NF4Form, double=config.double_quantization), "int8": Int8Form}
    return forms[config.quantize_base]


def quantise_base(model: nn.Module, make: MakeForm) -> None:
    """From now on these layers of the model hold their weights in this form, with values for a loader to fill in."""
    for layer in list(model.modules()):
        if isinstance(layer, LinearLayer) and layer.section_names:
            _quantise(layer, make)


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, str, QuantisedWeight]]:
    """(name of the weight, name of its scales, how they are stored) of each layer with a quantised weight."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedWeight):
            yield f"{name.rpartition('.')[0]}.weight", f"{name}.scales", module


def _quantise(layer: LinearLayer, make: MakeForm) -> None:
    assert isinstance(layer, HasShardings)
    dense, local = layer.shardings()["weight"], layer.weight
    held: QuantisedWeight
    if isinstance(layer, StackedLinear):
        form = make(layer.shape[-2:-1] * len(layer.section_names), layer.shape[-1])
        etp, cuts_columns = layer.parallel.etp, layer.cut_dim == len(layer.shape) - 1
        rows, columns = (ALONE.axis, etp) if cuts_columns else (etp, ALONE.axis)
        held = layer.grouped = QuantisedExperts(form, dense, rows=rows, columns=columns, num_local=local.shape[0])
    elif isinstance(layer, ColumnParallelLinear):
        form = make(layer.sections, layer.in_features)
        held = layer.product = QuantisedProduct(form, dense, rows=layer.tp.axis, columns=ALONE.axis, num_local=None)
    else:
        assert isinstance(layer, RowParallelLinear | WholeLinear)
        form = make((layer.out_features,), layer.in_features)
        columns = layer.tp.axis if isinstance(layer, RowParallelLinear) else ALONE.axis
        held = layer.product = QuantisedProduct(form, dense, rows=ALONE.axis, columns=columns, num_local=None)
    shape = held.stored_shape(tuple(local.shape))
    layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=local.device), requires_grad=False)
