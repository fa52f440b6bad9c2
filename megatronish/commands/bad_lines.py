"""Bad lines of an input: the first few are printed, all are counted."""

from collections.abc import Callable

MAX_TOLD = 20


class BadLines:
    """Counter of bad lines, which writes a line for each of the first."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self.count = 0

    def tell(self, message: str) -> None:
        """Count a bad line, and write it if it is one of the first."""
        self.count += 1
        if self.count <= MAX_TOLD:
            self._write(f"bad line {message}")
        elif self.count == MAX_TOLD + 1:
            self._write("more bad lines are counted without telling")
