"""Tests of what can be wrong with experts: a sentence with value and remedy, no traceback, no hang."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import call_main, run_job, tiny
from sweeps import some_of
from test_bad_input import assert_told
from torch import Tensor

from megatronish.model.context import Context
from megatronish.model.experts import MixtureOfExperts

EXPERTS = "--num-experts 6 --moe-ffn-hidden-size 24"


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--dp 4 --ep 4", "num_experts=6 must be divisible by expert_model_parallel_size=4; use .* 1, 2, 3 or 6"),
        (
            "--dp 2 --ep 3",
            r"expert_model_parallel_size=3 x .* must divide the ranks of a stage, .* = 2; use --ep 1 or 2",
        ),
        (
            "--tp 4 --etp 3",
            "expert_tensor_parallel_size=3 must divide tensor_model_parallel_size=4; use --etp 1, 2 or 4",
        ),
        ("--moe-token-drop-policy probs", "--moe-token-drop-policy probs is refused: .* use position"),
        ("--moe-expert-rank-capacity-factor 0.5", "moe_expert_rank_capacity_factor=0.5 must be at least 1"),
        ("--moe-expert-rank-capacity-factor nan", "moe_expert_rank_capacity_factor=nan must be finite"),
        (
            "--moe-expert-rank-capacity-factor 1e308",
            "moe_expert_rank_capacity_factor=1e.308 must be at most 2147483647",
        ),
        ("--moe-expert-capacity-factor 1e308", "moe_expert_capacity_factor=1e.308 must be at most 2147483647"),
        ("--moe-expert-capacity-factor 0", "moe_expert_capacity_factor=0.0 must be greater than 0"),
        ("--moe-router-load-balancing-type sinkhorn", "every layout would choose otherwise; use seq_aux_loss, or none"),
        ("--moe-router-load-balancing-type even", "must be one of none, seq_aux_loss or global_aux_loss"),
        ("--moe-layer-freq [1]*100000000000000", "'.1.*100000000000000' is neither a number nor a list such as"),
        ("--moe-layer-freq [1,[0],1,1]", "is neither a number nor a list such as"),
        ("--moe-z-loss-coeff inf", "moe_z_loss_coeff=inf must be finite"),
        (
            "--moe-router-topk 3 --moe-router-num-groups 3 --moe-router-group-topk 1",
            "moe_router_group_topk=1 .* of 2 experts each, .* moe_router_topk=3 .*; use --moe-router-group-topk 3",
        ),
        (
            "--tp 2 --moe-shared-expert-intermediate-size 25",
            "moe_shared_expert_intermediate_size=25 must be divisible by tensor_model_parallel_size=2; use .* 25",
        ),
        (
            "--moe-router-topk 4 --moe-router-num-groups 3 --moe-router-group-topk 1 --moe-router-scores-per-group 1",
            "moe_router_group_topk=1 .* must leave moe_router_topk=4 experts to choose; use 2 to 3",
        ),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 1 --moe-router-scores-per-group 3",
            "moe_router_scores_per_group=3 must be at most the 2 experts of a group; use a smaller one",
        ),
        ("--moe-router-scores-per-group 1", "moe_router_scores_per_group is of groups of experts; add --moe-router-nu"),
        (
            "--moe-router-score-function sparsemixer --moe-router-pre-softmax",
            "moe_router_pre_softmax is not for moe_router_score_function=sparsemixer, .*; leave --moe-router-pre-so",
        ),
        (
            "--moe-apply-probs-on-input",
            "moe_apply_probs_on_input is for one expert a token, and moe_router_topk=2; use --",
        ),
        (
            "--moe-token-dispatcher-type deepep --moe-expert-rank-capacity-factor 1.5",
            "moe_expert_rank_capacity_factor=1.5 is of all-to-all, and moe_token_dispatcher_type=deepep .*; leave one",
        ),
        (
            "--moe-token-dispatcher-type deepep --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
            "moe_pad_expert_input_to_capacity is of all-to-all, and moe_token_dispatcher_type=deepep .*; leave one",
        ),
        ("--moe-router-topk 7", "moe_router_topk=7 must be at most num_experts=6; choose fewer"),
    ],
)
def test_a_wrong_flag_of_experts_is_named_with_its_remedy(tmp_path: Path, flags: str, pattern: str) -> None:
    assert_told(call_main(tiny(tmp_path / "run", f"{EXPERTS} {flags}")), pattern)


def spoil_a_router() -> None:
    """Planted: a weight of the router of layer 1 is not a number, on rank 1 alone."""
    forward = MixtureOfExperts.forward

    def wrong(self: MixtureOfExperts, x: Tensor, context: Context) -> Tensor:
        if self.layer == 1 and dist.get_rank() == 1:
            self.router.weight.data[0, 0] = torch.nan
        return forward(self, x, context)

    MixtureOfExperts.forward = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "others", some_of(["--dp 2", "--tp 2 --etp 1 --moe-expert-capacity-factor 1.0 --zero-stage 0"], ["--dp 2"])
)
def test_a_router_that_is_not_finite_is_named_by_layer_and_rank(tmp_path: Path, others: str) -> None:
    ended = run_job(tiny(tmp_path / "run", f"{EXPERTS} --ep 2 {others}"), tmp_path, plant=spoil_a_router)
    pattern = (
        "in step 1 must be finite: the router of layers.1 was the first whose logits were not, on rank 1; the param"
    )
    assert_told(ended, pattern, status=1)
