"""Lines of JSON that the sweep leaves: of a model, contender and number of micro-batches the last one counts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Key = tuple[str, str, int]


def key_of(row: Row) -> Key:
    """What a row is about."""
    return row["model"], row["contender"], row["micro_batches"]


def write(path: Path, row: Row) -> None:
    """Append a row."""
    with path.open("a") as file:
        file.write(f"\n{json.dumps(row)}\n")  # a line that a killed writer has not ended spoils no other


def rows_in(path: Path) -> dict[Key, Row]:
    """The rows, those that were written before a part was killed, too."""
    rows: dict[Key, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # its writer was killed
            continue
        rows[key_of(row)] = row
    return rows
