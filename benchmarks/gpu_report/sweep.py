"""Sweep of the GPU report: one model, trained by megatronish, by a plain compiled loop, by torch's FSDP2 and others.

Every contender starts from the same weights and sees the same tokens; the losses of the first step must agree. The
plain loop stays, and each of the others is timed in turns with it, so what else the machine does falls on both alike
and two at a time fit into memory. Steps have one micro-batch and eight.

A line of JSON is written before a contender is built and when it is done, so what is killed loses only itself: the
next call goes through what is left, and takes what was killed before last.

    python benchmarks/gpu_report/sweep.py 1.3b lines.jsonl
"""

import argparse
import gc
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from clock import Clock
from libraries import LIBRARIES
from lines import Key, key_of, rows_in, write
from needs import is_here
from plain import LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Batch, PlainDecoder, Shape, Step, autocast_step, fsdp_step
from profiled import where_a_step_goes
from torch import Tensor

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.engine import build
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.planner.devices import peak_tflops
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
    "tiny-wide": Shape(1, 128, 4, 64, 2, 512, 256, kv_heads=2),
}
PLAIN, OURS, COMPILED, SHARDED = "plain, compiled", "megatronish", "megatronish --compile", "FSDP2, compiled"
COUNTS = (1, 8)
"""Micro-batches of a step."""
WARM_UP_STEPS, MOST_ROUNDS = {1: 4, 8: 2}, 20
MOST_SECONDS = {"cuda": 12.0, "cpu": 1.0}  # of rounds, a trial's on a CPU
NUM_ALIVE = 2  # contenders whose states are in the device's memory at a time
ROOM = 0.8  # of a device's memory
STOPPED = 75
"""Exit status of a sweep that had no time left for all; another call does what is left."""
SAME_LOSSES = (2e-3, 5e-4)
"""How far the two first losses of contenders may be apart, of the loss.

The same weights give 1e-4 and 2e-5 in bf16; other random ones differed in one of them in twelve cases of twelve.
"""


class Contender(NamedTuple):
    """A contender that is built and warmed up, its micro-batches, and what was seen meanwhile."""

    step: Step
    batches: Sequence[Batch]
    first_losses: tuple[float, float]
    """Of the first step, on one token alone, and of the second, on a batch."""
    peak_bytes: Mapping[int, int | None]
    """The largest memory of a step on a GPU, by its micro-batches, without that of others."""


Make = Callable[[], tuple[Step, torch.device]]
"""How a contender is made, and where its batches lie: ours begin on the CPU, as a loader's do."""


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
    """As many layers as are expected to fit, with those of another contender."""
    if device.type != "cuda":
        return shape
    room = ROOM * torch.cuda.get_device_properties(device).total_memory / NUM_ALIVE
    numbers = range(shape.num_layers, 1, -1)
    return replace(
        shape, num_layers=next((n for n in numbers if expected_bytes(replace(shape, num_layers=n)) <= room), 1)
    )


def batches_of(shape: Shape, device: torch.device) -> list[Batch]:
    """Tokens and labels [B, S] of the micro-batches, the same at every step."""
    generator = torch.Generator().manual_seed(0)
    sizes = (max(COUNTS), shape.micro_batch_size, shape.seq_length + 1)
    samples = torch.randint(shape.vocab_size, sizes, generator=generator)
    return [(part[:, :-1].contiguous().to(device), part[:, 1:].contiguous().to(device)) for part in samples]


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


def one_token(batch: Batch) -> Batch:
    """Tokens and labels of a batch's shape that are one token each: a loss of hardly more than one logit.

    That of random tokens is the mean of thousands of logits, the logarithm of the vocabulary whatever the weights are.
    """
    return torch.full_like(batch[0], 1), torch.full_like(batch[1], 2)


def our_step(shape: Shape, device: torch.device, *, compiled: bool) -> tuple[Step, list[Tensor]]:
    """A step of megatronish's engine, and its parameters."""
    mesh = Mesh.start(device=device)
    with patch.object(zero, "fill_zeros", DrawnOnDevice(device)):
        engine = build.build_engine(config_of(shape, compiled=compiled), mesh, vocab_size=shape.vocab_size)

    def step(batches: Sequence[Batch]) -> float:
        given = [micro_batch(*batch) for batch in batches]
        return engine.step(given, num_steps_done=0, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY).loss

    return step, list(engine.stage.model.parameters())


