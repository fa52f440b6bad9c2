"""Commands `megatronish report` and `megatronish watch`: a page of runs, and a run on the terminal while it trains.

megatronish report runs/one runs/other --output compared.html
megatronish watch runs/one
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import read_arguments
from megatronish.core.errors import UserError
from megatronish.core.files import naming

COMPARED = "compared.html"  # not report.html, which is the page that the first run wrote of itself


@dataclass(frozen=True)
class ReportArguments:
    """Write a page of a run, or of several next to each other: one HTML file that needs no network."""

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")
    ]
    """Run folders."""
    output: Path | None = None
    """FILE.html. Derived: report.html in the run's folder; of several compared.html in that of the first."""


@dataclass(frozen=True)
class WatchArguments:
    """Show a run on the terminal while it trains, and serve its page to browsers on this machine."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    every: float = 2.0
    """Seconds from one look at the folder to the next."""
    page: bool = True
    """Serve the page, too."""
    port: Annotated[int, tyro.conf.arg(help="Port of the page on 127.0.0.1; 0 takes any that is free.")] = 0
    once: bool = False
    """Look once, and end."""


def main_report(argv: Sequence[str], *, program: str = "megatronish report") -> int:
    """Run the command; the exit status."""
    return exit_status(lambda: _report(read_arguments(ReportArguments, argv, program=program)), prefix="error: ")


def main_watch(argv: Sequence[str], *, program: str = "megatronish watch") -> int:
    """Run the command; the exit status."""
    return exit_status(lambda: _watch(read_arguments(WatchArguments, argv, program=program)), prefix="error: ")


def _report(arguments: ReportArguments) -> int:
    # Late: these import torch and matplotlib, for which --help need not wait.
    from megatronish.report.page.write import PAGE, write_page

    if not arguments.runs:
        raise UserError("no run is named; name the folder that --run-dir was, for example megatronish report runs/demo")
    output = arguments.output or arguments.runs[0] / (PAGE if len(arguments.runs) == 1 else COMPARED)
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; name a file in it, for example {output / PAGE}")
    with naming(output):
        write_page(arguments.runs, output)
    print(f"wrote {output}")
    return 0


def _watch(arguments: WatchArguments) -> int:
    from rich.console import Console
    from rich.live import Live

    from megatronish.report.live import picture_of
    from megatronish.report.page.contents import curves_of
    from megatronish.report.page.serve import served

    if not 0.1 <= arguments.every <= 3600:
        raise UserError(f"--every {arguments.every:g} must be from 0.1 to 3600 seconds; for example 2")
    if not 0 <= arguments.port < 2**16:
        raise UserError(f"--port {arguments.port} must be from 0 to 65535; 0 takes one that is free")
    console, curves = Console(), curves_of(arguments.run, hurries=not arguments.once)
    picture, has_ended = picture_of(arguments.run, curves, width=console.width)
    if arguments.once:
        console.print(picture)
        return 0
    every = max(1, round(arguments.every))
    page = served([arguments.run], port=arguments.port, every=every) if arguments.page else nullcontext("")
    with page as address:
        if address:
            console.print(f"page: {address}")
        with Live(picture, console=console, auto_refresh=False, transient=False) as live:
            while not has_ended:
                time.sleep(arguments.every)
                picture, has_ended = picture_of(arguments.run, curves, width=console.width)
                live.update(picture, refresh=True)
            if curves.is_behind:  # an end is shown as it is, not by a sample
                curves.catch_up()
                live.update(picture_of(arguments.run, curves, width=console.width)[0], refresh=True)
    return 0
