"""Layouts that a user writes: `tp=8,pp=8,micro=2,zero=1,schedule=1f1b,recompute=full,sp`."""

import difflib

from megatronish.errors import UserError
from megatronish.planner.candidate import Candidate, MeshSizes
from megatronish.schedule.schedules import SCHEDULES

NUMBERS = ("tp", "pp", "cp", "ep", "etp", "micro", "chunks", "zero")
RECOMPUTE = ("none", "selective", "full")
EXAMPLE = "tp=8,pp=8,micro=2,zero=1,schedule=1f1b,recompute=full,sp"


def read_layout(text: str, *, gpus: int) -> Candidate:
    """The layout that a text describes; what is left out is 1, 1f1b, ZeRO-1 and no recomputation.

    UserError for a word that means nothing, and for sizes that do not divide the number of devices.
    """
    given: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        given[name] = value
    known = (*NUMBERS, "schedule", "recompute", "sp")
    for name, value in given.items():
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            remedy = f"did you mean {nearest[0]}=?" if nearest else f"write for example {EXAMPLE}"
            raise UserError(f"--explain {text}: {name} is no part of a layout; {remedy}")
        if name in NUMBERS and not value.isdecimal():
            raise UserError(f"--explain {text}: {name} needs a whole number; write for example {name}=1")
    choices = {"schedule": tuple(SCHEDULES), "recompute": RECOMPUTE}
    for name, values in choices.items():
        if name in given and given[name] not in values:
            raise UserError(f"--explain {text}: {name} must be one of {', '.join(values)}")
    sizes = {name: int(given.get(name, 1)) for name in NUMBERS}
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if ranks == 0 or gpus % ranks:
        raise UserError(f"--explain {text}: tp x pp x cp = {ranks} must divide --gpus {gpus}; change one of them")
    chunks = sizes["chunks"]
    schedule = given.get("schedule", "interleaved" if chunks > 1 else "1f1b")
    if schedule == "interleaved" and chunks < 2:
        raise UserError(f"--explain {text}: interleaved needs chunks=2 or more; add it")
    recompute = given.get("recompute", "none")
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
        SCHEDULES[schedule].num_chunks or chunks,
        sizes["zero"],
        recompute,  # type: ignore[arg-type]
        "sp" in given and mesh.tp > 1,
    )
