"""Section [optimizer] of a config: optimizer, weight decay, and the learning-rate schedule."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from megatronish.config.marks import REQUIRED, NamedIn, at_least, at_most, fraction, greater_than
from megatronish.core.names import OPTIMIZER_NAMES, in_braces


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, weight decay, clipping, and the learning rate over time."""

    optimizer: Annotated[str, NamedIn(OPTIMIZER_NAMES), tyro.conf.arg(metavar=in_braces(OPTIMIZER_NAMES))] = "adam"
    """adam is AdamW: decoupled weight decay. muon is for the matrices of layers, with adam for the rest."""
    optimizer_args: tuple[str, ...] = ()
    """Options of a plug-in's optimizer: option=value ..."""
    lr: Annotated[float | None, REQUIRED, greater_than(0)] = None
    """Learning rate at its peak."""
    decoupled_lr: Annotated[float | None, greater_than(0)] = None
    """Learning rate at its peak of the word embedding and the output layer. Derived: --lr."""
    min_lr: Annotated[float, at_least(0)] = 0.0
    """The learning rate decays to this."""
    decoupled_min_lr: Annotated[float | None, at_least(0)] = None
    """The learning rate of the word embedding and the output layer decays to this. Derived: --min-lr."""
    loraplus_lr_ratio: Annotated[float | None, greater_than(0)] = None
    """Learning rate of LoRA's factors B as a multiple of --lr, 16 in the paper on LoRA+."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "range-test"] = "linear"
    """Shape after warm-up. range-test grows without an end."""
    lr_decay_iters: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Steps until min_lr is reached. Derived: all of the run."""
    lr_decay_samples: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Samples until min_lr is reached, with --train-samples."""
    lr_decay_tokens: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Tokens until min_lr is reached: --lr-decay-samples of --seq-length tokens each."""
    lr_warmup_iters: Annotated[int, at_least(0), at_most(2**63 - 1)] = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: Annotated[int, at_least(0), at_most(2**63 - 1)] = 0
    """Samples of linear warm-up, with --train-samples."""
    lr_warmup_tokens: Annotated[int | None, at_least(0), at_most(2**63 - 1)] = None
    """Tokens of linear warm-up: --lr-warmup-samples of --seq-length tokens each."""
    lr_warmup_fraction: Annotated[float | None, fraction(excluding=1)] = None
    """Warm-up as a part of the decay."""
    lr_warmup_init: Annotated[float, at_least(0)] = 0.0
    """Learning rate that warm-up starts from."""
    lr_warmup_style: Literal["linear", "late-linear", "cosine", "log"] = "linear"
    """Shape of warm-up. late-linear and log are DeepSpeed's: they start with the second step."""
    lr_warmup_stairs: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Warm-up in so many stairs."""
    lr_decay_stairs: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """The decay in so many stairs."""
    lr_tail_decay: Annotated[float, at_least(0)] = 0.0
    """After the decay the learning rate is min_lr / (1 + this x steps after it)."""
    lr_range_test_rate: Annotated[float, greater_than(0)] = 1.0
    """range-test: in each interval the learning rate grows by this multiple of --lr."""
    lr_range_test_iters: Annotated[int, at_least(1), at_most(2**31 - 1)] = 2000
    """range-test: steps of an interval."""
    lr_range_test_staircase: bool = False
    """range-test: the learning rate stays in an interval, and grows between two."""
    cycle_min_momentum: Annotated[float | None, fraction(excluding=1)] = None
    """One cycle: momentum at the peak of the learning rate. Adam's beta1, momentum of sgd and muon."""
    cycle_max_momentum: Annotated[float | None, fraction(excluding=1)] = None
    """One cycle: momentum where the learning rate starts and ends."""
    momentum_tail_growth: Annotated[float, at_least(-1)] = 0.0
    """After the decay the momentum is cycle_max_momentum x (1 + this x steps after it)."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last part of warm-up-stable-decay."""
    lr_wsd_decay_iters: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Steps of the last part of WSD."""
    lr_wsd_decay_samples: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Samples of the last part of WSD, with --train-samples."""
    weight_decay: Annotated[float, at_least(0)] = 0.01
    """Of matrices; norms and biases have none."""
    apply_wd_to_qk_layernorm: bool = False
    """Weight decay of the norms of queries and keys, too."""
    start_weight_decay: Annotated[float | None, at_least(0)] = None
    """Weight decay at the first step, where it changes over the run."""
    end_weight_decay: Annotated[float | None, at_least(0)] = None
    """Weight decay at the last step, where it changes over the run."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""
    clip_grad: Annotated[float, at_least(0)] = 1.0
    """Largest global gradient norm; 0 for no clipping."""
    qk_clip: bool = False
    """After a step, weights of queries and keys shrink in heads with a logit above a threshold (MuonClip)."""
    qk_clip_threshold: Annotated[float, greater_than(0)] = 100.0
    """QK-clip: largest logit that a head may have."""
    qk_clip_alpha: Annotated[float, fraction(excluding=1)] = 0.5
    """QK-clip: the exponent of queries; that of keys is 1 minus this."""
    adam_beta1: Annotated[float, fraction(excluding=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, fraction(excluding=1)] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, greater_than(0)] = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: Annotated[float, fraction(excluding=1)] = 0.9
    """Momentum of sgd."""
    muon_momentum: Annotated[float, fraction(excluding=1)] = 0.95
    """Momentum of muon."""
    muon_nesterov: bool = False
    """Nesterov's momentum, as in the papers on Muon."""
    muon_num_ns_steps: Annotated[int, at_least(1), at_most(100_000)] = 5
    """Newton-Schulz steps that make a matrix orthogonal."""
    muon_coefficient_type: Literal["quintic", "simple"] = "quintic"
    """Of these steps: quintic has one set for each of five, simple has Jordan's for all."""
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] = "highest"
    """Matrix products of these steps: highest is fp32, high TF32 (on GPUs that have it), medium bf16."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """A step of muon times sqrt(max(rows, columns)), sqrt(rows / columns) or sqrt(max(1, rows / columns))."""
    muon_extra_scale_factor: Annotated[float, greater_than(0)] = 1.0
    """And times this: with spectral and 0.2, muon takes the learning rate and weight decay of adam."""
