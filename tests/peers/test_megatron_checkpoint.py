"""Tests of checkpoints against megatron-core: equal logits, whoever wrote them. Run by `make test-peers`.

On CPU: its layers without Transformer Engine ("local"), and so no apply_layernorm_1p, which those refuse.

As a script, `python tests/peers/test_megatron_checkpoint.py DIR`, this writes the checkpoints of tests/golden/megatron.
"""

import dataclasses
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
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

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from core_models import (  # noqa: E402
    SEQ_LENGTH,
    TYPED,
    VOCAB_SIZE,
    arguments,
    in_our_names,
    our_logits,
    our_losses_ahead,
    the_peer,
    their_logits,
    their_losses_ahead,
    their_model,
    tokens,
)
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import Tensor  # noqa: E402

from megatronish.core.errors import UserError  # noqa: E402
from megatronish.formats.megatron import read as megatron  # noqa: E402
from megatronish.formats.megatron.arguments import model_of  # noqa: E402
from megatronish.formats.megatron.names import LOCAL  # noqa: E402
from megatronish.formats.weights import Description, LazyTensor, Model, from_ours  # noqa: E402
from megatronish.launch.place import Place  # noqa: E402


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(3)
    with the_peer(1, 1):
        yield


def path_of_rank(folder: Path, args: Namespace) -> Path:
    """Where megatron-core's rank saves, or finds, its part."""
    rank = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        rank += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    return folder / rank / "model_optim_rng.pt"


def save_as_they_do(folder: Path, model: Any, args: Namespace) -> None:
    """All that Megatron-LM saves with a model, which its reader has to pass over."""
    path = path_of_rank(folder / "iter_0000007", args)
    path.parent.mkdir(parents=True, exist_ok=True)
    parameter = next(model.parameters())
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": ("MT19937", np.arange(4, dtype=np.uint32), 4, 0, 0.0),
        "torch_rng_state": torch.zeros(4, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.zeros(4, dtype=torch.uint8)},
    }
    content = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.state_dict_for_save_checkpoint(),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3), "step": np.float64(7)}}, "param_groups": [{"lr": 0.1}]},
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 7},
        "rng_state": [states],
        "num_floating_point_operations_so_far": 7e15,
        "parameter": parameter,
    }
    torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


AHEAD = [name for name in TYPED if TYPED[name].get("mtp_num_layers")]


@pytest.mark.parametrize("name", AHEAD)
def test_predictions_ahead_are_those_of_the_peer(tmp_path: Path, alone: None, name: str) -> None:
    args = arguments(name, 1, 1)
    model = their_model(args)
    save_as_they_do(tmp_path, model, args)
    assert our_losses_ahead(*in_our_names(tmp_path)) == pytest.approx(their_losses_ahead(model, args), rel=1e-5)


@pytest.mark.parametrize("name", TYPED)
def test_what_the_peer_saved_has_its_logits_here(tmp_path: Path, alone: None, name: str) -> None:
    args = arguments(name, 1, 1)
    model = their_model(args)
    save_as_they_do(tmp_path, model, args)
    torch.testing.assert_close(our_logits(*in_our_names(tmp_path)), their_logits(model, args), rtol=1e-5, atol=1e-5)


def test_a_bert_of_the_peer_is_refused_by_name(tmp_path: Path, alone: None) -> None:
    """It has all that our sentence and COMING_FROM say of it: a norm after the layers, none after the embedding."""
    args = arguments("gpt2", 1, 1)
    config = {
        field.name: getattr(args, field.name) for field in dataclasses.fields(TransformerConfig) if field.name in args
    }
    config |= {"layernorm_epsilon": args.norm_epsilon, "num_query_groups": None, "use_cpu_initialization": True}
    bert = BertModel(
        TransformerConfig(**config),
        2,
        bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=True,
    )
    names = set(bert.state_dict_for_save_checkpoint())
    assert {"encoder.final_layernorm.weight", "encoder.layers.0.input_layernorm.weight", "lm_head.dense.bias"} <= names
    assert "embedding.tokentype_embeddings.weight" in names and not [name for name in names if "embedding.norm" in name]
    save_as_they_do(tmp_path, bert, args)
    with pytest.raises(UserError, match="holds a BERT of Megatron-LM, which normalises before a sublayer"):
        megatron.read(tmp_path)


