"""Tests of all-or-none: what one rank finds, or fails at, all ranks learn."""

import pytest
from ranks import run_ranks

from megatronish.core.errors import UserError
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.parallel.all_or_none import same_on_all
from megatronish.parallel.mesh import Mesh, leave


def look(place: Place, seen: tuple[str | None, ...]) -> str:
    """What a rank makes of it."""
    mesh = Mesh.start(Layout(dp=len(seen)), rank=place.rank, init_method=place.rendezvous)
    try:
        return str(same_on_all(mesh.checkpoint_axis, lambda: seen[place.rank], what="in DIR"))
    except UserError as error:
        return str(error)
    finally:
        leave()


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (("step_2", "step_2"), "step_2"),
        (("step_2", "step_2", None), "rank 2 does not see what rank 0 sees in DIR; let all ranks see one folder"),
    ],
)
def test_ranks_that_do_not_see_one_folder_are_told(seen: tuple[str | None, ...], told: str) -> None:
    assert set(run_ranks(len(seen), look, seen)) == {told}
