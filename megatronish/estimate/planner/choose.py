"""Short list of a search: the best layout of each of several meshes, and where a conventional layout stands."""

from collections.abc import Iterator
from typing import NamedTuple

from megatronish.core.errors import UserError
from megatronish.estimate.costs.candidate import MeshSizes
from megatronish.estimate.planner.exact import Planned, plan_of, refusal
from megatronish.estimate.planner.remedy import does_not_fit
from megatronish.estimate.planner.search import Found, Search

MOST_TRIES = 12  # layouts of one mesh that are looked at exactly


class ShortList(NamedTuple):
    """Layouts of different meshes, best first; `conventional` is one of them or stands behind them."""

    legal: int
    fitting: int
    planned: list[Planned]
    conventional: int | None

    @property
    def best(self) -> Planned:
        """The first of them."""
        return self.planned[0]


def short_list(search: Search, *, number: int) -> ShortList:
    """Search, and choose; UserError with a remedy if no layout fits."""
    tried = search.run()
    if not tried.found:
        raise UserError(does_not_fit(search, tried))
    by_mesh: dict[MeshSizes, list[Found]] = {}
    for each in tried.found:
        by_mesh.setdefault(each.candidate.mesh, []).append(each)
    planned: list[Planned] = []
    for found in by_mesh.values():
        # A few more than are printed, as the exact figures may order them differently.
        if len(planned) == number + 2:
            break
        planned += _first_that_holds(search, iter(found))
    if not planned:
        raise UserError(does_not_fit(search, tried))
    planned.sort(key=lambda each: each.step.high)
    planned = planned[:number]
    usual = conventional(search, tried.found)
    if usual is not None and usual.candidate.mesh not in {each.candidate.mesh for each in planned}:
        planned.append(usual)
    elif usual is not None:
        planned = [usual if each.candidate == usual.candidate else each for each in planned]
        if usual.candidate not in {each.candidate for each in planned}:
            planned.append(usual)
    place = None if usual is None else [each.candidate for each in planned].index(usual.candidate)
    return ShortList(tried.legal, len(tried.found), planned, place)


def _first_that_holds(search: Search, found: Iterator[Found]) -> list[Planned]:
    """The best of some layouts of a mesh that is legal and fits by its exact figures, if there is one."""
    for _, each in zip(range(MOST_TRIES), found, strict=False):
        planned = plan_of(search, each.candidate)
        if refusal(search, planned) is None:
            return [planned]
    return []


def conventional(search: Search, found: list[Found]) -> Planned | None:
    """What most would choose: tp = node (experts: ep = node), 1F1B on as few stages as fit, ZeRO-1, and no cp.

    Where tp of a whole node is not legal, the largest that is. More stages, and then cp, come before recomputing whole
    layers, which computes a third more.
    """
    node, has_experts = search.device.gpus_per_node, search.config.model.num_experts is not None

    def strangeness(each: Found) -> tuple[float, ...]:
        mesh = each.candidate.mesh
        across = mesh.ep * mesh.etp if has_experts else mesh.tp
        return (
            across > node,
            each.candidate.recompute == "full",
            mesh.cp,
            -across,
            mesh.tp if has_experts else 0,
            abs(each.candidate.zero - 1),
            each.candidate.schedule != "1f1b",
            mesh.tp > 1 and not each.candidate.sequence_parallel,
            mesh.pp,
            each.seconds,
        )

    return next(iter(_first_that_holds(search, iter(sorted(found, key=strangeness)[:MOST_TRIES]))), None)