@pytest.mark.parametrize("name", TYPED)
def test_what_is_written_here_has_our_logits_in_the_peer(tmp_path: Path, alone: None, name: str) -> None:
    ours = write_here(tmp_path / "ours", name)
    found = load_there(tmp_path / "ours")
    torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-5)


def write_here(folder: Path, name: str, tp_size: int = 1, pp_size: int = 1) -> Tensor:
    """Write a model of our own with random weights; its logits."""
    args = arguments(name, tp_size, pp_size)
    model = model_of(vars(args), before_core=False)
    description = Description(model, vocab_size=VOCAB_SIZE, seq_length=SEQ_LENGTH)
    draw = torch.Generator().manual_seed(2)
    tensors = {
        ours: 0.5 * torch.randn(sharding.shape, generator=draw) for ours, sharding in description.shardings().items()
    }
    ours = {name: LazyTensor(tuple(t.shape), t.dtype, partial(torch.clone, t)) for name, t in tensors.items()}
    theirs = from_ours(ours, megatron.rules(description)).tensors
    layout = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
    megatron.write(folder, Model(description, theirs), transformer_impl="local", **layout)
    return our_logits(description, ours)


def load_there(folder: Path) -> Tensor | None:
    """The peer's logits of a checkpoint written here, from nothing but its file: every tensor must have its place."""
    size = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    args = Namespace(pipeline_model_parallel_size=size[1])
    content = torch.load(path_of_rank(folder / "release", args), weights_only=False)
    args = content["args"]
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == size
    model = their_model(args)
    model.load_state_dict(content["model"], strict=True)
    return their_logits(model, args)


def load_on_rank(place: Place, folder: Path, tp_size: int, pp_size: int) -> Tensor | None:
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    with the_peer(tp_size, pp_size):
        return load_there(folder)


def save_on_rank(
    place: Place, folder: Path, name: str, tp_size: int, pp_size: int, num_layers: int = 4
) -> Tensor | None:
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    torch.manual_seed(3)  # all ranks cut the same whole weights
    with the_peer(tp_size, pp_size):
        args = arguments(name, tp_size, pp_size, num_layers=num_layers)
        model = their_model(args)
        save_as_they_do(folder, model, args)
        return their_logits(model, args)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["gpt2", "llama 3", "multi-query", "qwen", "gpt-oss", "latent", *AHEAD[:2]])
def test_so_it_is_in_layouts_of_two_ranks(tmp_path: Path, name: str, tp_size: int, pp_size: int) -> None:
    ours = write_here(tmp_path / "ours", name, tp_size, pp_size)
    theirs = run_ranks(2, load_on_rank, tmp_path / "ours", tp_size, pp_size)[-1]
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    (tmp_path / "theirs").mkdir()
    theirs = run_ranks(2, save_on_rank, tmp_path / "theirs", name, tp_size, pp_size)[-1]
    torch.testing.assert_close(our_logits(*in_our_names(tmp_path / "theirs")), theirs, rtol=1e-5, atol=1e-5)


def test_the_peer_names_the_norms_of_transformer_engine_so() -> None:
    names = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    assert {theirs: local for local, theirs in names.items()} == LOCAL


if __name__ == "__main__":
    for name, tp_size, pp_size in (("gpt2", 1, 2), ("llama 3", 2, 1)):
        target = Path(sys.argv[1]) / name.replace(" ", "_")
        logits = run_ranks(2, save_on_rank, target, name, tp_size, pp_size, 2)[-1]
        torch.save({"tokens": tokens(), "logits": logits}, target / "logits.pt")
