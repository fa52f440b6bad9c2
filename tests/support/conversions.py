"""Helpers for tests of conversions: the logits of a checkpoint on tp ranks, and conversions in one line."""

from pathlib import Path

import torch
from ranks import run_ranks
from torch import Tensor

from megatronish.core.layout import ExpertLayout, Layout
from megatronish.formats.convert import Report, convert
from megatronish.inference.load import load_model
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh


def to_ours(folder: Path, save: Path) -> Report:
    """Convert from Hugging Face to megatronish."""
    return convert(folder, save, source="hf", target="megatronish")


def to_hf(folder: Path, save: Path) -> Report:
    """Convert from megatronish to Hugging Face."""
    return convert(folder, save, source="megatronish", target="hf")


def logits_of(checkpoints: Path, tokens: Tensor, *, tp: int, ep: int = 1, adapter: Path | None = None) -> Tensor:
    """Logits [B, S, V] of a checkpoint in fp32, on tp ranks, of which ep hold different experts."""
    return torch.tensor(run_ranks(tp, _logits, checkpoints, tokens.tolist(), ExpertLayout(ep, tp // ep), adapter)[0])


@torch.no_grad()
def _logits(
    place: Place, checkpoints: Path, tokens: list[list[int]], experts: ExpertLayout, adapter: Path | None
) -> list[list[list[float]]]:
    layout = Layout(tp=place.world_size)
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous, experts=experts)
    trained = load_model(checkpoints, mesh=mesh, adapter=adapter)
    ids = torch.tensor(tokens)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = MicroBatch(ids, ids, mask, positions, torch.arange(len(ids)))
    share = trained.model.logits(trained.model.hidden(None, batch, step=None)).permute(2, 1, 0).contiguous()
    whole = comm.start_all_gather(share, mesh.tp).wait()
    return whole[: trained.description.vocab_size].permute(1, 2, 0).tolist()
