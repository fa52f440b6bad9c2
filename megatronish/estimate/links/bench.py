"""Rank of a measurement of links: all collectives over all axes of a layout, as a table, JSON lines and a picture."""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatronish.core.errors import RunError, UserError
from megatronish.core.figures import no_matplotlib
from megatronish.core.files import unwritten
from megatronish.core.layout import Layout
from megatronish.estimate.links.axes import count_nodes, hosts_of, open_axes
from megatronish.estimate.links.definitions import COLLECTIVES
from megatronish.estimate.links.facts import Needs, nested_facts
from megatronish.estimate.links.fit import FEWEST_SIZES, LinkFit
from megatronish.estimate.links.measure import LinkTimes, Runs, fits, measure
from megatronish.estimate.links.preflight import Subject, preflight
from megatronish.estimate.links.settings import LinkArguments, groups_of
from megatronish.launch.device import choose_backend, choose_device, meeting_store
from megatronish.launch.place import Place
from megatronish.launch.rendezvous import refuse_addresses
from megatronish.parallel.mesh import Mesh, leave

# Text tables of measured collectives and of their fits.


HEADER = (
    f"{'axis':<6}{'ranks':>6}{'nodes':>6}  {'collective':<15}{'HCCL':<21}{'dtype':<6}{'bytes':>11}"
    f"{'min us':>11}{'median us':>11}{'max us':>11}{'algbw GB/s':>12}{'busbw GB/s':>12}  checked"
)


def row_line(row: LinkTimes) -> str:
    """Line of one row, under HEADER."""
    micros = "".join(f"{1e6 * seconds:>11.1f}" for seconds in (row.seconds_min, row.seconds_median, row.seconds_max))
    return (
        f"{row.axis:<6}{row.ranks:>6}{row.nodes:>6}  {row.collective:<15}{row.hccl:<21}{row.dtype:<6}{row.bytes:>11}"
        f"{micros}{row.algbw / 1e9:>12.3f}{row.busbw / 1e9:>12.3f}  {'right' if row.checked else 'WRONG'}"
    )


FIT_HEADER = (
    f"{'axis':<6}{'ranks':>6}  {'collective':<15}{'from bytes':>11}{'to bytes':>11}{'alpha us':>11}{'B GB/s':>9}"
    f"{'error':>7}  for planning"
)


def fit_line(row: LinkTimes, fit: LinkFit) -> str:
    """Line of one fit, under FIT_HEADER."""
    left_out = (
        f" without {fit.num_left_out} noisy size{'s' if fit.num_left_out > 1 else ''}" if fit.num_left_out else ""
    )
    verdict = f"accepted{left_out}" if fit.accepted else f"refused: {fit.reason}"
    return (
        f"{row.axis:<6}{row.ranks:>6}  {row.collective:<15}{fit.bytes_min:>11}{fit.bytes_max:>11}"
        f"{1e6 * fit.alpha_s:>11.1f}{fit.bandwidth_bytes_per_s / 1e9:>9.3f}{fit.mean_error:>7.0%}  "
        f"{verdict}"
    )