def micro_batch(tokens: Tensor, labels: Tensor) -> MicroBatch:
    """A micro-batch of megatronish without padding or documents."""
    batch, seq_length = tokens.shape
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        position_ids=torch.arange(seq_length).expand(batch, seq_length),
        sample_ids=torch.arange(batch),
    )


def with_weights(
    make: Callable[[Shape], PlainDecoder], shape: Shape, device: torch.device, weights: Path
) -> PlainDecoder:
    """A decoder on the device, with megatronish's initial weights."""
    with device:
        model = make(shape)
    model.take(torch.load(weights, map_location=device))
    return model.to(device)


def ready(make: Make, shape: Shape, device: torch.device) -> Contender:
    """A contender after its first steps: it has compiled what it does, and its memory was measured alone."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    step, batches_on = make()
    batches, peaks = batches_of(shape, batches_on), {}
    first = step([one_token(batches[0])]), step(batches[:1])
    for count in COUNTS:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(WARM_UP_STEPS[count]):
            step(batches[:count])
        peaks[count] = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    return Contender(step, batches, first, peaks)


def in_turns(
    contenders: Mapping[str, Contender], count: int, *, clock: Clock, end: float, seconds_of_rounds: float
) -> dict[str, list[float]]:
    """Seconds of steps in rounds of one step of each, in alternating order, until they are enough or took too long.

    Each step ends with its loss on the host. There is one round at least.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    end = min(end, clock.now() + seconds_of_rounds)
    for number in range(MOST_ROUNDS):
        for name in names if number % 2 == 0 else reversed(names):
            contender, begin = contenders[name], clock.now()
            contender.step(contender.batches[:count])
            seconds[name].append(clock.now() - begin)
        if clock.now() >= end:
            break
    return seconds


def same(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the first losses of two contenders are those of the same weights."""
    return all(abs(a - b) <= most * b for a, b, most in zip(losses, others, SAME_LOSSES, strict=True))


def product_flops(device: torch.device, clock: Clock) -> float:
    """FLOP/s of a large bf16 matrix product here, the median of 20."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = []
    for _ in range(25):
        begin = clock.now()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock.now() - begin)
    return 2 * size**3 / statistics.median(seconds[5:])


