"""Writer of Megatron-LM's `torch` format in any layout, one tensor in memory at a time.

The files of a stage's ranks are open together: each global tensor is read once, cut, and its parts are written
to all of them. Stages are written one after the other.
"""

import logging
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from megatronish.config.fields import one_of
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.core.files import new_folder
from megatronish.formats.megatron.experts import EXPERT, name_in_file
from megatronish.formats.megatron.grid import RankGrid
from megatronish.formats.megatron.latent import name_of_norms
from megatronish.formats.megatron.names import (
    EMBEDDING,
    FILE,
    HEAD,
    LATEST,
    LAYER,
    RELEASE,
    cuts,
    has_experts,
    local_name,
    local_shape,
    name_of_layer,
    place,
)
from megatronish.formats.megatron.our_arguments import arguments_of, flags_to_type
from megatronish.formats.torch_file.archive import TorchFileWriter
from megatronish.formats.weights import LazyTensor, Model
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import Sharding

logger = logging.getLogger(__name__)

VERSION = 3.0
TransformerImpl = Literal["transformer_engine", "local"]


def write(
    save: Path,
    model: Model,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    transformer_impl: TransformerImpl = "transformer_engine",
) -> None:
    """Write a folder that Megatron-LM loads as a `release`, with the tensor names of its `--transformer-impl`.

    UserError for a layout that the model cannot be cut into, RunError if the disk is full or fails.
    """
    description, tensors = model
    etp = tensor_parallel_size if expert_tensor_parallel_size is None else expert_tensor_parallel_size
    grid = RankGrid(tensor_parallel_size, pipeline_parallel_size, expert_parallel_size, etp)
    check_layout(description.model, grid, is_local=transformer_impl == "local")
    padded = description.model.padded_vocab_size(description.vocab_size, grid.tp)
    wanted = cuts(description, padded_vocab_size=padded, cuts_ways_down=transformer_impl == "local")
    args = arguments_of(description, grid, transformer_impl=transformer_impl, dtype=tensors[EMBEDDING].dtype)
    with new_folder(save, decisive=LATEST) as folder:
        for pp in range(grid.pp):
            stage = _Stage(description.model, grid, pp, transformer_impl)
            _write_stage(folder / RELEASE, stage, tensors, wanted, args)
        (folder / LATEST).write_text(RELEASE)
    if flags := flags_to_type(args):
        logger.warning("Megatron-LM's --use-checkpoint-args leaves out %s; type that too", " ".join(flags))


def check_layout(model: ModelConfig, grid: RankGrid, *, is_local: bool) -> None:
    """UserError for a layout that the model cannot be cut into."""
    has_dense = not all(model.expert_layers)
    of_experts = (
        ()
        if model.num_experts is None
        else (
            ("experts", model.num_experts, "expert", grid.ep),
            ("features of an expert", model.expert_ffn_size, "expert tensor", grid.etp),
            ("tensor parallel ranks", grid.tp, "expert tensor", grid.etp),
            ("set of biases of an expert", int(model.moe_add_bias_linear), "expert tensor", grid.etp),
            ("features of the shared experts", model.moe_shared_expert_intermediate_size or 0, "tensor", grid.tp),
        )
    )
    latents = (
        ()
        if not (model.multi_latent_attention and is_local)
        else (
            ("features of the queries' latent", model.q_lora_rank or 0, "tensor", grid.tp),
            ("features of the latent and its key", model.kv_lora_rank + model.qk_pos_emb_head_dim, "tensor", grid.tp),
        )
    )
    if model.num_experts is None and grid.ep > 1:
        raise UserError(f"a model without experts cannot be cut by an expert parallel size of {grid.ep}; leave it out")
    for what, number, axis, size in (
        *_key_value_heads(model, grid.tp),
        ("heads", model.num_attention_heads, "tensor", grid.tp),
        ("features of the MLP", model.ffn_size if has_dense else 0, "tensor", grid.tp),
        ("layers", model.num_layers, "pipeline", grid.pp),
        *of_experts,
        *latents,
    ):
        if size < 1 or number % size:
            fitting = [n for n in range(1, min(number, 64) + 1) if number % n == 0]
            article = "an" if axis.startswith("expert") else "a"
            raise UserError(
                f"{number} {what} cannot be cut by {article} {axis} parallel size of {size}; use {one_of(fitting)}"
            )