def start_links(arguments: LinkArguments, layout: Layout, place: Place) -> tuple[Mesh, str]:
    """Mesh of the layout on this rank's device, and the backend of its groups."""
    refuse_addresses()
    store = meeting_store(place)
    device, note = choose_device(arguments.device, place, store=store)
    if note is not None and place.rank == 0:
        print(f"note: {note}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = choose_backend(arguments.distributed_backend, device)
    mesh = Mesh.start(
        layout, rank=place.rank, init_method=place.rendezvous, store=store, device=device, backend=backend, lines=()
    )
    return mesh, backend


def bench(arguments: LinkArguments, layout: Layout, place: Place) -> int:
    """Measure on the rank at `place`, all ranks together; rank 0 prints. The status is 1 if a result was wrong."""
    try:
        return _preflight(arguments, layout, place) if arguments.preflight else _measure(arguments, layout, place)
    except BrokenPipeError:  # the reader of what rank 0 prints has left, as `head` does: the run ends quietly
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _measure(arguments: LinkArguments, layout: Layout, place: Place) -> int:
    """Measure; the exit status."""
    mesh, backend = start_links(arguments, layout, place)
    rows = []
    if mesh.is_main:
        print(HEADER, flush=True)
    for row in _rows(arguments, mesh, backend):
        rows.append(row)
        if mesh.is_main:
            print(row_line(row), flush=True)
    if mesh.is_main:
        _finish(arguments, rows)
    leave()
    return 0 if all(row.checked for row in rows) else 1


def _preflight(arguments: LinkArguments, layout: Layout, place: Place) -> int:
    """Compare the ranks, with the arguments as their config; the exit status."""
    mesh, backend = start_links(arguments, Layout(dp=place.world_size), place)
    facts = nested_facts(asdict(arguments), "config")
    status = preflight(Subject(facts, layout, arguments.experts, arguments.save, Needs()), mesh, backend=backend)
    leave()
    return status


def _rows(arguments: LinkArguments, mesh: Mesh, backend: str) -> Iterator[LinkTimes]:
    """Rows of all axes, collectives and sizes. A collective that the backend lacks is left out, with a sentence."""
    groups = groups_of(mesh.layout, arguments.experts)
    axes, hosts = open_axes(mesh, groups, backend=backend), hosts_of(mesh)
    is_cpu = mesh.device.type == "cpu"
    runs = Runs(arguments.dtype or ("fp32" if is_cpu else "bf16"), mesh.device, arguments.warmups, arguments.runs)
    for name in arguments.axes or axes:
        for collective in arguments.collectives or COLLECTIVES:
            try:
                for num_bytes in arguments.sizes(is_cpu=is_cpu):
                    yield measure(
                        collective,
                        num_bytes,
                        axis=axes[name],
                        world=mesh.world,
                        num_nodes=count_nodes(groups[name], hosts),
                        runs=runs,
                    )
            except RunError as error:
                if mesh.is_main:
                    print(f"left out: {error}", file=sys.stderr, flush=True)


def _finish(arguments: LinkArguments, rows: list[LinkTimes]) -> None:
    """Print the fits, and write the files that were asked for."""
    fitted = list(fits(rows))
    if fitted:
        print(f"\n{FIT_HEADER}")
    for row, fit in fitted:
        print(fit_line(row, fit))
    # The same size is another number of bytes where a collective rounds it down to its parts.
    of_each = Counter(key for key, _ in {((row.axis, row.collective), row.bytes) for row in rows})
    sizes = max(of_each.values(), default=0)
    if not fitted and rows:
        print(
            f"\nno fit: {sizes} size{'s' if sizes > 1 else ''} of {FEWEST_SIZES} that a line needs; give a larger "
            "--max-bytes, or a smaller --min-bytes or --factor"
        )
    if arguments.json is not None:
        lines: list[dict[str, Any]] = [row.as_json() for row in rows]
        for row, fit in fitted:
            names = {"collective": row.collective, "axis": row.axis, "ranks": row.ranks, "nodes": row.nodes}
            lines.append(fit.as_json(**names, device=row.device))
        _write(arguments.json, "".join(f"{json.dumps(line)}\n" for line in lines))
        print(f"\nwritten into {arguments.json}")
    if arguments.png is not None:
        try:
            from megatronish.estimate.links.draw_png import draw_links  # matplotlib takes a second to import

            arguments.png.parent.mkdir(parents=True, exist_ok=True)
            draw_links(rows, fitted, arguments.png)
        except OSError as error:
            raise unwritten(f"--png {arguments.png}", arguments.png, error) from error
        except ImportError as error:
            raise UserError(no_matplotlib(error)) from error
        print(f"drawn into {arguments.png}")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise unwritten(f"--json {path}", path, error) from error
