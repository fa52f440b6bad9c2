"""Tests of simulated plans: every schedule, 1 to 8 stages, 1 to 24 micro-batches, 1 to 4 chunks."""

import time
from collections.abc import Iterator
from functools import cache, partial
from itertools import product

import pytest

from megatronish.core.errors import UserError
from megatronish.parallel.schedules.plan import Action, Plan, StageChunk, looped, v_shaped
from megatronish.parallel.schedules.simulate import Costs, refuse_crossing, refuse_hang, simulate
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.schedules.timeline import TimedPlan, draw

SIZES = list(product(range(1, 9), range(1, 17)))


def plan_of(*rows: str) -> Plan:
    """`F0 B0b` -> the actions; a letter after the number is the chunk."""

    def action(text: str) -> Action:
        chunk = ord(text[-1]) - ord("a") if text[-1].isalpha() else 0
        return Action(text[0], chunk, int(text[1:].rstrip("ab")))  # type: ignore[arg-type]

    return [[action(text) for text in row.split()] for row in rows]


def text_of(row: list[Action]) -> str:
    """The actions of a stage in the notation of `plan_of`."""
    return " ".join(f"{action.kind}{action.micro_batch}{'ab'[action.chunk]}" for action in row)


@cache
def simulated(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None, costs: Costs | None = None
) -> TimedPlan:
    """A schedule on paper, by the costs of a whole stage."""
    schedule = SCHEDULES[name]
    chunks = num_chunks or schedule.num_chunks or 1
    plan = schedule.plan(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=chunks)
    placement = schedule.place(num_stages=num_stages, num_chunks=chunks)
    refuse_crossing(plan, placement)
    return simulate(plan, costs=(costs or Costs()).per_chunk(chunks), placement=placement)


