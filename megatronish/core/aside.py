"""Stepping aside: what only looks at a run, or at what it may cost, never ends it by its own fault."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from megatronish.core.errors import RunError, UserError, without_passwords


class Aside:
    """Whether something that only looks at the run has failed and is left out; `what` names it."""

    def __init__(self, what: str) -> None:
        self.what, self.is_off = what, False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Context of work without communication: what it raises by its own fault is reported once."""
        try:
            yield
        except (UserError, RunError):  # what was looked for and found
            raise
        except Exception as error:
            self.step(f"{type(error).__name__}: {error}{_place(error)}")

    def step(self, reason: str, *, tells: bool = True) -> None:
        """Leave it out from now on, and say so, once."""
        if tells and not self.is_off:
            words = " ".join(without_passwords(reason).split())
            tqdm.write(
                f"{self.what} failed and is left out from here on, training continues: {words:.300}", file=sys.stderr
            )
        self.is_off = True


def _place(error: Exception) -> str:
    """Where it was raised, for a report."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
