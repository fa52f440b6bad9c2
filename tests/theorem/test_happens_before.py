"""Tests of the happens-before check: what it calls a race, and that it finds waits which are taken out of the package.

A wait is taken out where a line of the package calls it, in ranks that train a layout of the theorem. Whether a race
happens depends on time; whether it is found does not.
"""

import linecache
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from expert_cases import choices_of_experts, expert_problem, expert_spread
from happens_before import Collectives, RaceError, under_the_check
from pairwise import Chosen
from problem import Problem, Spread
from ranks import RankError, run_ranks
from theorem import train
from theorem_cases import choices, problem_of, spread_of
from torch import Tensor

from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh

# ---- what is a race, on a buffer of eight elements that two ranks exchange


def read_it(x: Tensor, whole: Tensor) -> None:
    whole.sum()


def write_what_is_read(x: Tensor, whole: Tensor) -> None:
    x.add_(1)


def read_what_is_read(x: Tensor, whole: Tensor) -> None:
    x.sum()


def look_at_it(x: Tensor, whole: Tensor) -> None:
    torch.zeros_like(whole[2:].view(2, 3).detach())


def read_by_the_host(x: Tensor, whole: Tensor) -> None:
    whole.tolist()


def free_it(x: Tensor, whole: Tensor) -> None:
    whole.untyped_storage().resize_(0)


def write_beside_it(x: Tensor, whole: Tensor) -> None:
    torch.as_strided(x, (4,), (1,), 4).add_(1)  # the second half of the storage of x


def accesses(place: Place) -> dict[str, str]:
    """What the check says of each of these accesses while an all-gather is under way."""
    tp = Mesh.start(Layout(tp=2), rank=place.rank, init_method=place.rendezvous).tp
    said = {}
    for access in ACCESSES:
        x, whole = torch.zeros(8)[:4], torch.zeros(8)
        try:
            with Collectives() as check:
                pending = comm.start_all_gather(x, tp, into=whole)
                try:
                    access(x, whole)
                finally:
                    pending.wait()
                access(x, whole)  # afterwards all is allowed
            said[access.__name__] = ""
        except RaceError as error:
            said[access.__name__] = str(error)
        assert check.num_started == 1
    return said


ACCESSES: dict[Callable[[Tensor, Tensor], None], str] = {
    read_it: "aten::sum at test_happens_before.py:",
    write_what_is_read: "aten::add_",
    read_what_is_read: "",
    look_at_it: "",
    read_by_the_host: "tolist at",
    free_it: "resize_ of its storage at",
    write_beside_it: "",
}


def test_an_access_to_what_is_under_way_is_named_with_the_line_that_started_it() -> None:
    for said in run_ranks(2, accesses):
        for access, expected in ACCESSES.items():
            assert said[access.__name__].startswith(expected)
            assert bool(said[access.__name__]) == bool(expected), said[access.__name__]


def leave_one(place: Place) -> str:
    tp = Mesh.start(Layout(tp=2), rank=place.rank, init_method=place.rendezvous).tp
    try:
        with Collectives():
            _pending = comm.start_all_reduce(torch.zeros(1), tp)
    except RaceError as error:
        return str(error)
    return "nothing"


def test_a_collective_that_is_never_waited_for_is_reported_at_the_end() -> None:
    for said in run_ranks(2, leave_one):
        assert "1 collectives were never waited for" in said
        assert "c10d::allreduce_ started at test_happens_before.py:" in said


# ---- waits of the package that are taken out


class Removed(NamedTuple):
    """A wait of the package: its file and a piece of its line; the layout that has it; what the check says.

    `until` is a piece of a later line with a wait, in the same file: the wait is moved there, and not taken out.
    """

    file: str
    line: str
    layout: Layout
    chosen: Chosen
    said: str
    until: str | None = None


