"""How does a small file appear at once, and survive a power cut?"""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new, whenever the machine stops."""
    aside = path.with_name(path.name + ".new")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
