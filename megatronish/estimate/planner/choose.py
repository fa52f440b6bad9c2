"""Answer of a search: the best layout of each of several meshes and a conventional one, or why nothing fits.

A request that no layout meets is answered by a sentence: what is missing, and the cheapest change that would make it
fit.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatronish.core.errors import UserError
from megatronish.estimate.costs.candidate import Candidate, MeshSizes, config_of
from megatronish.estimate.planner.devices import device_table
from megatronish.estimate.planner.exact import Planned, StageMemory, fullest_stage, plan_of, refusal
from megatronish.estimate.planner.search import Found, Search, SearchResult

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
    for of_mesh in by_mesh.values():
        # A few more than are printed, as the exact figures may order them differently.
        if len(planned) == number + 2:
            break
        planned += _first_that_holds(search, iter(of_mesh))
    if not planned:
        raise UserError(does_not_fit(search, tried))
    planned.sort(key=lambda each: search.interval(each.step, each.candidate)[1])
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


GIB = 2**30
MOST_TIMES = 64  # more devices than these times as many are not proposed
NEIGHBOURS = 32


def does_not_fit(search: Search, tried: SearchResult) -> str:
    """Why a search has no result, with a remedy."""
    if tried.smallest is None:
        return _nothing_legal(search)
    nbytes, candidate = tried.smallest
    fullest = fullest_stage(config_of(search.config, candidate), search.work.vocab_size)
    nbytes = fullest.memory.total if fullest.memory.total > search.limit else nbytes
    return (
        f"no layout fits: {tried.legal:,} were tried on {search.gpus} {search.device.name}, and the smallest "
        f"({candidate.mesh_text}, {candidate.choices_text}) {_lack(search, nbytes, fullest)}; {_cheapest(search)}"
    )


def _lack(search: Search, nbytes: int, fullest: StageMemory) -> str:
    """What a layout needs on its fullest stage, what it lacks there, and what most of it is."""
    owner, size = max(fullest.owners.items(), key=lambda item: item[1])
    return (
        f"needs {nbytes / GIB:.1f} GiB on stage {fullest.stage} and lacks {(nbytes - search.limit) / GIB:.1f} of them, "
        f"as a plan may fill {search.limit / GIB:.1f} of {search.device.memory_gib:g} GiB; most are {owner} "
        f"({size / GIB:.1f} GiB)"
    )


def _cheapest(search: Search) -> str:
    """The first of the changes, cheapest first, that lets a layout fit."""
    for changed, sentence in _changes(search):
        if fits(changed):
            return sentence
    return "use a smaller model, a shorter sequence, or devices with more memory"


def fits(search: Search) -> bool:
    """Whether a layout fits."""
    return bool(search.run().found)


def _changes(search: Search) -> Iterator[tuple[Search, str]]:
    """Changes from the cheapest to the most expensive one."""
    if not search.zero3_in_pipelines:
        yield replace(search, zero3_in_pipelines=True), "allow ZeRO-3 under a pipeline with --zero3-in-pipelines"
    parallel = search.config.parallel
    if not (parallel.optimizer_cpu_offload or parallel.param_cpu_offload):
        config = search.config.with_fields(optimizer_cpu_offload=True)
        yield replace(search, config=config), "add --optimizer-cpu-offload, which is slower"
    whole = {2**power for power in range(1, 20) if search.gpus < 2**power <= MOST_TIMES * search.gpus}
    multiples = {search.gpus * 2**power for power in range(1, 7)}
    for gpus in sorted(whole | multiples):
        yield replace(search, gpus=gpus), f"use --gpus {gpus}"
    yield from _larger_devices(search)


def _larger_devices(search: Search) -> Iterator[tuple[Search, str]]:
    """Devices with more memory that the project runs on, the smallest first."""
    for device in sorted(device_table().values(), key=lambda device: device.memory_gib):
        if device.memory_gib > search.device.memory_gib and not device.name.startswith(("tpu", "cpu")):
            yield replace(search, device=device), f"use devices of {device.memory_gib:g} GiB, such as {device.name}"


def _nothing_legal(search: Search) -> str:
    """Sentence for a number of devices that no layout divides."""
    batch = search.work.global_batch
    for distance in range(1, NEIGHBOURS):
        for gpus in (search.gpus - distance, search.gpus + distance):
            if gpus > 0 and next(replace(search, gpus=gpus).meshes(), None) is not None:
                return (
                    f"no layout of --gpus {search.gpus} is legal for this model with global_batch_size={batch}: tp, "
                    f"cp, pp and dp must divide heads, sequence, layers and batch; use --gpus {gpus}"
                )
    return (
        f"no layout of --gpus {search.gpus} is legal for this model with global_batch_size={batch}; use a number of "
        "devices whose factors divide the batch, the heads and the layers, for example a power of two"
    )


def layout_does_not_fit(search: Search, planned: Planned) -> str:
    """Why one layout cannot run, and the neighbour of it that fits and costs least time."""
    fullest, candidate = planned.fullest, planned.candidate
    total, neighbours = fullest.memory.total, []
    for neighbour, change in _neighbours(candidate, search.config.model.num_experts is not None):
        if search.is_legal(neighbour) and search.work.global_batch % (neighbour.micro_batch * neighbour.mesh.dp) == 0:
            stages = search.stages(neighbour)
            if search.nbytes(neighbour) <= search.limit:
                neighbours.append((search.clock.step(neighbour, stages).high, change))
    if neighbours:
        remedy = f"the cheapest change that makes it fit is {min(neighbours)[1]}"
    elif fits(search):
        remedy = "no single change makes it fit; leave --explain out, which lists layouts that do"
    else:
        remedy = next((text for larger, text in _larger_devices(search) if larger.limit >= total), "")
        remedy = remedy or _cheapest(search)
    return f"{candidate.mesh_text}, {candidate.choices_text} does not fit: it {_lack(search, total, fullest)}; {remedy}"


def _neighbours(candidate: Candidate, has_experts: bool) -> Iterator[tuple[Candidate, str]]:
    """Layouts that differ in one choice, with that choice in words."""
    mesh = candidate.mesh
    for zero in range(candidate.zero + 1, 3 if mesh.pp > 1 else 4):
        yield candidate._replace(zero=zero), f"zero={zero}"
    if mesh.tp > 1 and not candidate.sequence_parallel:
        yield candidate._replace(sequence_parallel=True), "sp (sequence parallelism)"
    for recompute in ("selective", "full"):
        if recompute != candidate.recompute:
            yield candidate._replace(recompute=recompute), f"recompute={recompute}"
    if candidate.micro_batch > 1:
        yield candidate._replace(micro_batch=candidate.micro_batch // 2), f"micro={candidate.micro_batch // 2}"
    for name in ("tp", "pp", "cp", *(("ep",) if has_experts else ())):
        for times in (2, 4, 8):
            size = times * getattr(mesh, name)
            if name == "ep":
                yield candidate._replace(mesh=mesh._replace(ep=size)), f"ep={size}"
            elif mesh.dp % times == 0:
                changed = mesh._replace(**{name: size}, dp=mesh.dp // times)
                if name == "tp":
                    changed = changed._replace(etp=size if mesh.etp == mesh.tp else mesh.etp)
                yield candidate._replace(mesh=changed), f"{name}={size}"
