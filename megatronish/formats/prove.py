"""Proof of a conversion: what was written is read again and compared bit by bit, and logits with transformers' own.

The two parts together prove a conversion in any direction. The first holds the two folders to each other. The second
holds the one of Hugging Face to transformers, an implementation that shares no code with this one.
"""

import importlib
import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.checkpoint.save import state_tensors
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.errors import UserError
from megatronish.core.foreign import read_json
from megatronish.core.layout import ExpertLayout
from megatronish.formats import native
from megatronish.formats.adapters import merged
from megatronish.formats.convert import FORMATS, convert, training_of
from megatronish.formats.hf.family import CONFIG
from megatronish.formats.hf.tensors import FORMAT
from megatronish.formats.load_sharded import Allowed, check_source, load_weights, open_hf
from megatronish.formats.read_adapter import read_adapter
from megatronish.formats.weights import Description, LazyTensor, Training, to_ours
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.stage import build_stage
from megatronish.parallel.sharding import Piece
from megatronish.parallel.stages import Stages
from megatronish.parallel.streams import torch_stream

BOUND = 1e-5
SAMPLES, LONGEST = 2, 64


def prove(
    load: Path,
    save: Path,
    *,
    source: str,
    target: str,
    reading: Mapping[str, Any],
    dtype: torch.dtype | None,
    allow_unmatched: Allowed = False,
    adapter: Path | None = None,
) -> list[str]:
    """Sentences on what was proved of a conversion from `load` to `save`; UserError if it is wrong.

    `allow_unmatched` is what the conversion could leave out, `adapter` what it merged into the weights.
    """
    lines = [compare_tensors(load, save, source=source, target=target, reading=reading, dtype=dtype, adapter=adapter)]
    folders = [folder for folder, kind in ((save, target), (load, source)) if kind == FORMAT]
    if not folders:
        return lines
    if importlib.util.find_spec("transformers") is None:
        return [*lines, "logits were not compared: transformers is not installed; pip install transformers"]
    if "quantization_config" not in read_json(folders[0] / CONFIG):
        return [*lines, compare_logits(folders[0], allow_unmatched=allow_unmatched)]
    # Kernels of transformers for such weights need a GPU. The weights are the ones that were read, bit by bit above.
    with tempfile.TemporaryDirectory() as aside:
        plain = Path(aside) / "plain"
        convert(folders[0], plain, source=FORMAT, target=FORMAT, allow_unmatched=allow_unmatched)
        return [*lines, f"{compare_logits(plain)}, of the weights of {folders[0]} as they are read"]


def compare_tensors(
    load: Path,
    save: Path,
    *,
    source: str,
    target: str,
    reading: Mapping[str, Any],
    dtype: torch.dtype | None,
    adapter: Path | None = None,
) -> str:
    """Sentence on the tensors of both folders by our names, a row at a time; UserError for one that differs.

    Those of a training that the conversion keeps are among them.
    """
    description, theirs = FORMATS[source].read(load, **reading)
    before = to_ours(theirs, FORMATS[source].rules(description)).tensors
    training = None
    if adapter is None:
        training = training_of(load, description, source=source, target=target, reading=reading, dtype=dtype)
    else:
        before = merged(before, read_adapter(adapter, description), description.model)
    before |= {} if training is None else training.masters
    again = {"vocab_size": description.vocab_size} if "vocab_size" in FORMATS[target].reads else {}
    written, tensors = FORMATS[target].read(save, **again)
    ours = to_ours(tensors, FORMATS[target].rules(written))
    check_source(save, written, ours, allow_unmatched=False)
    unequal = [
        name
        for name, tensor in ours.tensors.items()
        if name not in before or not _are_equal(before[name], tensor, dtype or before[name].dtype)
    ]
    states = _states(training)
    kept = _states(FORMATS[target].read_training(save, written)) if states else {}
    unequal += [
        name for name, state in states.items() if name not in kept or not _are_equal(state, kept[name], state.dtype)
    ]
    if unequal:
        raise UserError(f"{save} is not proved: its {unequal[0]} is not that of {load}; do not use it, and report this")
    and_states = f" and {len(states)} states of Adam" if states else ""
    origin = load if adapter is None else f"{load} with {adapter}"
    return f"proved: the {len(ours.tensors)} tensors{and_states} read from {save} are those of {origin}, bit for bit"


def _states(training: Training | None) -> dict[str, LazyTensor]:
    """States of Adam as a checkpoint of ours names them; none without a training."""
    moments = {} if training is None else training.moments
    return {
        f"{native.OPTIMIZER}{moment}.{name}": tensor
        for moment, of_parameters in moments.items()
        for name, tensor in of_parameters.items()
    }


