"""Tests of the optimizer: torch's own steps, or apex's if installed; decay on matrices alone; global norms."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from jobs import tiny, train_on_ranks
from torch import Tensor, nn

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.optim.fused import FusedAdamChoice, adamw, find_fused_adam
from megatronish.optim.global_norm import global_norm, num_zeros
from megatronish.optim.optimizer import Optimizer, optimizer_line
from megatronish.parallel.mesh import Axis, dense_domain
from megatronish.parallel.sharding import Shard, Sharding
from megatronish.report.plot import read_lines

SHAPES = {"matrix": (4, 3), "bias": (4,), "norm": (3,)}
STATE_NAMES = {"adam": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
ALONE = dense_domain(Axis("tp"))
CPU = torch.device("cpu")


def parameters_of() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def optimizer_of(parameters: dict[str, nn.Parameter], config: OptimizerConfig) -> tuple[Optimizer, dict[str, Tensor]]:
    gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    shardings = {name: Sharding(shape) for name, shape in SHAPES.items()}
    shards = {name: Shard(parameter.detach(), ()) for name, parameter in parameters.items()}
    return Optimizer(shards, gradients, shardings, ALONE, config, device=CPU), gradients


def fill(gradients: dict[str, Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for gradient in gradients.values():
        gradient.copy_(torch.randn(gradient.shape, generator=generator))


ADAM = OptimizerConfig(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3)
SGD = OptimizerConfig(optimizer="sgd", sgd_momentum=0.7)


@pytest.mark.parametrize("is_cycled", [False, True])
@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adam", "sgd"])
def test_steps_are_those_of_torch(config: OptimizerConfig, is_cycled: bool) -> None:
    ours, theirs = parameters_of(), parameters_of()
    optimizer, gradients = optimizer_of(ours, config)
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.1},
        {"params": [theirs["bias"], theirs["norm"]], "weight_decay": 0.0},
    ]
    reference: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3)
        if config is ADAM
        else torch.optim.SGD(groups, momentum=0.7)
    )
    for step, (learning_rate, momentum) in enumerate([(0.1, 0.9), (0.05, 0.5), (0.2, 0.1), (0.0, 0.6)]):
        fill(gradients, step)
        optimizer.step(learning_rate=learning_rate, weight_decay=0.1, momentum=momentum if is_cycled else None)
        for group in reference.param_groups:
            group["lr"] = learning_rate
            if is_cycled:  # as torch.optim.lr_scheduler.OneCycleLR sets it
                group.update({"betas": (momentum, 0.9)} if config is ADAM else {"momentum": momentum})
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        reference.step()
        for name in SHAPES:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)
    assert optimizer.num_steps == 4


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adam", "sgd"])
def test_gradients_may_be_divided_as_the_kernel_reads_them(
    config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a division before the step would divide them by, and they stay divided; not where masters are here."""
    divided, reads_divided = parameters_of(), parameters_of()
    optimizer, gradients = optimizer_of(divided, config)
    reference, expected = optimizer_of(reads_divided, config)
    assert not optimizer.divides
    for step, divisor in enumerate([3.0, 1.0, 0.3]):
        fill(gradients, step)
        fill(expected, step)
        for gradient in expected.values():
            gradient.mul_(1 / divisor)
        optimizer.step(learning_rate=0.1, weight_decay=0.1, divisor=divisor)
        reference.step(learning_rate=0.1, weight_decay=0.1)
        for name in SHAPES:
            torch.testing.assert_close(gradients[name], expected[name], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(divided[name], reads_divided[name], rtol=1e-6, atol=1e-7)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert optimizer.divides
    assert not optimizer_of(parameters_of(), OptimizerConfig(optimizer="muon"))[0].divides
    monkeypatch.setattr("megatronish.optim.fused.find_fused_adam", lambda _: FusedAdamChoice(FusedAdam, "for the test"))
    assert config is SGD or not optimizer_of(parameters_of(), config)[0].divides


def test_only_matrices_decay() -> None:
    parameters = parameters_of()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer, _ = optimizer_of(parameters, ADAM)
    optimizer.step(learning_rate=0.1, weight_decay=0.5)  # gradients are zero
    torch.testing.assert_close(parameters["matrix"].detach(), before["matrix"] * (1 - 0.1 * 0.5))
    assert all(torch.equal(parameters[name], before[name]) for name in ("bias", "norm"))


VOCABULARY: dict[str, Sharding] = {
    "embedding": Sharding((4, 3), role="embedding"),
    "head": Sharding((4, 3), role="head"),
    "positions": Sharding((5, 3), role="positions"),
    "matrix": Sharding((4, 3)),
    "q_norm": Sharding((3,), role="qk_norm"),
    "norm": Sharding((3,)),
    "lora_a": Sharding((4, 3), role="lora_a"),
    "lora_b": Sharding((4, 3), role="lora_b"),
}


def stepped(config: OptimizerConfig, *, gradient: float, **rates: Any) -> dict[str, Tensor]:
    """How far a step moves each parameter, all of which were one."""
    masters = {name: torch.ones(sharding.shape) for name, sharding in VOCABULARY.items()}
    gradients = {name: torch.full_like(master, gradient) for name, master in masters.items()}
    shards = {name: Shard(master, ()) for name, master in masters.items()}
    optimizer = Optimizer(shards, gradients, VOCABULARY, ALONE, config, device=CPU)
    assert optimizer.state.keys() == masters.keys()
    optimizer.step(**rates)
    return {name: 1 - master for name, master in masters.items()}


@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
def test_word_embedding_and_head_have_a_rate_of_their_own_and_positions_do_not(name: str) -> None:
    config = OptimizerConfig(optimizer=name, decoupled_lr=1.0, lr=1.0)  # type: ignore[arg-type]
    rates = {"learning_rate": 0.1, "decoupled_learning_rate": 0.3}
    moved = stepped(config, gradient=1.0, weight_decay=0.0, **rates)
    for parameter in ("embedding", "head"):
        torch.testing.assert_close(moved[parameter], 0.3 * torch.ones(4, 3))
    for parameter in ("positions", "norm"):
        torch.testing.assert_close(moved[parameter], 0.1 * torch.ones(VOCABULARY[parameter].shape))
    alike = stepped(OptimizerConfig(optimizer=name), gradient=1.0, weight_decay=0.0, learning_rate=0.1)  # type: ignore[arg-type]
    torch.testing.assert_close(moved["matrix"], alike["matrix"])
    torch.testing.assert_close(alike["embedding"], 0.1 * torch.ones(4, 3))


@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
def test_b_of_lora_has_a_multiple_of_the_rate_if_asked_and_muon_leaves_both_factors_alone(name: str) -> None:
    config = OptimizerConfig(optimizer=name, loraplus_lr_ratio=16.0)  # type: ignore[arg-type]
    moved = stepped(config, gradient=1.0, weight_decay=0.0, learning_rate=0.01)
    torch.testing.assert_close(moved["lora_b"], 0.16 * torch.ones(4, 3))
    torch.testing.assert_close(moved["lora_a"], 0.01 * torch.ones(4, 3))
    alike = stepped(OptimizerConfig(optimizer=name), gradient=1.0, weight_decay=0.0, learning_rate=0.01)  # type: ignore[arg-type]
    torch.testing.assert_close(alike["lora_b"], alike["lora_a"])


def test_norms_of_queries_and_keys_decay_if_asked() -> None:
    rates = {"gradient": 0.0, "learning_rate": 0.1, "weight_decay": 0.5}
    usual = stepped(OptimizerConfig(), **rates)
    asked = stepped(OptimizerConfig(apply_wd_to_qk_layernorm=True), **rates)
    assert not usual["q_norm"].any() and not usual["norm"].any() and not asked["norm"].any()
    torch.testing.assert_close(asked["q_norm"], torch.full((3,), 0.05))


def test_a_decoupled_rate_may_be_zero_at_the_first_step_of_a_warm_up_and_at_the_end_of_a_decay(tmp_path: Path) -> None:
    rates = "--decoupled-lr 2e-2 --decoupled-min-lr 0 --min-lr 1e-3 --lr-warmup-init 0 --lr-warmup-iters 2"
    train_on_ranks(tiny(tmp_path / "run", f"{rates} --lr-decay-iters 4 --train-iters 5"))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["decoupled_learning_rate"] for line in lines] == pytest.approx([0, 1e-2, 2e-2, 1e-2, 0])


