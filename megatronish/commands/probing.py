"""The probe of `megatronish plan --probe`: matrix products at a model's own shapes, and the host's time a layer."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatronish.commands.configuration import read_config
from megatronish.core.errors import UserError
from megatronish.core.files import unwritten
from megatronish.estimate.costs.candidate import Candidate
from megatronish.estimate.planner.device_speed import Efficiencies, Machine, product_seconds
from megatronish.estimate.planner.devices import Device
from megatronish.estimate.planner.workload import Workload
from megatronish.launch.place import Place
from megatronish.train.run import start_mesh
from megatronish.train.setup import TrainingJob

FEW, MANY = 2, 6  # layers of the two models whose difference is the time of a layer
TINY = (
    "--mock-data --vocab-size 128 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--hidden-dropout 0 --attention-dropout 0 --train-iters 10 --lr 1e-3 --run-dir never-written"
)
SECONDS = 0.3  # for each product
MOST_TOKENS = {"cpu": 512, "cuda": 1 << 20}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def probe(work: Workload, device: Device, candidate: Candidate, out: Path) -> str:
    """Measure this machine, append a JSON line to `out`, and say what was found."""
    _refuse_unwritable(out)  # before minutes of measuring
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if where.type == "cuda" else platform.processor() or platform.machine()
    record: dict[str, Any] = {
        "device": name,
        "type": where.type,
        "precision": work.precision,
        "tflops": achievable_tflops(work, device, candidate, where),
        "host_seconds_a_layer": host_seconds_a_layer(where.type),
    }
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"probe": record}) + "\n")
    return (
        f"{name}: {record['tflops']:.4g} TFLOP/s achievable in {work.precision} at the shapes of this model, "
        f"{1e6 * record['host_seconds_a_layer']:.0f} us of the host a layer and pass; added to {out}"
    )


def _is_measured(line: str) -> bool:
    """Whether a line is of a file of measurements: of a probe, or of links."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and bool({"probe", "collective"} & record.keys())


def _refuse_unwritable(out: Path) -> None:
    try:
        with out.open("a+", encoding="utf-8", errors="replace") as file:
            file.seek(0)
            line = file.readline(65_536).strip()
    except OSError as error:
        raise unwritten(f"--probe {out}", out, error) from error
    if line and not _is_measured(line):
        raise UserError(f"--probe {out} has other text than measurements, one JSON object a line; choose another file")


def achievable_tflops(work: Workload, device: Device, candidate: Candidate, where: torch.device) -> float:
    """TFLOP/s at which the model of products would predict the measured time of a layer's products."""
    machine = Machine.of(device, Efficiencies(), work.precision)
    tokens = min(candidate.micro_batch * work.seq_length // candidate.mesh.cp, MOST_TOKENS[where.type])
    measured = expected = 0.0
    for linear in dict.fromkeys(linear for kind in work.kinds for linear in kind.cost.linears if linear.copies == 1):
        inner = linear.in_features // (candidate.mesh.tp if linear.cut == "row" else 1)
        columns = linear.out_features // (candidate.mesh.tp if linear.cut == "column" else 1)
        measured += _seconds_of_product(tokens, inner, columns, DTYPES[work.precision], where)
        expected += product_seconds(machine, tokens, inner, columns)
    return device.flops(work.precision) / 1e12 * expected / measured


def _seconds_of_product(rows: int, inner: int, columns: int, dtype: torch.dtype, where: torch.device) -> float:
    a = torch.randn(rows, inner, device=where).to(dtype)
    b = torch.randn(columns, inner, device=where).to(dtype)
    return _median_seconds(lambda: torch.nn.functional.linear(a, b), where)


def host_seconds_a_layer(device_type: str) -> float:
    """Seconds that the host needs for a pass of one layer: two tiny models of different depth, by the real engine."""
    where = torch.device(device_type)
    seconds = []
    for layers in (FEW, MANY):
        flags = [*TINY.split(), "--num-layers", str(layers), "--device", device_type, "--global-batch-size", "1"]
        config, _ = read_config(flags)
        job = TrainingJob.open(config, start_mesh(config, Place()))
        batches = job.batches_of(job.datasets.train)(0, 1)
        engine = job.build_engine()

        def step(engine: Any = engine, batches: Any = batches) -> object:
            return engine.step(batches, num_steps_done=1, learning_rate=1e-3, weight_decay=0.1)

        seconds.append(_median_seconds(step, where))
    return max(1e-6, (seconds[1] - seconds[0]) / (MANY - FEW) / 2)  # a forward and a backward


def _median_seconds(work: Callable[[], object], where: torch.device) -> float:
    """Median time of a call, after two that warm up."""
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - started < SECONDS:
        if where.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if where.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
