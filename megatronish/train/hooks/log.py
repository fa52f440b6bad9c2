"""The Log hook (console line, metrics.jsonl, TensorBoard points of a step) and the ProgressBar hook."""

import math
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatronish.train.folder import add_line
from megatronish.train.hooks.tensorboard import TensorBoard
from megatronish.train.trainer import Hook, StepRecord, Trainer


@dataclass(frozen=True)
class Speed:
    """The sizes that turn the seconds of a step into rates."""

    seq_length: int
    model_flops_per_token: float
    num_devices: int
    peak_tflops: float | None

    def rates(self, record: StepRecord) -> dict[str, float | None]:
        """tokens_per_second over all devices, model_tflops_per_device and mfu (None where the peak is not known)."""
        tokens_per_second = record.global_batch_size * self.seq_length / record.seconds
        tflops = tokens_per_second * self.model_flops_per_token / self.num_devices / 1e12
        return {
            "tokens_per_second": tokens_per_second,
            "model_tflops_per_device": tflops,
            "mfu": None if self.peak_tflops is None else tflops / self.peak_tflops,
        }


@dataclass
class Troubles:
    """Counts since the last console line, as in Megatron-LM: steps skipped, and steps whose loss is not a number."""

    skipped: int = 0
    nan: int = 0

    def add(self, record: StepRecord) -> None:
        """Count one step more."""
        self.skipped += record.result.skipped
        self.nan += not math.isfinite(record.result.loss)


class Log(Hook):
    """Writes every `interval` steps, on the main rank alone; the extras are computed by all.

    A checkpoint keeps the counts since the last line, so that the first line after a resume counts what a run without
    a stop would have counted.
    """

    name = "log"

    def __init__(
        self,
        *,
        speed: Speed,
        interval: int,
        board_interval: int,
        file: Path | None,
        board: TensorBoard,
        device: torch.device,
        extras: dict[str, Callable[[], float]],
    ) -> None:
        self.speed, self.interval, self.board_interval = speed, interval, board_interval
        self.file, self.board, self.device, self.extras = file, board, device, extras
        self._troubles = Troubles()

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Write the step's line and its points, in turn."""
        self._troubles.add(record)
        is_logged = record.step % self.interval == 0 or record.step == trainer.schedule.num_steps
        is_drawn = record.step % self.board_interval == 0
        if not (is_logged or is_drawn):
            return
        extras = {name: compute() for name, compute in self.extras.items()}
        rates = self.speed.rates(record)
        if is_logged:
            if self.file is not None:
                self._write(self.file, record, rates, extras, skipped_steps=trainer.progress.skipped_steps)
                line = console_line(record, trainer.schedule.num_steps, rates, extras, troubles=self._troubles)
                tqdm.write(line, file=sys.stdout)
            self._troubles = Troubles()
        if is_drawn:
            self._draw(record, rates, extras)

    def state(self) -> dict[str, Any]:
        """The counts since the last line."""
        return asdict(self._troubles)

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        counts = {each.name: state.get(each.name) for each in fields(Troubles)}
        self._troubles = Troubles(**{name: count for name, count in counts.items() if type(count) is int})

    def _write(
        self,
        file: Path,
        record: StepRecord,
        rates: dict[str, float | None],
        extras: dict[str, float],
        *,
        skipped_steps: int,
    ) -> None:
        line = {
            "step": record.step,
            "loss": _number(record.result.loss),
            "grad_norm": _number(record.result.grad_norm),
            "learning_rate": record.learning_rate,
            "loss_scale": record.result.loss_scale,
            "skipped_iterations": skipped_steps,
            "tokens": record.consumed_samples * self.speed.seq_length,
            "consumed_samples": record.consumed_samples,
            "step_seconds": record.seconds,
            **rates,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            **{name: _number(value) for name, value in extras.items()},
        }
        add_line(file, line)

    def _draw(self, record: StepRecord, rates: dict[str, float | None], extras: dict[str, float]) -> None:
        """Megatron-LM's tags, each over steps and over samples."""
        points: dict[str, Any] = {
            "lm loss": record.result.loss,
            "grad-norm": record.result.grad_norm,
            "learning-rate": record.learning_rate,
            "batch-size": record.global_batch_size,
            "loss-scale": record.result.loss_scale,
            "iteration-time": record.seconds,
            "throughput": rates["model_tflops_per_device"],
            **{name.replace("_", "-"): value for name, value in extras.items()},
        }
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            points["mem-reserved-bytes"] = stats["reserved_bytes.all.current"]
            points["mem-allocated-bytes"] = stats["allocated_bytes.all.current"]
            points["mem-max-allocated-bytes"] = stats["allocated_bytes.all.peak"]
            points["mem-allocated-count"] = stats["allocation.all.current"]
        self.board.add(points, step=record.step, samples=record.consumed_samples)


class ProgressBar(Hook):
    """A progress bar at the foot of the terminal."""

    def start(self, trainer: Trainer) -> None:
        """Begin the bar where the run stands."""
        self.bar = tqdm(total=trainer.schedule.num_steps, initial=trainer.progress.step, desc="training", unit="step")

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Advance the bar by one step."""
        self.bar.set_postfix(loss=f"{record.result.loss:.3f}", refresh=False)
        self.bar.update()

    def finish(self, trainer: Trainer) -> None:
        """Leave the bar as it is."""
        self.bar.close()


def console_line(
    record: StepRecord, num_steps: int, rates: dict[str, float | None], extras: dict[str, float], *, troubles: Troubles
) -> str:
    """The line of a step as Megatron-LM's log has it, for which people have parsers; our own values come last."""
    tflops = rates["model_tflops_per_device"] or 0.0
    parts = [
        f"iteration {record.step:8d}/{num_steps:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {1000 * record.seconds:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {tflops:.{1 if tflops >= 1 else 4}f}",
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        f"lm loss: {record.result.loss:.6E}",
        f"loss scale: {record.result.loss_scale:.1f}",
        f"grad norm: {record.result.grad_norm:.3f}",
    ]
    if "num_zeros" in extras:
        parts.append(f"num zeros: {int(extras['num_zeros'])}")
    if "params_norm" in extras:
        parts.append(f"params norm: {extras['params_norm']:.3f}")
    parts.append(f"number of skipped iterations: {troubles.skipped:3d}")
    parts.append(f"number of nan iterations: {troubles.nan:3d}")
    parts.append(f"tokens per second: {rates['tokens_per_second']:.0f}")
    if rates["mfu"] is not None:
        parts.append(f"MFU: {100 * rates['mfu']:.1f}%")
    return f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] {' | '.join(parts)} |"


def _number(value: float) -> float | None:
    """Infinity and not-a-number, which JSON does not have, as null."""
    return value if math.isfinite(value) else None


def peak_memory_bytes(device: torch.device) -> int:
    """The most that the main rank has held: allocated on its GPU, or resident if it runs on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
