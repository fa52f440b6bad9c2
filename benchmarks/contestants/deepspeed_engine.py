"""PlainGPT in DeepSpeed's engine on its CPU accelerator, with its own vectorised Adam. Variant "zero1": ZeRO-1.

Its Adam is compiled when it is first used, which takes a C++ compiler; where there is none, torch's fused AdamW.
bf16 is DeepSpeed's own: parameters in bf16, masters in fp32.
"""

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("RANK", "0")  # its engine starts a process group for one process, too
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")

import deepspeed
from torch import Tensor

from benchmarks.contestants.case import (
    LEARNING_RATE,
    MAX_NORM,
    Job,
    State,
    count,
    fused_adamw,
    parameter_groups,
)
from benchmarks.contestants.plain_gpt import PlainGPT, cross_entropy


class DeepSpeedLoop:
    """An engine and one step of training."""

    def __init__(self, job: Job, state: State) -> None:
        self.job, case = job, job.case
        model = PlainGPT(case).load(state)
        self.num_parameters = count(model)
        config = {
            "train_micro_batch_size_per_gpu": case.micro_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": 1 if job.variant == "zero1" else 0},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": case.numbers == "bf16"},
            "steps_per_print": 10**9,
        }
        deepspeed.init_distributed(dist_backend="gloo")
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=their_adam(model), config=config)

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update."""
        [(inputs, targets)] = self.job.micro_batches(tokens, labels)
        loss = cross_entropy(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


def their_adam(model: PlainGPT) -> Any:
    """DeepSpeed's Adam where it can be compiled."""
    try:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(
            parameter_groups(model), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, adamw_mode=True
        )
    except Exception as error:
        print(f"no DeepSpeedCPUAdam: {error}")
        return fused_adamw(model)


def build(job: Job, state: State) -> DeepSpeedLoop:
    """The loop on this rank."""
    return DeepSpeedLoop(job, state)
