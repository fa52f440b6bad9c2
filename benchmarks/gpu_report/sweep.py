"""Sweep of the GPU report: one model, trained by megatronish, by a plain compiled loop and by torch's own FSDP2.

Every contender starts from the same weights and sees the same tokens; the losses of the first step must agree. A line
of JSON is written as soon as a contender is done, so what takes too long loses only itself and what comes after it.

    python benchmarks/gpu_report/sweep.py 1.3b lines.jsonl
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from plain import LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, PlainDecoder, Shape, Step, autocast_step, fsdp_step
from profiled import where_a_step_goes
from torch import Tensor

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.engine import build
from megatronish.estimate.costs.devices import peak_tflops
from megatronish.estimate.costs.memory import expected_memory
from megatronish.model.batch import MicroBatch
from megatronish.parallel.data_parallel import zero
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.sharding import Sharding
from megatronish.parallel.stages import Stages
from megatronish.specs.flops import model_flops_per_token

MODELS = {
    "124m": Shape(12, 768, 12, 1024, 16, 50304, 3072),
    "350m": Shape(24, 1024, 16, 1024, 16, 50304, 4096),
    "1.3b": Shape(24, 2048, 16, 2048, 4, 50304, 8192),
    "8b": Shape(32, 4096, 32, 4096, 1, 128256, 14336, kv_heads=8),  # as many of its layers as fit
    "tiny": Shape(2, 64, 4, 64, 2, 512, 128),
    "tiny-llama": Shape(2, 64, 4, 64, 2, 512, 128, kv_heads=2),
}
WARM_UP_STEPS, MOST_STEPS, MOST_SECONDS = 4, 20, 12.0
ROOM = 0.8  # of a device's memory
SAME_LOSSES = (2e-3, 5e-4)
"""How far the two first losses of contenders may be apart, of the loss.

The same weights give 1e-4 and 2e-5 in bf16; other random ones differed in one of them in twelve cases of twelve.
"""


class Timing(NamedTuple):
    """Losses of the first step, on one token alone, and of the second, on a batch; seconds of the timed ones.

    And the largest memory of a step on a GPU.
    """

    first_losses: tuple[float, float]
    seconds: list[float]
    peak_bytes: int | None


def config_of(shape: Shape, *, compiled: bool) -> Config:
    """The same model for megatronish, in bf16, without dropout."""
    llama: dict[str, Any] = {
        "group_query_attention": True,
        "num_query_groups": shape.kv_heads,
        "position_embedding_type": "rope",
        "rotary_base": 500000.0,
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
    }
    model = ModelConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **(llama if shape.kv_heads else {"openai_gelu": True}),
    )
    return Config(
        model=model,
        parallel=ParallelConfig(),
        training=TrainingConfig(
            seq_length=shape.seq_length, micro_batch_size=shape.micro_batch_size, bf16=True, compile=compiled
        ),
        optimizer=OptimizerConfig(clip_grad=MAX_NORM),
    )


def expected_bytes(shape: Shape) -> int:
    """Memory that megatronish expects to need."""
    config = config_of(shape, compiled=False)
    sizes = {"vocab_size": shape.vocab_size, "seq_length": shape.seq_length}
    loads = Stages.of(config.parallel, config.model, **sizes).loads(1)
    return expected_memory(config, loads, vocab_size=shape.vocab_size, device="cuda")[0].total


def fitted(shape: Shape, device: torch.device) -> Shape:
    """As many layers as are expected to fit."""
    if device.type != "cuda":
        return shape
    room = ROOM * torch.cuda.get_device_properties(device).total_memory
    numbers = range(shape.num_layers, 1, -1)
    return replace(
        shape, num_layers=next((n for n in numbers if expected_bytes(replace(shape, num_layers=n)) <= room), 1)
    )


def batch_of(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S], the same at every step."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(shape.vocab_size, (shape.micro_batch_size, shape.seq_length + 1), generator=generator)
    tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    return tokens.to(device), labels.to(device)


class DrawnOnDevice:
    """Initial values of whole parameters from one generator of the device, in place of fill_zeros.

    A run draws by names on one CPU thread, some 20 million parameters a second: minutes for a part of an 8B model.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    @torch.no_grad()
    def __call__(self, zeros: Tensor, sharding: Sharding, *_: Any, **__: Any) -> None:
        """Fill a whole parameter."""
        init = sharding.init
        if init.std is None:
            zeros.fill_(init.value)
        else:
            zeros.normal_(std=init.std, generator=self._generator)