def free_memory(device: torch.device) -> None:
    """Give back the memory of a contender that has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def draw_weights(shape: Shape, device: torch.device, weights: Path) -> None:
    """The initial weights of all contenders, drawn by megatronish, unless they are there."""
    if not weights.exists():
        parameters = our_step(shape, device, compiled=False)[1]
        torch.save([each.detach().cpu() for each in parameters], weights)


def contenders_of(shape: Shape, device: torch.device, weights: Path) -> dict[str, Make]:
    """All contenders that can run here, the plain loop first."""
    cpu, is_gpu = torch.device("cpu"), device.type == "cuda"
    backend = "inductor" if is_gpu else "eager"

    def ours(*, compiled: bool) -> tuple[Step, torch.device]:
        return our_step(shape, device, compiled=compiled)[0], cpu

    def decoder(make: Callable[[Shape], PlainDecoder], train: Callable[..., Step], backend: str | None) -> Any:
        return train(with_weights(make, shape, device, weights), backend=backend), device

    made: dict[str, Make] = {PLAIN: partial(decoder, PlainDecoder, autocast_step, backend)}
    if is_gpu:  # a trial on a CPU would wait for a compiler
        made[COMPILED] = partial(ours, compiled=True)
    made |= {OURS: partial(ours, compiled=False), SHARDED: partial(decoder, PlainDecoder, fsdp_step, backend)}
    for name, each in LIBRARIES.items():
        if is_gpu and is_here(each.module) and (shape.kv_heads is not None or not each.is_llama_alone):
            made[name] = partial(decoder, each.make, each.train, backend if each.is_compiled else None)
    return made


class Sweep:
    """The contenders of a model, each in turns with the plain loop, and the file that their rows are written to."""

    def __init__(self, about: Mapping[str, Any], makes: Mapping[str, Make], lines: Path, *, clock: Clock) -> None:
        self.about, self.makes, self.lines, self.clock = about, makes, lines, clock
        self.shape = Shape(**about["shape"])
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def left(self) -> list[str]:
        """The contenders that lack a row, those that were killed or failed before last."""
        rows = rows_in(self.lines)
        lacking = [
            name
            for name in self.makes
            if any("seconds" not in rows.get(self._key(name, count), {}) for count in COUNTS)
        ]
        return sorted(lacking, key=lambda name: self._key(name, COUNTS[0]) in rows)

    def run(self, *, end: float) -> int:
        """Measure what is left; the exit status: 1 if one failed, STOPPED if the time did not suffice."""
        left, status = self.left(), 0
        if not left:
            return 0
        alive: dict[str, Contender] = {}  # the plain loop, unless it failed
        for name in (PLAIN, *(name for name in left if name != PLAIN)):
            if name != PLAIN and self.clock.now() >= end:
                return STOPPED
            if name in left:
                self._fail(name, "it was killed before it was done")
            try:
                contender = self._take(name, alive, end, measure=name in left)
                if name == PLAIN:
                    alive[PLAIN] = contender
                del contender  # and its memory
            except Exception as error:
                traceback.print_exc()
                status = 1
                self._fail(name, f"{type(error).__name__}: {error}".splitlines()[0])
            free_memory(self.device)
        return status

    def _take(self, name: str, alive: Mapping[str, Contender], end: float, *, measure: bool) -> Contender:
        """Build a contender, and measure it in turns with what is alive."""
        contender = ready(self.makes[name], self.shape, self.device)
        if measure:
            self._measure(name, {**alive, name: contender}, end)
        return contender

    def _fail(self, name: str, why: str) -> None:
        for count in COUNTS:
            self._write(name, count, {"error": why})

    def _measure(self, name: str, contenders: Mapping[str, Contender], end: float) -> None:
        """Write a contender's rows, and then, for one of ours, where a step goes."""
        first, (other, *_) = contenders[name].first_losses, contenders.values()
        assert same(first, other.first_losses), f"first losses {first}, of the plain loop {other.first_losses}"
        ours = name.startswith(OURS)
        for count in COUNTS:
            most = MOST_SECONDS[self.device.type]
            seconds = in_turns(contenders, count, clock=self.clock, end=end, seconds_of_rounds=most)
            row: dict[str, Any] = {
                "seconds": seconds[name],
                "plain_seconds": seconds.get(PLAIN, []),
                "first_losses": first,
            }
            row |= {"peak_bytes": contenders[name].peak_bytes[count]}
            row |= {"expected_bytes": expected_bytes(self.shape) if ours else None, "where": []}
            self._write(name, count, row)
            if ours and count == COUNTS[0] and self.clock.now() < end:
                try:
                    step = partial(contenders[name].step, contenders[name].batches[:count])
                    self._write(name, count, row | {"where": where_a_step_goes(step, self.device)})
                except Exception:  # the timing stays
                    traceback.print_exc()

    def _key(self, name: str, count: int) -> Key:
        return key_of({"model": self.about["model"], "contender": name, "micro_batches": count})

    def _write(self, name: str, count: int, row: Mapping[str, Any]) -> None:
        write(self.lines, {**self.about, "contender": name, "micro_batches": count, **row})


def main() -> int:
    """Measure the contenders of a model; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("lines", type=Path, help="file of JSON lines that is appended to")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which nothing is begun")
    parser.add_argument("--times-slower", type=float, default=1.0, help="as on a machine so many times slower")
    arguments = parser.parse_args()
    clock = Clock(arguments.times_slower)
    end = clock.now() + arguments.limit
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shape = fitted(MODELS[arguments.model], device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    config = config_of(shape, compiled=False)
    flops = model_flops_per_token(config.model, vocab_size=shape.vocab_size, seq_length=shape.seq_length)
    about = {"model": arguments.model, "shape": vars(shape), "device": name, "flops_per_token": flops}
    about |= {"product_flops": product_flops(device, clock), "data_sheet_tflops": peak_tflops(name, "bf16")}
    weights = arguments.lines.with_suffix(f".{arguments.model}.pt")
    draw_weights(shape, device, weights)
    free_memory(device)
    status = Sweep(about, contenders_of(shape, device, weights), arguments.lines, clock=clock).run(end=end)
    weights.unlink(missing_ok=True)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
