"""Values of adapters for tests: what begins at zero, or at one, is made to do something."""

from megatronish.engine.engine import Engine
from megatronish.model.adapters import is_adapter
from megatronish.parallel.streams import normal_rectangle


def draw_adapters(engine: Engine) -> None:
    """Fill what begins at zero: with B = 0 the gradient of A is zero in the first step.

    The values are small. With 0.1 in the place of 0.02, a change of all weights by 1e-7 changes the gradients of the
    gated model by 1e-4, and no layout could be told from another one.
    """
    for name, shard in engine.data_parallel.shards.items():
        if is_adapter(name) and not name.endswith(".A"):
            for piece in shard.pieces:
                shape = engine.stage.shardings[name].shape
                values = normal_rectangle(shape, piece.global_offset, piece.sizes, names=("test", name))
                piece.view(shard.master).data.add_(0.02 * values)
    if engine.outer is not None:  # the outer parameters are these, too
        for name, (outer, _) in engine.outer.state.items():
            outer.copy_(engine.outer.masters[name])
    engine.data_parallel.gather_parameters()
