"""How long, on how much, in which precision?"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length of the run, precision, seed."""

    seq_length: int = 0
    """Tokens S of one sample."""
    micro_batch_size: int = 0
    """Samples B in one forward pass."""
    global_batch_size: int | None = None
    """Samples in one step, over all ranks. Derived: micro_batch_size * dp."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: grow the global batch from START in steps of INCREMENT over SAMPLES samples."""
    train_iters: int | None = None
    """Steps to train for."""
    train_samples: int | None = None
    """Samples to train for, instead of --train-iters."""
    exit_interval: int | None = None
    """Save and leave after every so many steps."""
    exit_duration_in_mins: float | None = None
    """Save and leave after so many minutes."""
    eval_interval: int = 1000
    """Steps between evaluations."""
    eval_iters: int = 100
    """Global batches of one evaluation; 0 for none."""
    seed: int = 1234
    """Of initial weights, dropout and data order."""
    bf16: bool = False
    """Compute in bf16; master weights, gradients and their reduction stay in fp32."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop when the loss or the gradient norm is not finite."""
