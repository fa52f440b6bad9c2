"""Tests of expert layers against megatron-core's: equal outputs and gradients. Run by `make test-peers`.

On CPU, in one process with gloo: its experts without Transformer Engine (SequentialMLP), which is handed the same
weights. Of its dispatchers `allgather` runs there. What it refuses is tested, too:

    alltoall              makes a CUDA stream as it is built
    flex                  needs more than one rank, and DeepEP or HybridEP, which are kernels for GPUs
    --moe-grouped-gemm    without Transformer Engine it needs the package grouped_gemm, bf16 and a GPU

All dispatchers compute the same: a sum over the chosen experts.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

pytestmark = pytest.mark.peers("megatron.core")
peer: Any = pytest.importorskip(
    "megatron.core",
    reason="megatron-core is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from peer_on_cpu import core_on_cpu  # noqa: E402
from torch import Tensor  # noqa: E402

from megatronish.attention.mask import AttentionMask  # noqa: E402
from megatronish.config.sections.model import ModelConfig  # noqa: E402
from megatronish.model.batch import MicroBatch  # noqa: E402
from megatronish.model.context import Context  # noqa: E402
from megatronish.model.experts import MixtureOfExperts  # noqa: E402
from megatronish.parallel.mesh import TensorParallel  # noqa: E402
from megatronish.specs.layers import ExpertsSpec, layer_specs  # noqa: E402

S, B, D = 24, 2, 32
SHAPE: dict[str, Any] = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
SIGMOID: dict[str, Any] = SHAPE | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
GROUPS: dict[str, Any] = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
KINDS: dict[str, dict[str, Any]] = {
    "softmax after the choice": SHAPE,
    "softmax after the choice, of groups": SHAPE | GROUPS,
    "softmax before the choice": SHAPE | {"moe_router_pre_softmax": True},
    "softmax before the choice, of groups": SHAPE | {"moe_router_pre_softmax": True} | GROUPS,
    "one expert": SHAPE | {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "sigmoid with bias": SIGMOID,
    "sigmoid with bias, of groups": SIGMOID | GROUPS,
    "shared experts": SHAPE | {"moe_shared_expert_intermediate_size": 80},
    "shared experts with a gate": SHAPE
    | {"moe_shared_expert_intermediate_size": 80, "moe_shared_expert_gate": True, "moe_router_pre_softmax": True},
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """megatron-core in a process group of one process, without a GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with core_on_cpu(1, 1):
        yield


def their_layer(options: dict[str, Any], dispatcher: str = "allgather", *, grouped: bool = False) -> Any:
    known = {field.name for field in fields(TransformerConfig)}
    config = TransformerConfig(
        **{name: value for name, value in options.items() if name in known},
        num_moe_experts=options["num_experts"],
        num_layers=1,
        hidden_size=D,
        num_attention_heads=4,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type=dispatcher,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        use_cpu_initialization=True,
        init_method_std=0.5,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=options["num_experts"], moe_grouped_gemm=grouped)
    return MoELayer(config, spec.submodules, layer_number=1)


def our_layer(options: dict[str, Any]) -> MixtureOfExperts:
    config = ModelConfig(
        num_layers=1, hidden_size=D, num_attention_heads=4, swiglu=True, disable_bias_linear=True, **options
    )
    (spec,) = layer_specs(config)
    assert isinstance(spec.mlp, ExpertsSpec)
    return MixtureOfExperts(config, spec.mlp, layer=0, tp=TensorParallel(), output_std=0.1)


def context() -> Context:
    tokens = torch.zeros(B, S, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, tokens.bool(), torch.arange(S).expand(B, S), torch.arange(B))
    mask = AttentionMask(S, device=torch.device("cpu"))
    return Context(batch, positions=torch.arange(S), rotations=None, causal_mask=mask, dropout=None)


def in_our_names(of_theirs: Any) -> dict[str, Tensor]:
    """Tensors of their layer, or what `of_theirs` takes of each, stacked under our names."""
    given = dict(of_theirs)
    e = sum(name.endswith("linear_fc1.weight") and ".local_experts." in name for name in given)
    fc1 = torch.stack([given[f"experts.local_experts.{i}.linear_fc1.weight"] for i in range(e)])
    fc2 = torch.stack([given[f"experts.local_experts.{i}.linear_fc2.weight"] for i in range(e)])
    ours = {
        "router.weight": given["router.weight"],
        "experts.gate_up.weight": fc1.unflatten(1, (2, -1)),
        "experts.down.weight": fc2,
    }
    for theirs, name in (
        ("shared_experts.linear_fc1.weight", "shared.fc1.weight"),
        ("shared_experts.linear_fc2.weight", "shared.fc2.weight"),
        ("shared_experts.gate_weight", "shared_gate.weight"),
    ):
        if theirs in given:
            ours[name] = given[theirs]
    assert sum(tensor.numel() for tensor in ours.values()) == sum(tensor.numel() for tensor in given.values())
    return ours


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Within 1e-5 of the largest element."""
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= 1e-5, f"{what}: {error}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_layer_is_that_of_the_peer(kind: str) -> None:
    torch.manual_seed(4)
    theirs, ours = their_layer(KINDS[kind]), our_layer(KINDS[kind])
    parameters = dict(ours.named_parameters())
    given = in_our_names((name, parameter.detach()) for name, parameter in theirs.named_parameters())
    assert given.keys() == parameters.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(given[name])
    if theirs.router.expert_bias is not None:
        theirs.router.expert_bias.uniform_(-0.5, 0.5)
        ours.router.state["bias"].copy_(theirs.router.expert_bias)
    x, dy = torch.randn(S, B, D), torch.randn(S, B, D)
    x_there, x_here = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_there, _ = theirs(x_there)
    y_here = ours(x_here, context())
    y_there.backward(dy)
    y_here.backward(dy)
    assert x_here.grad is not None and x_there.grad is not None
    assert_close(y_here, y_there, "output")
    assert_close(x_here.grad, x_there.grad, "gradient of the input")
    gradients = in_our_names((name, parameter.grad) for name, parameter in theirs.named_parameters())
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        assert_close(parameter.grad, gradients[name], name)


@pytest.mark.parametrize(
    ("dispatcher", "grouped", "error", "reason"),
    [
        ("alltoall", False, RuntimeError, "requires CUDA"),
        ("flex", False, AssertionError, "TPxEP > 1"),
        ("allgather", True, AssertionError, "Grouped GEMM is not available"),
    ],
)
def test_the_peer_refuses_these_on_a_cpu(dispatcher: str, grouped: bool, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        their_layer(SHAPE, dispatcher, grouped=grouped)