def _are_equal(before: LazyTensor, after: LazyTensor, dtype: torch.dtype) -> bool:
    """Whether two lazy tensors are equal in `dtype`, read in parts where both can be."""
    if (before.shape, dtype) != (after.shape, after.dtype):
        return False
    if before.part is None or after.part is None:
        return _same_bits(before.read().to(dtype), after.read())
    rows = ((row, row + 1) for row in range(before.shape[0]))
    return all(_same_bits(before.rows(*row).to(dtype), after.rows(*row)) for row in rows)


def _same_bits(here: Tensor, there: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN included."""
    here, there = (each.contiguous().view(-1).view(torch.uint8) for each in (here, there))
    return torch.equal(here, there)


def compare_logits(folder: Path, *, allow_unmatched: Allowed = False) -> str:
    """Sentence on the logits of random tokens, ours and transformers' in fp32; UserError if they differ by 1e-5."""
    description = open_hf(folder, allow_unmatched=allow_unmatched).description
    length, kind = min(description.seq_length, LONGEST), description.model.model_type
    tokens = torch.randint(description.vocab_size, (SAMPLES, length), generator=torch_stream("prove"))
    ours = our_logits(folder, tokens, allow_unmatched=allow_unmatched)
    transformers = importlib.import_module("transformers")
    try:
        auto = getattr(transformers, AUTO[kind])
        model = auto.from_pretrained(folder, local_files_only=True).float().eval()
    except Exception as error:  # of any kind: a folder that transformers refuses is not proved, whatever it says
        why = " ".join(str(error).split())
        raise UserError(
            f"{folder} is not proved: transformers {transformers.__version__} cannot load it ({why}); fetch the model "
            "again, or install the version of transformers that it asks for"
        ) from error
    with torch.no_grad():
        further = {"bert": {}, "t5": {"decoder_input_ids": tokens}}.get(kind, {"use_cache": False})
        theirs = model(tokens, **further).logits
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    sentence = (
        f"logits of {SAMPLES} x {length} random tokens differ from those of transformers "
        f"{transformers.__version__} by {difference:.1e} at most, relative to the largest"
    )
    if not difference <= BOUND:
        raise UserError(f"{folder} is not proved: {sentence}, which is over {BOUND:g}; do not use it, and report this")
    return f"proved: {sentence} (bound {BOUND:g}, fp32)"


AUTO = {"gpt": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}
"""Classes of transformers by our kinds of models."""


class OurModel(NamedTuple):
    """Model in fp32 on the CPU of one process, and its vocabulary."""

    model: GPT
    vocab_size: int


def build_model(description: Description, tensors: Mapping[str, LazyTensor], *, source: Path) -> OurModel:
    """The model with these weights, under our names, of the folder `source`."""
    mesh, vocab_size = Mesh.start(experts=ExpertLayout(1, 1)), description.vocab_size
    stages = Stages.of(ParallelConfig(), description.model, vocab_size=vocab_size, seq_length=description.seq_length)
    built = build_stage(description.model, stages, mesh, vocab_size=vocab_size, num_positions=description.num_positions)
    into = {}
    for name, parameter in built.model.named_parameters():
        sharding = built.shardings[name]
        pieces: tuple[Piece, ...] = tuple(sharding.pieces(mesh.domains[sharding.domain].model))
        into[name] = GlobalTensor(sharding.shape, pieces, parameter.detach().zero_(), writes=False)  # padding too
    load_weights(tensors, into | state_tensors(built.model.state(), mesh.domains["dense"]), source=source)
    return OurModel(built.model.requires_grad_(False).eval(), vocab_size)


def our_model(folder: Path, *, allow_unmatched: Allowed = False) -> OurModel:
    """The model of a Hugging Face folder, built here."""
    return build_model(*open_hf(folder, allow_unmatched=allow_unmatched), source=folder)


@torch.no_grad()
def our_logits(folder: Path, tokens: Tensor, *, allow_unmatched: Allowed = False) -> Tensor:
    """Logits [B, S, V] of a Hugging Face folder, in fp32 on the CPU, computed here."""
    model, vocab_size = our_model(folder, allow_unmatched=allow_unmatched)
    encoder = tokens.shape[1] if model.config.has_encoder else 0  # both sides are given the same tokens
    tokens = torch.cat((tokens, tokens), dim=1) if encoder else tokens
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    batch = MicroBatch(tokens, tokens, mask, positions, torch.arange(len(tokens))).with_encoder(encoder)
    logits = model.logits(model.predicting(model.hidden(None, batch, step=None), batch))
    return logits[..., :vocab_size].transpose(0, 1)
