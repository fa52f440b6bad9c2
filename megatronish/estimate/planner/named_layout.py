"""Layouts that a user writes: `tp=8,pp=8,micro=2,zero=1,schedule=1f1b,recompute=full,sp`."""

import difflib
from typing import get_args

from megatronish.core.errors import UserError
from megatronish.estimate.costs.candidate import Candidate, MeshSizes, Recompute
from megatronish.parallel.schedules.table import SCHEDULES

NUMBERS = ("tp", "pp", "cp", "ep", "etp", "micro", "chunks", "zero")
MOST_DIGITS = 9
CHOICES = {
    "zero": ("0", "1", "2", "3"),
    "schedule": tuple(SCHEDULES),
    "recompute": get_args(Recompute),
    "sp": ("true", "false", "1", "0"),
}
EXAMPLE = "tp=8,pp=8,micro=2,zero=1,schedule=1f1b,recompute=full,sp"


def read_layout(text: str, *, gpus: int, has_experts: bool = True) -> Candidate:
    """The layout that a text describes; what is left out is 1, 1f1b, ZeRO-1 and no recomputation.

    UserError for a word that means nothing, and for sizes that do not divide the number of devices.
    """
    given = _words(text)
    sizes = {name: int(given.get(name, 1)) for name in NUMBERS}
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if gpus % ranks:
        raise UserError(f"--explain {text}: tp x pp x cp = {ranks} must divide --gpus {gpus}; change one of them")
    shares_sequence = given.get("sp", "false") in ("true", "1")
    if shares_sequence and sizes["tp"] == 1:
        raise UserError(f"--explain {text}: sp shares the sequence out over tp, and tp=1; leave it out, or add tp=2")
    for name in ("ep", "etp"):
        if name in given and not has_experts:
            raise UserError(f"--explain {text}: {name}={given[name]} is for experts, and the model has none; remove it")
    schedule, chunks = _schedule(text, given)
    mesh = MeshSizes(
        sizes["tp"],
        sizes["pp"],
        gpus // ranks,
        sizes["cp"],
        sizes["ep"],
        sizes["etp"] if "etp" in given else sizes["tp"],
    )
    return Candidate(
        mesh,
        sizes["micro"],
        schedule,
        chunks,
        sizes["zero"],
        given.get("recompute", "none"),  # type: ignore[arg-type]
        shares_sequence,
    )


def _words(text: str) -> dict[str, str]:
    """{name: value} of the parts of a layout, each with a value that it may have."""
    given: dict[str, str] = {}
    known = (*NUMBERS, "schedule", "recompute", "sp")
    for word in text.replace(",", " ").split():
        name, sign, value = word.partition("=")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            remedy = f"did you mean {nearest[0]}=?" if nearest else f"write for example {EXAMPLE}"
            raise UserError(f"--explain {text}: {name} is no part of a layout; {remedy}")
        if name in given:
            raise UserError(f"--explain {text}: {name} is there twice; remove one of them")
        if name in NUMBERS and not (value.isdecimal() and len(value) <= MOST_DIGITS and int(value) >= (name != "zero")):
            least = "a whole number" if name == "zero" else "a whole number above 0"
            raise UserError(
                f"--explain {text}: {name} needs {least} of at most {MOST_DIGITS} digits; write for example {name}=1"
            )
        given[name] = "true" if name == "sp" and not sign else str(int(value)) if name in NUMBERS else value
    for name, values in CHOICES.items():
        if name in given and given[name] not in values:
            raise UserError(
                f"--explain {text}: {name} must be one of {', '.join(values)}; write for example {name}={values[-1]}"
            )
    if not given:
        raise UserError(f"--explain {text!r} names no layout; name a row of the list, such as 1, or write {EXAMPLE}")
    return given


def _schedule(text: str, given: dict[str, str]) -> tuple[str, int]:
    """The schedule and its chunks a stage; UserError for chunks that it cannot have."""
    chunks = int(given.get("chunks", 1))
    schedule = given.get("schedule", "interleaved" if chunks > 1 else "1f1b")
    has = SCHEDULES[schedule].num_chunks
    if has is None and chunks < 2:
        raise UserError(f"--explain {text}: {schedule} needs chunks=2 or more; add it")
    if has is not None and "chunks" in given and chunks != has:
        raise UserError(
            f"--explain {text}: {schedule} has {has} chunk{'s' if has > 1 else ''} a stage in any case, and not "
            f"{chunks}; leave chunks out, or write schedule=interleaved"
        )
    return schedule, has or chunks