def one_token(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a batch's shape that are one token each: a loss of hardly more than one logit.

    That of random tokens is the mean of thousands of logits, the logarithm of the vocabulary whatever the weights are.
    """
    return torch.full_like(batch[0], 1), torch.full_like(batch[1], 2)


def our_step(shape: Shape, device: torch.device, *, compiled: bool) -> tuple[Step, list[Tensor]]:
    """A step of megatronish's engine, and its parameters."""
    mesh = Mesh.start(device=device)
    with patch.object(zero, "fill_zeros", DrawnOnDevice(device)):
        engine = build.build_engine(config_of(shape, compiled=compiled), mesh, vocab_size=shape.vocab_size)

    def step(tokens: Tensor, labels: Tensor) -> float:
        batch, seq_length = tokens.shape
        micro_batch = MicroBatch(
            tokens=tokens,
            labels=labels,
            loss_mask=torch.ones_like(tokens, dtype=torch.bool),
            position_ids=torch.arange(seq_length).expand(batch, seq_length),
            sample_ids=torch.arange(batch),
        )
        done = engine.step([micro_batch], num_steps_done=0, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        return done.loss

    return step, list(engine.stage.model.parameters())


def plain_step(shape: Shape, device: torch.device, weights: Path, *, sharded: bool, backend: str) -> Step:
    """A step of the plain decoder, from megatronish's initial weights."""
    with device:
        model = PlainDecoder(shape)
    given = torch.load(weights, map_location=device)
    found = list(model.parameters())
    assert [each.shape for each in found] == [each.shape for each in given], "the models differ"
    with torch.no_grad():
        for parameter, value in zip(found, given, strict=True):
            parameter.copy_(value)
    return (fsdp_step if sharded else autocast_step)(model, backend=backend)


def timed(step: Step, batch: tuple[Tensor, Tensor], device: torch.device) -> Timing:
    """Run steps until there are enough, or until they have taken long enough. Each ends with its loss on the host."""
    first = step(*one_token(batch)), step(*batch)
    seconds: list[float] = []
    for _ in range(WARM_UP_STEPS):
        step(*batch)
    start = time.perf_counter()
    while len(seconds) < MOST_STEPS and time.perf_counter() - start < MOST_SECONDS:
        begin = time.perf_counter()
        step(*batch)
        seconds.append(time.perf_counter() - begin)
    return Timing(first, seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None)


def same(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the first losses of two contenders are those of the same weights."""
    return all(abs(a - b) <= most * b for a, b, most in zip(losses, others, SAME_LOSSES, strict=True))


def product_flops(device: torch.device) -> float:
    """FLOP/s of a large bf16 matrix product here, the median of 20."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = []
    for _ in range(25):
        begin = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(seconds[5:])


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Nothing of another contender is in the device's memory, before and after."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield


def contenders(
    shape: Shape, device: torch.device, weights: Path, *, backend: str
) -> dict[str, Callable[[], tuple[Step, torch.device]]]:
    """How each contender is made, and where its batches lie: ours begin on the CPU, as a loader's do."""
    cpu = torch.device("cpu")

    def ours(*, compiled: bool) -> tuple[Step, torch.device]:
        step, parameters = our_step(shape, device, compiled=compiled)
        if not weights.exists():
            torch.save([each.detach().cpu() for each in parameters], weights)
        return step, cpu

    def plain(*, sharded: bool) -> tuple[Step, torch.device]:
        return plain_step(shape, device, weights, sharded=sharded, backend=backend), device

    found = {"megatronish": partial(ours, compiled=False)}
    if device.type == "cuda":  # a trial on a CPU would wait for a compiler
        found["megatronish --compile"] = partial(ours, compiled=True)
    return found | {"plain, compiled": partial(plain, sharded=False), "FSDP2, compiled": partial(plain, sharded=True)}


def measured(shape: Shape, name: str, make: Callable[[], tuple[Step, torch.device]], device: torch.device) -> Any:
    """A contender's row of the report; the table of where a step goes for ours."""
    with alone_on(device):
        step, batches_on = make()
        batch = batch_of(shape, batches_on)
        timing = timed(step, batch, device)
        ours = name.startswith("megatronish")
        went = where_a_step_goes(partial(step, *batch), device) if ours else []
    return {**timing._asdict(), "where": went, "expected_bytes": expected_bytes(shape) if ours else None}


def main() -> int:
    """Measure the contenders one after the other; the exit status, 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("lines", type=Path, help="file of JSON lines that is appended to")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shape = fitted(MODELS[arguments.model], device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    config = config_of(shape, compiled=False)
    flops = model_flops_per_token(config.model, vocab_size=shape.vocab_size, seq_length=shape.seq_length)
    about = {"model": arguments.model, "shape": vars(shape), "device": name, "flops_per_token": flops}
    about |= {"product_flops": product_flops(device), "data_sheet_tflops": peak_tflops(name, "bf16")}
    weights, failed, first = arguments.lines.with_suffix(f".{arguments.model}.pt"), False, None
    weights.unlink(missing_ok=True)  # those of a run that was killed
    for contender, make in contenders(
        shape, device, weights, backend="inductor" if device.type == "cuda" else "eager"
    ).items():
        row: dict[str, Any] = about | {"contender": contender}
        try:
            row |= measured(shape, contender, make, device)
            first = first or row["first_losses"]
            assert same(row["first_losses"], first), f"first losses {row['first_losses']} and {first}"
        except Exception as error:
            traceback.print_exc()
            failed, row["error"] = True, f"{type(error).__name__}: {error}".splitlines()[0]
        with arguments.lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
    weights.unlink(missing_ok=True)
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
