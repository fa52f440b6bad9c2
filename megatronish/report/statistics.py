"""Statistics of all parameters and gradients of a run, each element counted once over all ranks."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from megatronish.engine.engine import Engine
from megatronish.optim import global_norm
from megatronish.parallel.sharding import Shard


def params_norm(engine: Engine) -> float:
    """The 2-norm of all parameters. Collective."""
    masters = {name: [shard.master] for name, shard in _counted_shards(engine)}
    mesh = engine.mesh
    return float(global_norm.global_norm(_by_domain(engine, masters), mesh.domains, pp=mesh.pp, device=mesh.device))


def num_zeros(engine: Engine) -> int:
    """Gradient elements that are exactly zero, padding of the vocabulary left out. Collective."""
    gradients, mesh = engine.data_parallel.gradients, engine.mesh
    elements = {
        name: [piece.view(gradients[name]) for piece in shard.pieces]
        for name, shard in _counted_shards(engine)
        if name in gradients
    }
    return global_norm.num_zeros(_by_domain(engine, elements), mesh.domains, pp=mesh.pp, device=mesh.device)


def _counted_shards(engine: Engine) -> Iterator[tuple[str, Shard]]:
    """The shards whose elements this rank counts."""
    sharing = engine.data_parallel
    return ((name, shard) for name, shard in sharing.shards.items() if name in sharing.counted)


def _by_domain(engine: Engine, tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """Tensors by parameter, grouped by their reduction domain."""
    tensors_by_domain: dict[str, list[Tensor]] = {name: [] for name in engine.mesh.domains}
    for name, parts in tensors.items():
        tensors_by_domain[engine.stage.shardings[name].domain] += parts
    return tensors_by_domain
