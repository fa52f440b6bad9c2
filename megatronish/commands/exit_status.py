"""Ending of a command: the exit status and the sentence for whatever ended it."""

import sys
import time
from collections.abc import Callable

from megatronish.config.plugins import naming_plugins
from megatronish.core.errors import RunError, UserError, is_misplaced, shown, without_passwords
from megatronish.launch.elastic import report_to_torchrun
from megatronish.launch.os_errors import mishap, refuse_few_open_files
from megatronish.launch.place import Place, place_from_environment

SECONDS_OF_MAIN = 3.0
"""After a user error the other ranks stay so long: a launcher that sees one of them end would end rank 0 too, which may
not have printed the sentence yet."""


def exit_status(work: Callable[[], int], *, prefix: str = "") -> int:
    """Exit status of `work`: its own, 2 for a user error, 1 for a failure of the machine, 130 after Ctrl-C.

    The sentence of an error goes to stderr, `prefix` before it. Any other exception is a bug and keeps its traceback.
    """
    try:
        with naming_plugins():
            return work()
    except UserError as error:
        print(f"{prefix}{error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # no failure: commands/main.py ends quietly
        raise
    except (RunError, OSError) as error:
        print(f"{prefix}{_sentence(error)}", file=sys.stderr)
        return 2 if is_misplaced(error) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _sentence(error: RunError | OSError) -> str:
    return str(error) if isinstance(error, RunError) else shown(without_passwords(mishap(error) or str(error)))


def exit_status_of_ranks(work: Callable[[Place | None], int]) -> int:
    """Exit status of `work`, which is given the place of this process: None on a plain start.

    Under torchrun, srun and the like every process notices a user error, and only rank 0 prints the sentence; torchrun
    repeats it last.
    """
    place = None
    try:
        refuse_few_open_files()
        place = place_from_environment()
        with naming_plugins():
            return work(place)
    except UserError as error:
        if is_main(place):
            print(error, file=sys.stderr, flush=True)
        report_to_torchrun(str(error))
        if not is_main(place):
            time.sleep(SECONDS_OF_MAIN)
        return 2
    except OSError as error:
        if (sentence := mishap(error)) is None:
            raise
        print(without_passwords(sentence), file=sys.stderr)
        return 2 if is_misplaced(error) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def is_main(place: Place | None) -> bool:
    """Whether this process prints for all."""
    return place is None or place.rank == 0
