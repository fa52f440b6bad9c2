"""Tests of verify_layout for models with experts: choices are replayed, and a token sent elsewhere is an error."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import Finished, run_job, tiny
from sweeps import further
from torch import Tensor

from megatronish.commands import verify as verify_layout
from megatronish.engine.balancing import Balancing, ExpertLoad
from megatronish.layers.router import Router, RouterSettings
from megatronish.verify.verify import Choices, Rerouted, Trace, compare, routing_report

EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
)


def verify(folder: Path, flags: str, **options: object) -> Finished:
    argv = tiny(folder / "run", f"--steps 2 {EXPERTS} {flags}")
    return run_job(argv, folder, main=verify_layout.main, **options)


@pytest.mark.parametrize(
    "layout",
    [
        further("--dp 2 --ep 2"),
        "--tp 2 --cp 2 --ep 2 --etp 1 --zero-stage 3 --recompute-granularity full",
        "--dp 4 --ep 4 --etp 1 --moe-router-topk 2 --moe-expert-rank-capacity-factor 1",  # steps are computed again
        further(
            "--tp 2 --pp 2 --etp 2 --sequence-parallel --moe-expert-capacity-factor 0.75 --pipeline-schedule zb-h1"
        ),
    ],
)
def test_a_good_layout_of_experts_trains_the_same_model(tmp_path: Path, layout: str) -> None:
    ended = verify(tmp_path, layout)
    assert ended.status == 0, ended
    assert "trains the same model: every difference is at most 1e-05 relative" in ended.output
    # Four samples of 16 tokens, two layers, two steps.
    assert "experts: 0 of 256 tokens, counted in each layer and step, would have chosen others" in ended.output


def choose_the_next() -> None:
    """Planted: in a layout, and not in one process, each expert is taken for the next one."""
    choose = Router.choose

    def wrong(self: Router, scores: Tensor) -> Tensor:
        chosen = choose(self, scores)
        return (chosen + 1) % scores.shape[1] if dist.is_initialized() else chosen

    Router.choose = wrong  # type: ignore[method-assign]


def move_biases_by_nothing() -> None:
    """Planted: in a layout no step moves a bias."""
    end_step = Balancing.end_step

    def wrong(self: Balancing, load: ExpertLoad | None) -> None:
        end_step(self, None if dist.is_initialized() else load)

    Balancing.end_step = wrong  # type: ignore[method-assign]


def test_a_token_that_is_sent_elsewhere_is_an_error(tmp_path: Path) -> None:
    ended = verify(tmp_path, "--dp 2 --ep 2", plant=choose_the_next)
    assert ended.status == 1, ended
    assert "does NOT train the same model: in step 1 layers.0 would have chosen other experts for the" in ended.output


def test_a_bias_that_is_not_that_of_one_process_is_an_error(tmp_path: Path) -> None:
    ended = verify(tmp_path, "--dp 2 --ep 2", plant=move_biases_by_nothing)
    assert ended.status == 1, ended
    assert "the bias of the router of layers.0 must be equal, and differ in step 1" in ended.output


def trace_with(margin: float) -> tuple[Trace, Trace]:
    """The trace of one process and that of a layout, in which one token would have gone elsewhere."""
    one = Trace.empty()._replace(steps=[(1.0, 1.0)], choices={"0/0/0": Choices([[0, 1], [1, 2]], [margin, 0.5])})
    return one, one._replace(choices={}, rerouted=[Rerouted(0, 0, 0, 0, margin)])


def test_a_token_may_go_elsewhere_where_rounding_decides() -> None:
    one, other = trace_with(5e-6)
    assert compare(one, other, layout="dp 2").difference is None
    assert "1 of 2 tokens" in routing_report(one, other) and "at most 5.0e-06" in routing_report(one, other)
    one, other = trace_with(2e-5)
    assert "for the token at position 0 of sample 0, at a margin of 2.0e-05" in str(
        compare(one, other, layout="dp 2").difference
    )


def test_the_margin_is_that_of_the_last_choice_and_of_the_groups() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.25, 0.05]])
    plain = Router(4, RouterSettings(4, 2), init_std=0.1)
    assert plain.margins(scores).tolist() == pytest.approx([0.05])
    grouped = Router(4, RouterSettings(4, 1, num_groups=2, group_topk=1), init_std=0.1)
    assert grouped.margins(scores).tolist() == pytest.approx([0.1])  # 0.4 to 0.3; the groups are 0.15 apart
    mixer = Router(4, RouterSettings(4, 2, score_function="sparsemixer", rival_epsilon=0.2), init_std=0.1)
    # 0.4 takes what is at least 0.24, and 0.3 what is at least 0.18: 0.25 is a rival of both, by 0.01 and by 0.07.
    assert mixer.margins(scores).tolist() == pytest.approx([0.01])
    everyone = Router(4, RouterSettings(4, 4), init_std=0.1)
    assert everyone.margins(scores).tolist() == [torch.inf]