def test_a_decoupled_rate_is_put_back_with_its_count_of_steps() -> None:
    optimizer = Optimizer({}, {}, VOCABULARY, ALONE, OptimizerConfig(decoupled_lr=1.0), device=CPU)
    optimizer.num_steps = 5
    assert optimizer.num_steps == 5 and "vocabulary" in optimizer.updates
    with pytest.raises(AssertionError, match="a schedule of its own"):
        optimizer.step(learning_rate=0.1, weight_decay=0.0)


def test_the_values_of_the_shards_are_what_is_stepped() -> None:
    parameters = parameters_of()
    optimizer, gradients = optimizer_of(parameters, ADAM)
    fill(gradients, 0)
    before = parameters["matrix"].detach().clone()
    optimizer.step(learning_rate=0.1, weight_decay=0.0)
    assert optimizer.masters["matrix"].data_ptr() == parameters["matrix"].data_ptr()
    assert not torch.equal(parameters["matrix"], before)


def test_a_rank_that_keeps_nothing_steps_nothing() -> None:
    optimizer = Optimizer({}, {}, {"matrix": Sharding((4, 3))}, ALONE, ADAM, device=CPU)
    optimizer.step(learning_rate=0.1, weight_decay=0.1)
    assert (optimizer.num_steps, optimizer.state) == (1, {})


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adam", "sgd"])
def test_a_state_put_back_goes_on_as_if_never_stopped(config: OptimizerConfig) -> None:
    parameters = parameters_of()
    optimizer, gradients = optimizer_of(parameters, config)
    for step in range(3):
        fill(gradients, step)
        optimizer.step(learning_rate=0.1, weight_decay=0.1)

    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    resumed, same_gradients = optimizer_of(copies, config)
    for name, tensors in optimizer.state.items():
        assert set(tensors) == STATE_NAMES[config.optimizer]
        for key, tensor in tensors.items():
            resumed.state[name][key].copy_(tensor)
    resumed.num_steps = optimizer.num_steps
    for each, grads in ((optimizer, gradients), (resumed, same_gradients)):
        fill(grads, 3)
        each.step(learning_rate=0.1, weight_decay=0.1)
    assert all(torch.equal(parameters[name], copies[name]) for name in SHAPES)


