"""The frozen model that a run's adapters are for: its loading, and the check that it is the same one again."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.checkpoint.remote import Location
from megatronish.core.errors import UserError
from megatronish.engine.engine import Engine
from megatronish.formats import native
from megatronish.formats.identity import identity_of
from megatronish.formats.load_sharded import load_weights, open_hf
from megatronish.formats.quantised import quantised
from megatronish.formats.weights import LazyTensor, Model
from megatronish.model.quantised import quantised_weights
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.sharding import Sharding, fill_initial
from megatronish.train.checkpoint_state import base_tensors_of
from megatronish.train.setup import TrainingJob


class Base(NamedTuple):
    """Base model of a run with adapters. `source` is where it was read, `identity` what it is (formats/identity.py).

    `origin` is the description that came with it, of another format.
    """

    source: str
    identity: str
    origin: dict[str, Any]


def load_base(job: TrainingJob, engine: Engine) -> Base:
    """Fill the frozen parameters from --load-hf, or from the checkpoint of --load and --ckpt-step. Collective."""
    keep, axis = job.config.checkpoint, engine.mesh.checkpoint_axis
    source = Path(keep.load_hf or keep.load or "")
    into = {name: each for name, each in base_tensors_of(engine).items() if not name.endswith(native.LOAD)}
    if keep.load_hf is not None:  # has no state of routers
        into = {name: each for name, each in into.items() if name.removeprefix(native.PREFIX) in engine.stage.shardings}

    def read() -> Model:
        folder = find_checkpoint(source, step=keep.ckpt_step) if keep.load_hf is None and source.is_dir() else None
        if folder is not None:
            refuse_adapters(read_state(folder), source)
        model = native.read(source, step=keep.ckpt_step) if keep.load_hf is None else open_hf(source)
        load_weights(_as_held(model.tensors, engine), into, source=source)
        return model

    model = all_or_none(axis, read)
    engine.data_parallel.gather_parameters(frozen=True)
    return Base(os.path.abspath(source), identity_of(model.tensors, over=axis), dict(model.description.origin))


def refuse_adapters(state: Mapping[str, Any], source: Location | str) -> None:
    """UserError for a run with adapters: its checkpoints, which say `state`, hold no model that a run could start from.

    `source` is what --load names.
    """
    if (base := state.get("base")) is not None:
        raise UserError(
            f"--load {source} holds the adapters of {base.get('source')} alone; start that run again to continue it, "
            "or merge them into their model with megatronish convert --adapter, and start from the merged one"
        )


def draw_base(engine: Engine, *, seed: int) -> None:
    """Fill a quantised base with the initial values of its weights, as `initialize` fills one that is not quantised."""
    tensors = {}
    for name, _, held in quantised_weights(engine.stage.model):
        draw = partial(_drawn, held.dense, names=(seed, "init", name))
        tensors[name] = LazyTensor(held.dense.shape, torch.float32, draw)
    if not tensors:
        return
    stored = _as_held(tensors, engine)
    into = {name: each for name, each in base_tensors_of(engine).items() if name.removeprefix(native.PREFIX) in stored}
    load_weights(stored, into, source=Path("initial values"))
    engine.data_parallel.gather_parameters(frozen=True)


def _drawn(sharding: Sharding, *, names: tuple[str | int, ...]) -> Tensor:
    values = torch.empty(sharding.shape)
    fill_initial(values, sharding, (0,) * values.dim(), names=names)
    return values


def _as_held(tensors: Mapping[str, LazyTensor], engine: Engine) -> Mapping[str, LazyTensor]:
    """The base's tensors in the form in which this rank holds them: those of quantised layers in 4 bits."""
    return quantised(tensors, quantised_weights(engine.stage.model), device=engine.mesh.device)


def refuse_other_base(saved: Any, base: Base | None, checkpoint: Location) -> None:
    """UserError if the adapters of a checkpoint were trained with another model; `saved` is what its state says."""
    if base is None and saved is None:
        return
    if base is None:
        raise UserError(
            f"{checkpoint} holds adapters alone, of the model {saved['source']}; name their --adapter-type, and the "
            "model with --load-hf or --load"
        )
    if saved is None:
        raise UserError(f"{checkpoint} holds a whole model and no adapters; choose another --run-dir for adapters")
    if saved["identity"] != base.identity:
        raise UserError(
            f"the adapters of {checkpoint} were trained with {saved['source']}, with the weights "
            f"{saved['identity'][:12]}, and {base.source} has the weights {base.identity[:12]}; name that model with "
            "--load-hf or --load"
        )


def refuse_other_reference(saved: Any, reference: Base | None, checkpoint: Location) -> None:
    """UserError if a run was compared with another model; `saved` is what its state says."""
    if saved is None or reference is None or saved["identity"] == reference.identity:
        return
    raise UserError(
        f"the run of {checkpoint} is compared with {saved['source']}, with the weights {saved['identity'][:12]}, and "
        f"{reference.source} has the weights {reference.identity[:12]}; name that model with --load-hf or --load"
    )
