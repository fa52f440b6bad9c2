"""How are parameters updated?"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, weight decay, clipping, and the learning rate over time."""

    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """adam is AdamW: decoupled weight decay. muon is for the matrices of layers, with adam for the rest."""
    lr: float | None = None
    """Learning rate at its peak."""
    min_lr: float = 0.0
    """The learning rate decays to this."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape after warm-up."""
    lr_decay_iters: int | None = None
    """Steps until min_lr is reached. Derived: all of the run."""
    lr_decay_samples: int | None = None
    """Samples until min_lr is reached, with --train-samples."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up, with --train-samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a part of the decay."""
    lr_warmup_init: float = 0.0
    """Learning rate that warm-up starts from."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last part of warm-up-stable-decay."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the last part of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the last part of WSD, with --train-samples."""
    weight_decay: float = 0.01
    """Of matrices; norms and biases have none."""
    start_weight_decay: float | None = None
    """Weight decay at the first step, where it changes over the run."""
    end_weight_decay: float | None = None
    """Weight decay at the last step, where it changes over the run."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 for no clipping."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of sgd."""
    muon_momentum: float = 0.95
    """Momentum of muon."""
    muon_nesterov: bool = False
    """Nesterov's momentum, as in the papers on Muon."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz steps that make a matrix orthogonal."""
    muon_coefficient_type: Literal["quintic", "simple"] = "quintic"
    """Of these steps: quintic has one set for each of five, simple has Jordan's for all."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """A step of muon times sqrt(max(rows, columns)), sqrt(rows / columns) or sqrt(max(1, rows / columns))."""
    muon_extra_scale_factor: float = 1.0
    """And times this: with spectral and 0.2, muon takes the learning rate and weight decay of adam."""