class FusedAdam(torch.optim.Optimizer):
    """Stands in for apex's, whose kernels need CUDA: the same arguments, and steps counted by group as it counts."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: Any, eps: float, adam_w_mode: bool) -> None:
        self.given = {"lr": lr, "betas": betas, "eps": eps, "adam_w_mode": adam_w_mode}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1


def install_apex(monkeypatch: pytest.MonkeyPatch, fused_adam: object) -> None:
    for name in ("apex", "apex.optimizers", "amp_C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if fused_adam is not None:
        sys.modules["apex.optimizers"].FusedAdam = fused_adam  # type: ignore[attr-defined]


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_apex_steps_masters_on_cuda_and_is_told_what_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    install_apex(monkeypatch, FusedAdam)
    parameters = parameters_of()
    groups = [{"params": list(parameters.values()), "decays": True}]
    stepping = adamw(groups, config=ADAM, masters_on=CUDA)
    assert isinstance(stepping, FusedAdam)
    assert stepping.given == {"lr": 0.0, "betas": (0.8, 0.9), "eps": 1e-3, "adam_w_mode": True}
    assert isinstance(adamw(groups, config=ADAM, masters_on=CPU), torch.optim.AdamW)
    assert optimizer_line(ADAM, CUDA) == "apex's fused AdamW (masters are on CUDA)"
    assert optimizer_line(ADAM, CPU) == "torch's fused AdamW (masters are on the CPU)"
    assert optimizer_line(SGD, CUDA) == "torch's fused SGD"


def test_apex_finds_our_state_and_goes_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatronish.optim.fused.find_fused_adam", lambda _: FusedAdamChoice(FusedAdam, "for the test"))
    optimizer, _ = optimizer_of(parameters_of(), ADAM)
    optimizer.num_steps = 6
    inner = optimizer.updates["usual"].in_memory.inner
    optimizer.step(learning_rate=0.1, weight_decay=0.2)
    assert [(group["step"], group["lr"], group["weight_decay"]) for group in inner.param_groups] == [
        (7, 0.1, 0.2),
        (7, 0.1, 0.0),
    ]
    for name, master in optimizer.masters.items():
        assert all(inner.state[master][state] is tensor for state, tensor in optimizer.state[name].items())


@pytest.mark.parametrize(
    ("fused_adam", "reason"),
    [
        (None, "NVIDIA apex does not import: AttributeError: module 'apex.optimizers' has no attribute 'FusedAdam'"),
        (len, "apex.optimizers.FusedAdam is no optimizer: this is not NVIDIA's apex"),
        (dict, "apex.optimizers.FusedAdam is no optimizer: this is not NVIDIA's apex"),
    ],
)
def test_another_package_called_apex_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, fused_adam: object, reason: str
) -> None:
    install_apex(monkeypatch, fused_adam)
    assert find_fused_adam(CUDA) == (None, reason)
    assert optimizer_line(ADAM, CUDA) == f"torch's fused AdamW ({reason})"


def test_no_apex_or_apex_without_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install_apex(monkeypatch, FusedAdam)
    monkeypatch.setitem(sys.modules, "amp_C", None)
    assert find_fused_adam(CUDA) == (None, "there is no module amp_C of NVIDIA apex")
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.delitem(sys.modules, "apex.optimizers")
    assert find_fused_adam(CUDA) == (None, "there is no module apex.optimizers of NVIDIA apex")


def test_the_norm_and_the_zeros_are_of_all_elements() -> None:
    axes: dict[str, Any] = {"domains": ALONE, "pp": Axis("pp"), "device": CPU}
    flats = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [0.0], [12.0]])]
    assert float(global_norm({"dense": flats}, **axes)) == pytest.approx(13.0)
    assert num_zeros({"dense": flats}, **axes) == 2
    assert float(global_norm({"dense": []}, **axes)) == 0.0


@pytest.mark.parametrize("at_once", [False, True])
def test_the_norm_does_not_depend_on_how_a_long_gradient_is_cut(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed in fp32 all along, three million elements on one rank would differ from seven parts by 1e-5 and more.

    Of all parts at once, as on a GPU, or of one after the other.
    """
    if at_once:
        module = sys.modules[global_norm.__module__]
        monkeypatch.setattr(module, "sums_of_squares", lambda tensors: [module.sum_at_once(tensors)])
    flat = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = float(flat.double().square().sum().sqrt())
    for parts in ([flat], list(flat.chunk(7)), [flat[:5], flat[5:5], flat[5:]]):
        norm = float(global_norm({"dense": parts}, ALONE, pp=Axis("pp"), device=CPU))
        assert norm == pytest.approx(exact, rel=1e-10 if at_once else 1e-7)


@pytest.mark.gpu
def test_a_gpu_has_the_same_norm() -> None:
    flat = torch.randn(3_000_001, device="cuda") * 1e-3
    exact = float(flat.double().square().sum().sqrt())
    parts = [flat[:5], flat[5:5], flat[5:]]
    norm = global_norm({"dense": parts}, ALONE, pp=Axis("pp"), device=torch.device("cuda"))
    assert float(norm) == pytest.approx(exact, rel=1e-10)
