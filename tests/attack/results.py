"""Results of the attacks: a line for each measurement, collected in a file for the table of `make attack`."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = "ATTACK_RESULTS"
"""Environment variable: the file that results are added to; without it they are printed alone."""


@dataclass(frozen=True)
class Result:
    """What an attack tried, how often it went wrong, and what else was measured."""

    attack: str
    tried: int
    failed: int
    measured: str = ""

    @property
    def line(self) -> str:
        """A row of the table, as docs/RESILIENCE.md has it."""
        return f"| {self.attack} | {self.tried:,} | {self.failed:,} | {self.measured} |"


def publish(*results: Result) -> int:
    """Print results, and keep them for the table; the exit status: 1 if anything failed."""
    for result in results:
        print(result.line, flush=True)
    if path := os.environ.get(RESULTS):
        with Path(path).open("a") as file:
            file.writelines(json.dumps(asdict(result)) + "\n" for result in results)
    return int(any(result.failed for result in results))


def published(path: Path) -> list[Result]:
    """All results in a file."""
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def table(results: list[Result]) -> str:
    """The results as a table."""
    return "\n".join(
        ["| attack | tried | failed | measured |", "| --- | --- | --- | --- |", *(result.line for result in results)]
    )