def _key_value_heads(model: ModelConfig, tp: int) -> list[tuple[str, int, str, int]]:
    """What a tensor parallel size must divide of keys and values: heads, or where ranks share one, its rows.

    Megatron-LM cuts the rows evenly then, wherever a head begins, and gathers them for each forward.
    """
    heads, size = model.num_kv_heads, model.head_size
    if tp < 1 or tp % heads or heads == model.num_attention_heads:
        return [("key/value heads", heads, "tensor", tp)]
    return [("rows of keys and values", 2 * heads * size, "tensor", tp)]


class _Stage(NamedTuple):
    """Stage of a pipeline, and which tensors its ranks have under which names."""

    model: ModelConfig
    grid: RankGrid
    pp: int
    transformer_impl: TransformerImpl

    def names(self, names: Collection[str]) -> Iterator[tuple[str, str, int | None]]:
        """(name in a file, global name, expert rank) of every tensor of the stage; without a rank, all have it."""
        model, is_grouped = self.model, self.transformer_impl == "transformer_engine"
        per_stage, last = model.num_layers // self.grid.pp, self.grid.pp - 1
        for name in names:
            if match := LAYER.fullmatch(name):
                layer, rest, ep = int(match[1]), match[2], None
                if expert := EXPERT.fullmatch(name):
                    assert model.num_experts is not None
                    ep, number = divmod(int(expert[2]), model.num_experts // self.grid.ep)
                    rest = f"{rest.removesuffix(expert[2])}{number}"
                if has_experts(layer, model):
                    rest = name_in_file(rest, is_grouped=is_grouped)
                if model.multi_latent_attention:
                    rest = name_of_norms(rest, is_local=not is_grouped)
                stage, number = (last, layer) if layer >= model.num_layers else divmod(layer, per_stage)
                if stage == self.pp:
                    here = name_of_layer(number, rest, model)
                    yield here if is_grouped else local_name(here), name, ep
            elif self.pp == (0 if name.startswith("embedding.") else last):
                yield name, name, None
        if 0 < last == self.pp and model.num_depths:  # layers of multi-token prediction embed further tokens there
            yield from ((name, name, None) for name in names if name.startswith("embedding."))
        if model.tied and 0 < last == self.pp:
            yield HEAD, EMBEDDING, None


def _write_stage(
    folder: Path,
    stage: _Stage,
    tensors: Mapping[str, LazyTensor],
    wanted: Mapping[str, Sharding],
    args: Mapping[str, Any],
) -> None:
    """Write the files of a stage's ranks together: each tensor is read once and cut."""
    grid, names = stage.grid, list(stage.names(wanted))
    with ExitStack() as stack:
        writers = []
        for tp, ep in grid.ranks():
            # Every rank's pickle describes its parts by shape and dtype alone.
            parts = OrderedDict(
                (name, _part(tensors[global_name], wanted[global_name], _axis(grid, global_name, tp)))
                for name, global_name, holder in names
                if holder in (None, ep)
            )
            content = {"args": Namespace(**args), "checkpoint_version": VERSION, "iteration": 0, "model": parts}
            path = folder / grid.folder(tp, stage.pp, ep) / FILE
            path.parent.mkdir(parents=True)
            writers.append((tp, ep, stack.enter_context(TorchFileWriter(path, content))))
        for _, global_name, holder in names:
            whole = tensors[global_name].read()
            for tp, ep, writer in writers:
                if holder in (None, ep):
                    writer.add(_rows(whole, wanted[global_name], _axis(grid, global_name, tp)))
            del whole  # before the next is read


def _axis(grid: RankGrid, name: str, tp: int) -> Axis:
    """Axis that cuts a tensor, at a tensor rank."""
    return grid.expert_axis(tp) if EXPERT.fullmatch(name) else grid.dense_axis(tp)


def _part(whole: LazyTensor, cut: Sharding, axis: Axis) -> LazyTensor:
    return LazyTensor(local_shape(cut, axis.size), whole.dtype, whole.read)


def _rows(whole: Tensor, cut: Sharding, axis: Axis) -> list[Tensor]:
    """A rank's part of a global tensor, as pieces of dim 0 in order; padding is zero."""
    pieces = [place(piece, whole) for piece in cut.pieces({axis.name: axis})]
    missing = local_shape(cut, axis.size)[0] - sum(len(rows) for rows in pieces)
    return [*pieces, whole.new_zeros(missing, *whole.shape[1:])] if missing else pieces
