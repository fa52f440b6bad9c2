"""Writer of figures: a picture is whole under its name or the one before it stays."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatronish.core.files import AtomicFile

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.figure import Figure


def no_matplotlib(error: ImportError) -> str:
    """Why there is no picture, and the remedy: for what can do without it, or `UserError` where it was asked for."""
    return f"pictures are drawn by matplotlib, which cannot be imported ({error}); pip install matplotlib"


def write_figure(figure: "Figure", path: Path, *, dpi: int = 120) -> Path:
    """Write a PNG that is whole or absent, also where the disk is full; returns its path. OSError if it cannot be.

    A link stays one, and a pipe or a device is written to: neither is replaced by a file.
    """
    if path.is_fifo() or path.is_char_device():
        with path.open("wb") as file:
            figure.savefig(file, format="png", dpi=dpi)
        return path
    with AtomicFile(Path(os.path.realpath(path))) as picture:
        figure.savefig(picture.file, format="png", dpi=dpi)
    return path
