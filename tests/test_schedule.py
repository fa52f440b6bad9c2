"""Plans on paper: every schedule, 1 to 8 stages, 1 to 16 micro-batches."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from megatronish.pipeline.draw import draw
from megatronish.pipeline.draw_png import draw_png
from megatronish.pipeline.plan import Action, Place, Plan, looped
from megatronish.pipeline.schedule import SCHEDULES
from megatronish.pipeline.schedules.gpipe import gpipe
from megatronish.pipeline.schedules.one_f_one_b import one_f_one_b
from megatronish.pipeline.simulate import Costs, simulate

SIZES = list(product(range(1, 9), range(1, 17)))
ROOT = Path(__file__).parent.parent


def plan_of(*rows: str) -> Plan:
    """`F0 B0b` -> the actions; a letter after the number is the chunk."""

    def action(text: str) -> Action:
        chunk = ord(text[-1]) - ord("a") if text[-1].isalpha() else 0
        return Action(text[0], chunk, int(text[1:].rstrip("ab")))  # type: ignore[arg-type]

    return [[action(text) for text in row.split()] for row in rows]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_schedule_can_be_carried_out_for_all_sizes(name: str) -> None:
    for num_stages, num_microbatches in SIZES:
        simulation = simulate(SCHEDULES[name].plan(num_stages=num_stages, num_microbatches=num_microbatches))
        # Both schedules idle for (stages - 1) forwards and backwards: arXiv:2104.04473, section 2.2.
        assert simulation.makespan == 3 * (num_microbatches + num_stages - 1)
        assert simulation.bubble_rate == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


def test_gpipe_holds_every_micro_batch_alive() -> None:
    for num_stages, num_microbatches in SIZES:
        simulation = simulate(gpipe(num_stages=num_stages, num_microbatches=num_microbatches))
        assert simulation.peak_live == [num_microbatches] * num_stages


def test_one_f_one_b_holds_no_more_alive_than_stages_that_follow() -> None:
    for num_stages, num_microbatches in SIZES:
        simulation = simulate(one_f_one_b(num_stages=num_stages, num_microbatches=num_microbatches))
        assert simulation.peak_live == [min(num_stages - s, num_microbatches) for s in range(num_stages)]


def test_one_f_one_b_draws_itself() -> None:
    simulation = simulate(one_f_one_b(num_stages=2, num_microbatches=3), costs=Costs(forward=1, backward=2, weight=0))
    assert draw(simulation.timeline) == (
        "stage 0:  F0  F1   .   .  B0  --  F2  B1  --   .  B2  --\n"
        "stage 1:   .  F0  B0  --  F1  B1  --  F2  B2  --   .   ."
    )  # fmt: skip


def test_transfers_delay_a_pipeline_but_not_a_single_stage() -> None:
    costs = Costs(forward=1, backward=1, weight=1, transfer=0.5)
    assert simulate(gpipe(num_stages=1, num_microbatches=2), costs=costs).makespan == 6
    assert simulate(gpipe(num_stages=3, num_microbatches=1), costs=costs).makespan == 9 + 4 * 0.5


def test_a_gradient_leaves_before_the_weight_gradient_where_the_plan_says_so() -> None:
    costs = Costs(forward=1, backward=1, weight=2)
    whole = simulate(plan_of("F0 B0", "F0 B0"), costs=costs)
    split = simulate(plan_of("F0 B0 W0", "F0 B0 W0"), costs=costs)
    assert whole.makespan == 8
    assert split.makespan == 6
    assert split.peak_live == [1, 1]


def test_an_activation_lives_until_its_weight_gradient() -> None:
    assert simulate(plan_of("F0 B0 F1 B1 W0 W1")).peak_live == [2]


def test_chunks_in_a_v_need_no_transfer_where_it_turns() -> None:
    placement = [Place(0, 0), Place(1, 0), Place(1, 1), Place(0, 1)]
    plan = plan_of("F0a F0b B0b B0a", "F0a F0b B0b B0a")
    simulation = simulate(plan, costs=Costs(forward=1, backward=1, weight=0, transfer=10), placement=placement)
    assert simulation.makespan == 8 + 4 * 10
    assert simulation.peak_live == [2, 2]


def test_chunks_of_an_interleaved_plan_go_round_the_stages() -> None:
    assert looped(num_stages=2, num_chunks=2) == [Place(0, 0), Place(1, 0), Place(0, 1), Place(1, 1)]
    simulation = simulate(plan_of("F0a F1a F0b F1b B0b B1b B0a B1a", "F0a F1a F0b F1b B0b B1b B0a B1a"))
    assert simulation.peak_live == [4, 4]
    assert simulation.bubble_rate == pytest.approx(1 / 5)  # half the bubble of one chunk: (2 - 1) / 2 of 2 + 1
    assert "F0a" in draw(simulation.timeline)


def test_a_schedule_that_hangs_is_refused_with_a_picture() -> None:
    # Stage 0 waits for B0 before F1, stage 1 for F1 before B0.
    with pytest.raises(ValueError, match="schedule hangs") as refused:
        simulate(plan_of("F0 B0 F1 B1", "F0 F1 B0 B1"), costs=Costs(forward=7, transfer=3))
    assert str(refused.value) == (
        "schedule hangs at tick 2:\n"
        "stage 0:  F0   .   .\n"
        "stage 1:   .  F0   ."
    )  # fmt: skip
    with pytest.raises(ValueError, match="schedule hangs at tick 0"):
        simulate(plan_of("F0a F0b B0b B0a"), placement=[Place(0, 1), Place(0, 0)])


def test_a_schedule_that_hangs_only_because_sends_wait_is_refused() -> None:
    # Stage 0 cannot send 2 before 1 is received, stage 1 does not want 1 before it has done 2.
    with pytest.raises(ValueError, match="schedule hangs at tick 2"):
        simulate(plan_of("F0 F1 F2 B0 B1 B2", "F2 F0 F1 B0 B1 B2"))
    simulate(plan_of("F0 F1 B0 B1", "F1 F0 B0 B1"))  # one receive is posted ahead


BROKEN = [
    (plan_of("F0 B0 F1"), "stage 0 misses B1"),
    (plan_of("F0 B0", ""), "stage 1 misses F0"),
    (plan_of("F0 F0 B0"), "stage 0 repeats F0"),
    (plan_of("B0 F0"), "stage 0 does B0 before F0"),
    (plan_of("F0 W0 B0"), "stage 0 does W0 before B0"),
    (plan_of("F0 B0 W0 F1 B1"), "stage 0 misses W1"),
    (plan_of("F0a B0a", "F0a B0a F0b B0b"), "stage 0 misses F0b"),
    (plan_of("", ""), "at least one micro-batch"),
]


@pytest.mark.parametrize(("plan", "message"), BROKEN)
def test_a_plan_that_misses_repeats_or_reorders_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(plan)


def test_an_action_of_a_chunk_that_the_stage_does_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage 0 has B0b, but the stage holds chunks \[0\]"):
        simulate(plan_of("F0a B0a F0b B0b", "F0a B0a F0b B0b"), placement=[Place(0, 0), Place(1, 0), Place(1, 1)])


def test_a_plan_is_drawn_into_a_png(tmp_path: Path) -> None:
    simulation = simulate(plan_of("F0a F0b B0b W0b B0a W0a"))
    draw_png(simulation, tmp_path / "plan.png", title="a plan")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/draw_schedule.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_tool_draws_and_counts() -> None:
    done = run_tool("--schedule", "1f1b", "--pp", "4", "--microbatches", "8")
    assert done.returncode == 0, done.stderr
    assert "stage 3:   .   .   .  F0  B0" in done.stdout
    assert "bubble rate 27.27%" in done.stdout


def test_the_tool_names_the_schedules_it_knows() -> None:
    done = run_tool("--schedule", "2f2b")
    assert done.returncode == 2
    assert "schedule='2f2b' is not known; use one of gpipe, 1f1b" in done.stderr
