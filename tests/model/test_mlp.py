"""Tests of the MLP with a fused bias and activation, by the reference of the operator on the CPU."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers.linear import split_backward
from megatronish.layers.recompute import recompute
from megatronish.layers.weight_gradients import WeightGradients
from megatronish.model import mlp
from megatronish.ops import activation
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel.mesh import Axis, Mesh, TensorParallel, dense_domain
from megatronish.parallel.sharding import collect_shardings, initialize
from megatronish.specs.layers import LayerSpec

GELU = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, init_method_std=0.5)
CONFIGS = {
    "gelu": GELU,
    "tanh gelu": replace(GELU, openai_gelu=True),
    "swiglu": replace(GELU, swiglu=True),
    "swiglu without biases": replace(GELU, swiglu=True, disable_bias_linear=True),
    "squared relu": replace(GELU, squared_relu=True),
}
S, B = 6, 2


def results(
    config: ModelConfig, *, tp: Axis, sequence_parallel: bool = False, split: bool = False, again: bool = False
) -> list[Tensor]:
    """The output, the gradient of the input and those of all parameters."""
    one = mlp.MLP(config, LayerSpec.of(config).mlp, tp=TensorParallel(tp, sequence_parallel), output_std=0.5)
    initialize(one, collect_shardings(one), seed=3, domains=dense_domain(tp))
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()) + tp.rank * (name == "fc1.bias"))
    x = torch.randn(S // (tp.size if sequence_parallel else 1), B, 8, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    weights = {name: p for name, p in one.named_parameters() if name.endswith("weight")}
    sums = {parameter: torch.zeros_like(parameter) for parameter in weights.values()}
    defer = WeightGradients(lambda weight: GradientSum(sums[weight]))
    if split:
        split_backward(one, defer)
        defer.fill(chunk=0, micro_batch=0)
    y = recompute(one, x) if again else one(x)
    (y.square().sum()).backward()
    if split:
        defer.compute(chunk=0, micro_batch=0)
    found = [sums[p] if split and p in sums else p.grad for p in one.parameters()]
    assert x.grad is not None and all(grad is not None for grad in found)
    return [y.detach(), x.grad, *(grad for grad in found if grad is not None)]


def assert_fused_is_plain(config: ModelConfig, *, tp: Axis, **how: bool) -> None:
    plain = results(config, tp=tp, **how)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (mlp, activation):
            monkeypatch.setattr(module, "is_fused", lambda _: True)
        torch.testing.assert_close(results(config, tp=tp, **how), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("how", [{}, {"split": True}, {"again": True}], ids=["at once", "deferred", "recomputed"])
def test_a_fused_activation_changes_nothing(name: str, how: dict[str, bool]) -> None:
    assert_fused_is_plain(CONFIGS[name], tp=Axis("tp"), **how)


def on_two_ranks(place: Place, name: str) -> None:
    mesh = Mesh.start(Layout(tp=2), rank=place.rank, init_method=place.rendezvous)
    for sequence_parallel in (False, True):
        for split in (False, True):
            assert_fused_is_plain(CONFIGS[name], tp=mesh.tp, sequence_parallel=sequence_parallel, split=split)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_nor_over_ranks(name: str) -> None:
    run_ranks(2, on_two_ranks, name)
