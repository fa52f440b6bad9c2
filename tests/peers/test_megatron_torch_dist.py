"""Tests of the format torch_dist against megatron-core's dist_checkpointing, both ways. Run by `make test-peers`.

On CPU with gloo: its layers without Transformer Engine ("local"), in one process and in two. What it saves is read here
with equal weights and logits, and what is written here it loads with `strict="raise_all"`: every key of its model is in
the checkpoint, and no other is.
"""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
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
from core_models import (  # noqa: E402
    SEQ_LENGTH,
    TYPED,
    VOCAB_SIZE,
    arguments,
    in_our_names,
    our_logits,
    the_peer,
    their_logits,
    their_model,
)
from megatron.core import dist_checkpointing  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import Tensor  # noqa: E402

from megatronish.formats.megatron import read as megatron  # noqa: E402
from megatronish.formats.megatron.arguments import model_of  # noqa: E402
from megatronish.formats.megatron.torch_dist import write as torch_dist  # noqa: E402
from megatronish.formats.weights import Description, LazyTensor, Model, from_ours  # noqa: E402
from megatronish.launch.place import Place  # noqa: E402

METADATA: dict[str, dict[str, Any] | None] = {
    "since 0.14": {"singleton_local_shards": True, "chained_optim_avoid_prefix": True},
    "before": None,
    "layers apart": {"non_homogeneous_layers": True},
}
TWO_RANKS = [
    ("llama 3", (2, 1, 1)),
    ("llama 3", (1, 2, 1)),
    ("gpt-oss", (2, 1, 1)),
    ("gpt-oss", (1, 2, 1)),
    ("deepseek", (1, 1, 2)),
    ("mixtral with biases", (1, 1, 2)),
    ("latent", (2, 1, 1)),
]
"""Models and layouts: tensor, pipeline and expert parallel size."""


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with the_peer(1, 1):
        yield


def save_there(folder: Path, name: str, metadata: str, layout: tuple[int, int, int] = (1, 1, 1)) -> Tensor | None:
    """Save a model as Megatron-LM does, with what it saves in addition; the model's logits."""
    torch.manual_seed(3)  # all ranks cut the same whole weights
    tp_size, pp_size, ep_size = layout
    args = arguments(name, tp_size, pp_size, expert_model_parallel_size=ep_size)
    model = their_model(args)
    if layout == (1, 1, 1):  # biases begin at zero, where none could be told from another
        for bias in (each for name, each in model.named_parameters() if name.endswith(".bias")):
            bias.normal_(0.0, 0.3)
    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True, exist_ok=True)
    known = METADATA[metadata]
    content = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.sharded_state_dict(metadata=known and dict(known)),
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 7},
        "num_floating_point_operations_so_far": 7e15,
    }
    dist_checkpointing.save(content, str(iteration), content_metadata=known)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    if layout == (1, 1, 1):  # the same in the format of one file a rank, to compare with
        path = folder / "ranks" / "mp_rank_00" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        weights = model.state_dict_for_save_checkpoint()
        torch.save({"args": args, "checkpoint_version": 3.0, "model": weights}, path)
    return their_logits(model, args)


def save_on_rank(place: Place, folder: Path, name: str, metadata: str, layout: tuple[int, int, int]) -> Tensor | None:
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    with the_peer(*layout):
        return save_there(folder, name, metadata, layout)


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("name", TYPED)
def test_what_the_peer_saved_has_its_logits_here(tmp_path: Path, alone: None, name: str, metadata: str) -> None:
    theirs = save_there(tmp_path, name, metadata)
    description, tensors = in_our_names(tmp_path)
    torch.testing.assert_close(our_logits(description, tensors), theirs, rtol=1e-5, atol=1e-5)
    of_ranks = in_our_names(tmp_path / "ranks")[1]
    assert tensors.keys() == of_ranks.keys()
    assert all(torch.equal(tensor.read(), of_ranks[each].read()) for each, tensor in tensors.items())


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize(("name", "layout"), TWO_RANKS)
def test_so_it_is_of_what_two_ranks_saved(
    tmp_path: Path, name: str, layout: tuple[int, int, int], metadata: str
) -> None:
    theirs = run_ranks(2, save_on_rank, tmp_path, name, metadata, layout)[-1]
    torch.testing.assert_close(our_logits(*in_our_names(tmp_path)), theirs, rtol=1e-5, atol=1e-5)


def write_here(folder: Path, name: str) -> Tensor:
    """Write a model of our own with random weights; its logits."""
    model = model_of(vars(arguments(name, 1, 1)), before_core=False)
    description = Description(model, vocab_size=VOCAB_SIZE, seq_length=SEQ_LENGTH)
    draw = torch.Generator().manual_seed(2)
    tensors = {
        ours: 0.5 * torch.randn(sharding.shape, generator=draw) for ours, sharding in description.shardings().items()
    }
    ours = {name: LazyTensor(tuple(t.shape), t.dtype, partial(torch.clone, t)) for name, t in tensors.items()}
    theirs = from_ours(ours, megatron.rules(description)).tensors
    torch_dist.write(folder, Model(description, theirs), transformer_impl="local")
    return our_logits(description, ours)


def load_there(folder: Path, layout: tuple[int, int, int] = (1, 1, 1)) -> Tensor | None:
    """The peer's logits of a checkpoint written here, from nothing but its files."""
    common = dist_checkpointing.load_common_state_dict(str(folder / "release"))
    tp_size, pp_size, ep_size = layout
    args = Namespace(**vars(common["args"]))
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp_size, pp_size
    args.expert_model_parallel_size = ep_size
    args.padded_vocab_size = 32 if tp_size == 1 else 40  # other padding than was written
    args.moe_token_dispatcher_type = "allgather"
    model = their_model(args)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    wanted = {"model": model.sharded_state_dict(metadata=metadata)}
    loaded = dist_checkpointing.load(wanted, str(folder / "release"), strict="raise_all")
    model.load_state_dict(loaded["model"], strict=True)
    return their_logits(model, args)


def load_on_rank(place: Place, folder: Path, layout: tuple[int, int, int]) -> Tensor | None:
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    with the_peer(*layout):
        return load_there(folder, layout)


@pytest.mark.parametrize("name", TYPED)
def test_what_is_written_here_has_our_logits_in_the_peer(tmp_path: Path, alone: None, name: str) -> None:
    ours = write_here(tmp_path / "ours", name)
    torch.testing.assert_close(load_there(tmp_path / "ours"), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "layout"), TWO_RANKS)
def test_so_it_is_in_layouts_of_two_ranks(tmp_path: Path, name: str, layout: tuple[int, int, int]) -> None:
    ours = write_here(tmp_path / "ours", name)
    theirs = run_ranks(2, load_on_rank, tmp_path / "ours", layout)[-1]
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