def all_sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Stages, micro-batches (fewer than stages, odd ones, many) and chunks."""
    num_chunks = SCHEDULES[name].num_chunks
    for chunks, stages in product([num_chunks] if num_chunks else range(1, 5), range(1, 9)):
        for micro_batches in [*range(1, 3 * stages + 1), 50]:
            yield stages, micro_batches, chunks


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_hangs_misses_work_or_crosses_messages(name: str) -> None:
    for stages, micro_batches, chunks in all_sizes(name):
        done = simulated(name, stages, micro_batches, chunks)
        assert {len(row) for row in done.timeline} == {
            micro_batches * chunks * (2 + SCHEDULES[name].has_weight_gradients)
        }


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_forwards_alone_hang_nowhere(name: str) -> None:
    """That is an evaluation."""
    schedule = SCHEDULES[name]
    for stages, micro_batches in product(range(1, 9), (1, 3, 8, 17)):
        plan = schedule.plan(num_stages=stages, num_microbatches=micro_batches)
        forwards = [[action for action in row if action.kind == "F"] for row in plan]
        refuse_hang(forwards, schedule.place(num_stages=stages))


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_is_slower_than_one_f_one_b_or_holds_more_than_all(name: str) -> None:
    for stages, micro_batches, chunks in all_sizes(name):
        done = simulated(name, stages, micro_batches, chunks)
        assert done.makespan <= 3 * (micro_batches + stages - 1) + 1e-9
        assert max(done.peak_live) <= micro_batches * chunks


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_a_pure_function_and_quick(name: str) -> None:
    schedule = SCHEDULES[name]
    chunks = schedule.num_chunks or 4
    for number in range(2):
        start = time.thread_time()
        schedule.plan(num_stages=64, num_microbatches=512, num_chunks=chunks)
        if time.thread_time() - start < 2:
            break
        assert number == 0  # which may meet the collector of garbage of all tests before
    small = partial(schedule.plan, num_stages=16, num_microbatches=128, num_chunks=chunks)
    assert small() == small()
    assert len(schedule.place(num_stages=64, num_chunks=chunks)) == 64 * chunks


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipeline_idles_for_a_stage_less_than_it_has(name: str) -> None:
    for num_stages, num_microbatches in SIZES:
        simulation = simulated(name, num_stages, num_microbatches)
        # (stages - 1) forwards and backwards: arXiv:2104.04473, section 2.2.
        assert simulation.makespan == 3 * (num_microbatches + num_stages - 1)
        assert simulation.bubble_rate == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


def test_gpipe_holds_every_micro_batch_alive() -> None:
    for num_stages, num_microbatches in SIZES:
        simulation = simulate(SCHEDULES["gpipe"].plan(num_stages=num_stages, num_microbatches=num_microbatches))
        assert simulation.peak_live == [num_microbatches] * num_stages


def test_one_f_one_b_holds_no_more_alive_than_stages_that_follow() -> None:
    for num_stages, num_microbatches in SIZES:
        simulation = simulate(SCHEDULES["1f1b"].plan(num_stages=num_stages, num_microbatches=num_microbatches))
        assert simulation.peak_live == [min(num_stages - s, num_microbatches) for s in range(num_stages)]


def test_interleaving_divides_the_bubble_by_the_chunks_and_holds_what_is_published() -> None:
    for p, v, groups in product(range(2, 9), range(2, 5), range(1, 4)):
        m = groups * p
        done = simulated("interleaved", p, m, v)
        assert done.makespan == pytest.approx(3 * m + 3 * (p - 1) / v)  # arXiv:2104.04473, section 2.2.2
        published = [2 * (p - s - 1) + (v - 1) * p + 1 for s in range(p)]
        assert done.peak_live == [min(m * v, live) for live in published]


@pytest.mark.long
def test_interleaving_holds_no_more_for_an_odd_number_of_micro_batches() -> None:
    for p, m, v in all_sizes("interleaved"):
        for s, live in enumerate(simulated("interleaved", p, m, v).peak_live):
            assert live <= (2 * (p - s - 1) + (v - 1) * p + 1 if v > 1 else p - s)


def test_interleaving_goes_through_the_chunks_in_groups() -> None:
    plan = SCHEDULES["interleaved"].plan(num_stages=2, num_microbatches=3, num_chunks=2)
    assert [text_of(row) for row in plan] == [
        "F0a F1a F0b F1b F2a B0b B1b F2b B0a B1a B2b B2a",
        "F0a F1a F0b B0b F1b B1b F2a B0a B1a F2b B2b B2a",
    ]
    one_chunk = SCHEDULES["interleaved"].plan(num_stages=4, num_microbatches=6, num_chunks=1)
    assert one_chunk == SCHEDULES["1f1b"].plan(num_stages=4, num_microbatches=6)


def test_zb_h1_holds_what_the_worst_stage_of_one_f_one_b_holds() -> None:
    for p, m in SIZES:
        assert simulated("zb-h1", p, m).peak_live == [min(p, m)] * p
        # arXiv:2401.10241, table 1: a bubble of (p - 1) (T_F + T_B - T_W).
        assert m < p or simulated("zb-h1", p, m).makespan == 3 * m + p - 1


def test_zb_h1_defers_each_weight_gradient_by_as_many_micro_batches_as_the_stage_has_before_it() -> None:
    plan = SCHEDULES["zb-h1"].plan(num_stages=3, num_microbatches=4)
    assert [text_of(row).replace("a", "") for row in plan] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


@pytest.mark.long
def test_zb_v_has_no_bubble_and_holds_no_more_than_one_f_one_b() -> None:
    for p, m, _ in all_sizes("zb-v"):
        done = simulated("zb-v", p, m)
        assert max(done.peak_live) <= 2 * p
        assert m < 2 * p - 1 or done.bubble_rate == pytest.approx(0, abs=1e-12)
        assert done.makespan <= simulated("zb-h1", p, m).makespan


def test_at_twice_as_many_micro_batches_as_stages_the_new_schedules_take_fewer_ticks() -> None:
    ticks = {name: simulated(name, 8, 16, chunks).makespan for name, chunks in TICKS}
    assert ticks == {"1f1b": 69, "interleaved": 58.5, "zb-h1": 55, "zb-v": 51.5}


TICKS = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]

# arXiv:2401.10241: 8 stages, the 1.5B model. Micro-batches, T_F, T_B, T_W and T_comm in ms, bubbles of both.
PUBLISHED = [
    (24, Costs(18.522, 18.086, 9.337, 0.601), 0.2431, 0.1585),
    (32, Costs(18.513, 18.086, 9.331, 0.626), 0.1985, 0.1242),
    (64, Costs(18.546, 18.097, 9.321, 0.762), 0.1240, 0.0674),
]


@pytest.mark.parametrize(("num_microbatches", "costs", "of_1f1b", "of_zb_h1"), PUBLISHED)
def test_bubble_rates_are_the_published_ones(
    num_microbatches: int, costs: Costs, of_1f1b: float, of_zb_h1: float
) -> None:
    assert simulated("1f1b", 8, num_microbatches, costs=costs).bubble_rate == pytest.approx(of_1f1b, abs=1e-4)
    assert simulated("zb-h1", 8, num_microbatches, costs=costs).bubble_rate == pytest.approx(of_zb_h1, abs=1e-4)


def test_a_number_of_chunks_that_a_schedule_cannot_have_is_refused_with_those_that_can() -> None:
    with pytest.raises(
        UserError, match="1f1b has num_chunks=1 a stage, not 2; use 1, or one of interleaved, zb-v for 2"
    ):
        SCHEDULES["1f1b"].plan(num_stages=2, num_microbatches=4, num_chunks=2)
    with pytest.raises(UserError, match="zb-v has num_chunks=2 a stage, not 1"):
        SCHEDULES["zb-v"].place(num_stages=2, num_chunks=1)
    with pytest.raises(UserError, match="num_chunks=0 must be at least 1"):
        SCHEDULES["interleaved"].plan(num_stages=2, num_microbatches=4, num_chunks=0)
    with pytest.raises(UserError, match="num_microbatches=0 must be at least 1"):
        SCHEDULES["zb-v"].plan(num_stages=2, num_microbatches=0)
    with pytest.raises(UserError, match="num_stages=0 must be at least 1"):
        SCHEDULES["1f1b"].place(num_stages=0)


def test_one_f_one_b_draws_itself() -> None:
    simulation = simulate(
        SCHEDULES["1f1b"].plan(num_stages=2, num_microbatches=3), costs=Costs(forward=1, backward=2, weight=0)
    )
    assert draw(simulation.timeline) == (
        "stage 0:  F0  F1   .   .  B0  --  F2  B1  --   .  B2  --\n"
        "stage 1:   .  F0  B0  --  F1  B1  --  F2  B2  --   .   ."
    )  # fmt: skip


def test_transfers_delay_a_pipeline_but_not_a_single_stage() -> None:
    costs = Costs(forward=1, backward=1, weight=1, transfer=0.5)
    assert simulate(SCHEDULES["gpipe"].plan(num_stages=1, num_microbatches=2), costs=costs).makespan == 6
    assert simulate(SCHEDULES["gpipe"].plan(num_stages=3, num_microbatches=1), costs=costs).makespan == 9 + 4 * 0.5


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
    placement = [StageChunk(0, 0), StageChunk(1, 0), StageChunk(1, 1), StageChunk(0, 1)]
    plan = plan_of("F0a F0b B0b B0a", "F0a F0b B0b B0a")
    simulation = simulate(plan, costs=Costs(forward=1, backward=1, weight=0, transfer=10), placement=placement)
    assert simulation.makespan == 8 + 4 * 10
    assert simulation.peak_live == [2, 2]


def test_a_v_goes_down_the_stages_and_up_again() -> None:
    assert v_shaped(num_stages=2) == [StageChunk(0, 0), StageChunk(1, 0), StageChunk(1, 1), StageChunk(0, 1)]
    assert SCHEDULES["zb-v"].place(num_stages=1) == [StageChunk(0, 0), StageChunk(0, 1)]


def test_chunks_of_an_interleaved_plan_go_round_the_stages() -> None:
    assert looped(num_stages=2, num_chunks=2) == [
        StageChunk(0, 0),
        StageChunk(1, 0),
        StageChunk(0, 1),
        StageChunk(1, 1),
    ]
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
        simulate(plan_of("F0a F0b B0b B0a"), placement=[StageChunk(0, 1), StageChunk(0, 0)])


def test_a_schedule_that_hangs_only_because_sends_wait_is_refused() -> None:
    # Stage 0 cannot send 2 before 1 is received, stage 1 does not want 1 before it has done 2.
    with pytest.raises(ValueError, match="schedule hangs at tick 2"):
        simulate(plan_of("F0 F1 F2 B0 B1 B2", "F2 F0 F1 B0 B1 B2"))
    simulate(plan_of("F0 F1 B0 B1", "F1 F0 B0 B1"))  # one receive is posted ahead


def test_lines_up_and_down_do_not_wait_for_each_other() -> None:
    v = v_shaped(num_stages=2)
    # Stage 0 sends F1a up while F0b, which stage 1 sends down, is still on its way: two lines.
    simulate(plan_of("F0a F1a F0b F1b B0b B1b B0a B1a", "F0a F0b F1a F1b B0b B0a B1b B1a"), placement=v)
    # On one line they wait: stage 0 holds F1a back until F0a is wanted, which is after F1a.
    with pytest.raises(ValueError, match="schedule hangs"):
        simulate(
            plan_of(
                "F0a F1a F2a F0b F1b F2b B0b B1b B2b B0a B1a B2a", "F2a F2b F0a F0b F1a F1b B0b B1b B2b B0a B1a B2a"
            ),
            placement=v,
        )


def test_messages_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="stage 0 sends what F0 of stage 1 needs while that waits for F1"):
        refuse_crossing(plan_of("F0 F1 B0 B1", "F1 F0 B0 B1"), looped(num_stages=2))
    with pytest.raises(ValueError, match="stage 1 sends what B1 of stage 0 needs while that waits for B0"):
        refuse_crossing(plan_of("F0 F1 B0 B1", "F0 F1 B1 B0"), looped(num_stages=2))


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
        simulate(
            plan_of("F0a B0a F0b B0b", "F0a B0a F0b B0b"),
            placement=[StageChunk(0, 0), StageChunk(1, 0), StageChunk(1, 1)],
        )
