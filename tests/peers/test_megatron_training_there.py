"""Tests of the state of megatron-core's optimizers in its format torch_dist. Run by `make test-peers`.

On CPU in one process: its optimizer in fp32, that in bf16 with masters, and the distributed one.

As a script, `python tests/peers/test_megatron_training_there.py DIR`, this writes tests/golden/megatron_training:
checkpoints after two iterations, and the losses of the next two. There every sample is the same, so no order of them
matters.
"""

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  the paths of tests

pytestmark = pytest.mark.peers("megatron.core")
peer: Any = pytest.importorskip(
    "megatron.core",
    reason="megatron-core is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from core_models import VOCAB_SIZE, arguments, positions, the_peer, their_model  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import Tensor  # noqa: E402

from megatronish.checkpoint.storage import CheckpointReader  # noqa: E402
from megatronish.checkpoint.tensors import stored_tensors  # noqa: E402
from megatronish.formats import native  # noqa: E402
from megatronish.formats.convert import Report, convert  # noqa: E402
from megatronish.formats.prove import compare_tensors  # noqa: E402

SAMPLE = [3, 17, 8, 22, 5, 11, 29, 0]
TOKENS = torch.tensor([SAMPLE, SAMPLE])
FULLY_RESHARDABLE = {
    "singleton_local_shards": True,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}
IN_BUCKETS = FULLY_RESHARDABLE | {"distrib_optim_sharding_type": "dp_reshardable"}


def _with_step(set_states: Any) -> Any:
    """Its setter of states, for torch's Adam, which has its step among them, as Transformer Engine's has not."""

    def set_all(self: Any, parameter: Any, tensors: dict[str, Tensor]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_states(self, parameter, {"step": state["step"].clone(), **tensors})

    return set_all


@contextlib.contextmanager
def _the_peer(ep_size: int = 1) -> Iterator[None]:
    """megatron-core on this rank. Its optimizers take tensors of a GPU alone, which they know by the type's name."""
    kind = Tensor.type

    def kind_on_gpu(self: Tensor, *args: Any, **how: Any) -> Any:
        return kind(self, *args, **how) if args or how else "torch.cuda." + kind(self).rpartition(".")[2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "type", kind_on_gpu)
        name = "_set_main_param_and_optimizer_states"
        patch.setattr(DistributedOptimizer, name, _with_step(getattr(DistributedOptimizer, name)))
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with the_peer(1, 1, ep_size), torch.enable_grad():
            yield


@pytest.fixture
def alone() -> Iterator[None]:
    with _the_peer():
        yield


class Training:
    """A model of megatron-core with its gradient buffers and its optimizer."""

    def __init__(self, args: Namespace, *, is_distributed: bool) -> None:
        torch.manual_seed(3)
        self.args, is_bf16 = args, args.params_dtype == torch.bfloat16
        model = their_model(args).to(args.params_dtype)
        buffers = DistributedDataParallelConfig(
            use_distributed_optimizer=is_distributed, grad_reduce_in_fp32=True, average_in_collective=False
        )
        self.model = DistributedDataParallel(model.config, buffers, model)
        how = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=is_bf16,
            params_dtype=args.params_dtype,
            use_distributed_optimizer=is_distributed,
        )
        self.optimizer = get_megatron_optimizer(how, [self.model])
        self.how = how
        self.schedule()

    def schedule(self) -> None:
        """Set what Megatron-LM's scheduler sets before each step."""
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.how.weight_decay * group["wd_mult"]
            group["lr"] = self.how.lr * group["lr_mult"]

    def step(self) -> float:
        """Take a step; the loss before it."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        logits = self.model(TOKENS, positions(), None).float()[..., :VOCAB_SIZE]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten())
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return float(loss)

    def save(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Save as Megatron-LM does after its second iteration."""
        iteration = folder / "iter_0000002"
        iteration.mkdir(parents=True)
        weights = self.model.module.sharded_state_dict(metadata=dict(metadata))
        content = {
            "args": self.args,
            "checkpoint_version": 3.0,
            "iteration": 2,
            "model": weights,
            "optimizer": self.optimizer.sharded_state_dict(weights, metadata=dict(metadata)),
        }
        dist_checkpointing.save(content, str(iteration), content_metadata=metadata)
        (folder / "latest_checkpointed_iteration.txt").write_text("2")

    def load(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Load weights and states as Megatron-LM does; an error for a tensor that is not there."""
        weights = self.model.module.sharded_state_dict(metadata=dict(metadata))
        states = self.optimizer.sharded_state_dict(weights, is_loading=True, metadata=dict(metadata))
        iteration = folder / "iter_0000002"
        loaded = dist_checkpointing.load(
            {"model": weights, "optimizer": states}, str(iteration), strict="raise_unexpected"
        )
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for inner in self.optimizer.chained_optimizers:  # the distributed one gives all parameters of torch's one step
            for state in inner.optimizer.state.values():
                state["step"] = state["step"].clone()
        self.schedule()


def trained(name: str, **how: Any) -> Training:
    """Training after two iterations of two samples."""
    training = Training(arguments(name, 1, 1, consumed_train_samples=4, **how.pop("arguments", {})), **how)
    for _ in range(2):
        training.step()
    return training


def converted(folder: Path) -> Report:
    return convert(folder / "theirs", folder / "ours", source="megatron", target="megatronish")


@pytest.mark.parametrize(("name", "is_distributed"), [("llama 3", False), ("gpt2", True), ("mixtral", True)])
def test_states_are_those_of_the_peer(tmp_path: Path, alone: None, name: str, is_distributed: bool) -> None:
    training = trained(name, is_distributed=is_distributed)
    training.save(tmp_path / "theirs", FULLY_RESHARDABLE)
    report = str(converted(tmp_path))
    assert "kept for the run that continues: exp_avg, exp_avg_sq after 2 steps, 4 samples" in report
    stored = stored_tensors(CheckpointReader(tmp_path / "ours" / "step_00000002"))
    parameters = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    for moment in ("exp_avg", "exp_avg_sq"):
        assert {f"optimizer.{moment}.{name}" for name in parameters} <= stored.keys()


@pytest.mark.parametrize("is_distributed", [False, True])
def test_weights_in_fp32_come_before_rounded_ones(tmp_path: Path, alone: None, is_distributed: bool) -> None:
    training = trained("llama 3", is_distributed=is_distributed, arguments={"params_dtype": torch.bfloat16})
    training.save(tmp_path / "theirs", FULLY_RESHARDABLE)
    assert "exp_avg, exp_avg_sq, weights in fp32 after 2 steps" in str(converted(tmp_path))
    rounded = training.model.module.state_dict_for_save_checkpoint()["decoder.layers.1.mlp.linear_fc2.weight"]
    masters = native.read(tmp_path / "ours").tensors["layers.1.mlp.fc2.weight"].read()
    assert masters.dtype == torch.float32 and not torch.equal(masters, rounded.float())
    assert torch.equal(masters.bfloat16(), rounded)
    how = {"source": "megatron", "target": "megatronish", "reading": {}, "dtype": None}
    assert "proved" in compare_tensors(tmp_path / "theirs", tmp_path / "ours", **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama 3", "mixtral"])
def test_the_peer_continues_with_the_states_of_a_checkpoint_of_ours(
    tmp_path: Path, alone: None, name: str, is_distributed: bool, dtype: torch.dtype
) -> None:
    """Its states come here and go back: its next losses are those of the training that did not stop."""
    how: dict[str, Any] = {"is_distributed": is_distributed, "arguments": {"params_dtype": dtype}}
    training = trained(name, **how)
    training.save(tmp_path / "theirs", FULLY_RESHARDABLE)
    converted(tmp_path)
    report = convert(
        tmp_path / "ours",
        tmp_path / "back",
        source="megatronish",
        target="megatron-dist",
        writing={"transformer_impl": "local"},
    )
    assert "kept for the run that continues: exp_avg, exp_avg_sq after 2 steps, 4 samples" in str(report)
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "2"
    expected = [training.step(), training.step()]
    how["arguments"] = {"params_dtype": dtype}
    again = Training(arguments(name, 1, 1, **how.pop("arguments")), **how)
    again.step()  # without Transformer Engine the distributed optimizer cannot load before it
    again.load(tmp_path / "back", FULLY_RESHARDABLE)
    rel = 1e-5 if dtype == torch.float32 else 1e-3
    assert [again.step(), again.step()] == pytest.approx(expected, rel=rel)


def continued_on_expert_ranks(place: Any, folder: Path, name: str, is_distributed: bool) -> list[float]:
    """Losses of two steps, of a checkpoint of ours."""
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    with _the_peer(ep_size=2):
        again = Training(arguments(name, 1, 1, expert_model_parallel_size=2), is_distributed=is_distributed)
        assert len(again.optimizer.chained_optimizers) == 2
        again.step()
        again.load(folder, FULLY_RESHARDABLE)
        return [again.step(), again.step()]


@pytest.mark.parametrize(
    ("name", "is_distributed"),
    [
        ("mixtral", False),
        ("mixtral", True),
        ("deepseek-v3", True),
    ],
)
def test_the_peer_continues_on_expert_ranks(tmp_path: Path, name: str, is_distributed: bool) -> None:
    with _the_peer():
        training = trained(name, is_distributed=is_distributed)
        training.save(tmp_path / "theirs", FULLY_RESHARDABLE)
        converted(tmp_path)
        expected = [training.step(), training.step()]
    writing = {"transformer_impl": "local", "expert_parallel_size": 2}
    convert(tmp_path / "ours", tmp_path / "back", source="megatronish", target="megatron-dist", writing=writing)
    for losses in run_ranks(2, continued_on_expert_ranks, tmp_path / "back", name, is_distributed):
        assert losses == pytest.approx(expected, rel=1e-5)
    for moments in ("back", "theirs"):  # what is written for two optimizers is read, too
        assert "after 2 steps" in str(
            convert(tmp_path / moments, tmp_path / f"{moments}_again", source="megatron", target="megatronish")
        )


def test_states_in_buckets_are_left_out_with_the_flag_that_keeps_them(tmp_path: Path, alone: None) -> None:
    training = trained("llama 3", is_distributed=True)
    training.save(tmp_path / "theirs", IN_BUCKETS)
    report = str(converted(tmp_path))
    assert "save it again with --dist-ckpt-optim-fully-reshardable to keep it" in report
    assert "the optimizer's state and the order of the data start from the beginning" in report


def write_golden(folder: Path) -> None:
    for name in ("llama 3", "mixtral"):
        with _the_peer():
            target = folder / name.replace(" ", "_")
            training = trained(name, is_distributed=name == "mixtral", arguments={"num_layers": 2})
            training.save(target, FULLY_RESHARDABLE)
            losses = [training.step(), training.step()]
            (target / "losses.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