SEQUENCE = {"sequence_parallel": True, "eod_mask_loss": False}  # with that mask products are by pieces (make_spread)
NO_SEQUENCE = {"sequence_parallel": False}
LINEAR, RING, TRANSFERS = "layers/linear.py", "attention/ring.py", "parallel/pipeline/executor.py"
REMOVED = [
    Removed(LINEAR, "whole = comm.start_all_gather(", Layout(tp=2), SEQUENCE, "started at layers/linear.py"),
    Removed(LINEAR, "else gathering.wait()", Layout(tp=2), SEQUENCE, "started at layers/linear.py"),
    Removed(
        LINEAR, "else gathering.wait()", Layout(tp=2), SEQUENCE, "started at layers/linear.py", "return reducing.wait()"
    ),
    Removed(LINEAR, "return reducing.wait()", Layout(tp=2), NO_SEQUENCE, "started at layers/linear.py"),
    Removed(
        "layers/recompute.py",
        "x = comm.start_all_gather(",
        Layout(tp=2),
        NO_SEQUENCE | {"recompute": "uniform"},
        "started at layers/recompute.py",
    ),
    Removed(RING, "block = coming.wait()", Layout(cp=2), {}, "started at attention/ring.py"),
    Removed(RING, "dk, dv = coming.wait()", Layout(cp=2), {}, "started at attention/ring.py"),
    Removed(
        "comm.py",
        "Pending(exchanged, work",
        Layout(cp=2),
        {"cp_comm_type": "a2a"},
        "started at attention/all_to_all.py",
    ),
    Removed(
        *("comm.py", "sent=sent, received=received).wait()", Layout(dp=2), {"experts": "softmax", "ep": "most"}),
        "started at layers/dispatch.py",
    ),
    Removed(
        TRANSFERS, "self.receiving.pop(action).wait()", Layout(pp=2), {}, "started at parallel/pipeline/executor.py"
    ),
    Removed(TRANSFERS, "self.sending.wait()", Layout(pp=2), {}, "never waited for:\n  c10d::send started at"),
    Removed(
        "parallel/data_parallel/gradients.py",
        "arrived = pending.wait()",
        Layout(dp=2),
        {},
        "started at parallel/data_parallel/gradients.py",
    ),
    Removed(
        "parallel/data_parallel/zero.py",
        ".pop(number).wait()",
        Layout(dp=2),
        {"zero": 1},
        "started at parallel/data_parallel/zero.py",
    ),
    Removed(
        "parallel/data_parallel/fully_sharded.py",
        "pending.wait()",
        Layout(dp=4),
        {"zero": 3, "copies": 2},
        "started at parallel/data_parallel/fully_sharded.py",
    ),
    Removed(
        *("layers/weight_gradients.py", "x = gathering.wait()", Layout(tp=2, pp=2), SEQUENCE | {"schedule": "zb-h1"}),
        "started at layers/weight_gradients.py",
    ),
]


def without(patch: pytest.MonkeyPatch, removed: Removed) -> None:
    """Take out the wait that this line of the package calls, or move it."""
    wait = comm.Pending.wait
    left: list[comm.Pending] = []

    def planted(self: comm.Pending) -> Tensor:
        caller = sys._getframe(1)
        path = caller.f_code.co_filename
        line = linecache.getline(path, caller.f_lineno) if path.endswith(removed.file) else ""
        if removed.line in line:
            left.append(self)
            return self._result
        if removed.until is not None and removed.until in line:
            while left:
                wait(left.pop())
        return wait(self)

    patch.setattr(comm.Pending, "wait", planted)


def train_without(place: Place, removed: Removed, problem: Problem, spread: Spread) -> str:
    """What the check says on this rank. Stages of a pipeline do not all see it: there it is an error, for all ranks."""
    with pytest.MonkeyPatch.context() as patch:
        without(patch, removed)
        try:
            under_the_check(place, train, problem, spread)
        except RaceError as error:
            if spread.layout.pp > 1:
                raise
            return str(error)
    return "nothing"


@pytest.mark.parametrize("removed", REMOVED, ids=[f"{each.file}-{each.line}-{each.until}" for each in REMOVED])
def test_a_wait_that_is_taken_out_or_moved_is_found(removed: Removed) -> None:
    layout, has_experts = removed.layout, "experts" in removed.chosen
    possible = choices_of_experts(layout) if has_experts else choices(layout)
    chosen = {feature: values[0] for feature, values in possible.items()} | removed.chosen
    make_problem, make_spread = (expert_problem, expert_spread) if has_experts else (problem_of, spread_of)
    problem, spread = make_problem(layout, chosen), make_spread(layout, chosen)
    try:
        of_ranks = run_ranks(layout.world_size, train_without, removed, problem, spread)
    except RankError as error:
        of_ranks = [str(error).partition("happens_before.RaceError: ")[2]]
    for said in of_ranks:
        assert removed.said in said
        assert " reads what " in said or " writes what " in said or "were never waited for" in said
