"""Names of the tensors that a folder of .safetensors files holds, from its index or header. Needs no torch."""

import json
from pathlib import Path

from megatronish.core.files import ordinary

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # what the format's own library allows


def stored_names(folder: Path) -> frozenset[str] | None:
    """Names of all tensors; None without weights, and for a file that is damaged: its reader says so."""
    try:
        if (folder / INDEX).is_file():
            return frozenset(json.loads(ordinary(folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        size = ordinary(folder / FILE).stat().st_size
        with (folder / FILE).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size, MAX_HEADER_BYTES):
                return None
            return frozenset(json.loads(stream.read(length)))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
