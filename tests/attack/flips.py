"""Flipped bits and numbers that are not finite, planted into whole runs, with a table.

A bit flips in one copy of what several ranks hold: a parameter, a master, a state of the optimizer. The run must end
before the next checkpoint, with the parameter, the ranks and the step. NaN and infinity are planted into weights,
outputs, gradients and states, or are the consequence of one sample: the run must name rank, module, micro-batch and
sample.

    PYTHONPATH=.:tests/support python tests/attack/flips.py [--seed 1]
"""

import argparse
import random
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jobs import checkpoints_of, run_job, tiny
from results import Result, publish
from torch import Tensor, nn

from megatronish.engine.engine import Engine
from megatronish.parallel.data_parallel.fully_sharded import held

STEP = 3  # after it, or in it, the fault comes; checkpoints are of steps 2, 4 and 6
RUN = "--save-interval 2 --hidden-dropout 0 --attention-dropout 0"
What = Literal["parameter", "master", "exp_avg", "exp_avg_sq"]
Kind = Literal["weight", "output", "gradient", "state", "sample"]


@dataclass(frozen=True)
class Flip:
    """A bit of one rank's copy, and the ranks and the parameter that must be named."""

    flags: str
    rank: int
    parameter: str
    where: str
    what: What = "parameter"
    every: int = 1  # --check-replicas-interval; it shows at the next comparison
    shows: int = STEP

    @property
    def told(self) -> tuple[str, ...]:
        """Patterns of the sentence."""
        return (
            rf"ranks that should hold the same parameters do not after step {self.shows}: ",
            rf"{re.escape(self.parameter)} differs {self.where}",
            rf"They were the same after step {self.shows - 1 if self.every == 1 else 2}\. Nothing was saved",
        )


FC1, FC2, QKV = (f"layers.{name}.weight" for name in ("0.mlp.fc1", "1.mlp.fc2", "1.attention.qkv"))
NORM, WORDS = "layers.1.attention_norm.weight", "embedding.tokens.weight"
BOTH = "between the ranks 0, 1 of {}"
FLIPS = [
    Flip("--dp 2", 1, FC1, BOTH.format("replicate")),
    Flip("--dp 2", 0, NORM, BOTH.format("replicate")),
    Flip("--dp 4", 2, QKV, "on rank 2 from what most of the ranks 0, 1, 2, 3"),
    Flip("--dp 4", 3, FC2, "on rank 3 from what most of the ranks 0, 1, 2, 3", what="exp_avg", shows=STEP + 1),
    Flip("--dp 2", 1, FC1, BOTH.format("replicate"), what="exp_avg_sq", shows=STEP + 1),
    Flip("--dp 2", 1, FC2, BOTH.format("replicate"), every=1000, shows=STEP + 1),
    Flip("--dp 4 --zero-stage 1", 1, FC1, "on rank 1 from"),
    Flip("--dp 4 --zero-stage 2", 3, QKV, "on rank 3 from"),
    Flip("--dp 4 --dp-replicate 2 --zero-stage 3", 3, FC2, r"between the ranks 1, 3 of replicate"),
    Flip("--dp 4 --dp-replicate 2 --zero-stage 1", 2, FC1, r"between the ranks 0, 2 of replicate", what="master"),
    Flip("--tp 2", 1, NORM, BOTH.format("tp")),
    Flip("--tp 4", 2, NORM, "on rank 2 from what most of the ranks 0, 1, 2, 3 of tp"),
    Flip("--pp 2", 0, WORDS, BOTH.format("embedding")),
    Flip("--tp 2 --dp 2", 3, FC1, r"between the ranks 1, 3 of replicate"),
    Flip("--dp 2 --pp 2", 3, QKV, r"between the ranks 2, 3 of replicate"),
    Flip("--cp 2", 1, FC2, BOTH.format(r"\w+")),
    Flip("--dp 2 --bf16", 1, FC1, BOTH.format("replicate")),
    Flip("--dp 2 --ep 2 --num-experts 4 --moe-router-topk 2", 1, QKV, BOTH.format(r"\w+")),
]


@dataclass(frozen=True)
class Fault:
    """A number that is not finite, and what must be said of it."""

    flags: str
    rank: int
    module: str
    kind: Kind
    value: float = torch.nan

    @property
    def told(self) -> tuple[str, ...]:
        """Patterns of the sentence."""
        at = {"output": STEP, "gradient": STEP, "sample": STEP}.get(self.kind, STEP + 1)
        name, rank = re.escape(self.module), rf"it begins on rank {self.rank} with "
        means = {
            "weight": rf"{rank}the weight {name}\.weight",
            "state": rf"{rank}the weight {name}\.weight",
            "output": rf"{rank}the output of {name} \(\w+\) in the forward of micro-batch \d+, sample \d+",
            "gradient": rf"{rank}the gradient of the output of [\w.]+, where that of {name} was finite, in the "
            r"backward of micro-batch \d+, sample \d+",
            "sample": rf"{rank}the output of {name} \(\w+\) in the forward of micro-batch MICRO, sample SAMPLE$",
        }
        return (rf"in step {at} must be finite", means[self.kind])


MLP, LAST = "layers.0.mlp.fc1", "layers.1.mlp.fc2"
FAULTS = [
    Fault("--dp 2", 1, MLP, "weight"),
    Fault("--dp 2 --zero-stage 1", 1, LAST, "weight"),
    Fault("--tp 2 --pp 2", 3, LAST, "weight"),
    Fault("--tp 2", 1, "layers.1.attention.qkv", "weight", torch.inf),
    Fault("--dp 2", 1, MLP, "output"),
    Fault("--dp 2 --zero-stage 1", 0, LAST, "output", torch.inf),
    Fault("--dp 2 --zero-stage 3", 1, "layers.1.attention", "output"),
    Fault("--pp 2", 1, LAST, "output"),
    Fault("--tp 2 --dp 2", 2, "layers.1.attention.out", "output", -torch.inf),
    Fault("--dp 2 --recompute-granularity full", 1, MLP, "output"),
    Fault("--dp 2", 0, "layers.0.mlp.fc1", "gradient"),
    Fault("--pp 2", 0, "layers.0.attention", "gradient"),
    Fault("--dp 2 --zero-stage 2", 1, "layers.1.attention.qkv", "gradient", torch.inf),
    Fault("--dp 2 --untie-embeddings-and-output-weights", 1, "layers.0.attention_norm", "sample"),
    Fault("--dp 2 --untie-embeddings-and-output-weights --micro-batch-size 2", 0, "layers.0.attention_norm", "sample"),
]


def plant_flip(flip: Flip, seed: int) -> None:
    """Planted in a job: after a step, one bit of a rank's copy is another."""
    step = Engine.step

    def stepped(engine: Engine, *args: Any, num_steps_done: int, **named: Any) -> Any:
        result = step(engine, *args, num_steps_done=num_steps_done, **named)
        if num_steps_done + 1 == STEP and engine.mesh.world.rank == flip.rank:
            flip_bit(tensor_of(engine, flip.parameter, flip.what), random.Random(seed))
        return result

    Engine.step = stepped  # type: ignore[assignment, method-assign]


def tensor_of(engine: Engine, name: str, what: What) -> Tensor:
    """What a rank holds of a parameter, its master, or a state of its optimizer."""
    engine.data_parallel.wait_for_parameters()
    if what == "parameter":
        return held(dict(engine.stage.model.named_parameters())[name].detach())
    return engine.data_parallel.shards[name].master.detach() if what == "master" else engine.optimizer.state[name][what]


def flip_bit(tensor: Tensor, numbers: random.Random) -> None:
    """One bit of the mantissa of an element that is not zero, so that no number becomes infinite."""
    flat = tensor.view(-1)
    at = numbers.choice(flat.nonzero().view(-1).tolist())
    kind, bits = (torch.int32, 23) if tensor.element_size() == 4 else (torch.int16, 7)
    flat[at : at + 1].view(kind).bitwise_xor_(torch.tensor(1 << numbers.randrange(bits // 2, bits), dtype=kind))


class _Spoiled(torch.autograd.Function):
    """Identity forward; backward one element of the gradient is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        spoiled = grads[0].clone()
        spoiled.view(-1)[0] = ctx.value
        return spoiled, None


def plant_fault(fault: Fault, file: str) -> None:
    """Planted in a job: after a step a weight or a state is spoiled, or in it an output or a gradient."""
    step = Engine.step

    def stepped(engine: Engine, micro_batches: Any, *, num_steps_done: int, **named: Any) -> Any:
        is_here, modules = engine.mesh.world.rank == fault.rank, dict(engine.stage.model.named_modules())
        if num_steps_done + 1 == STEP and is_here and fault.kind in ("output", "gradient"):
            modules[fault.module].register_forward_hook(lambda _module, _args, output: spoil(output, fault))
        if num_steps_done + 1 == STEP and is_here and fault.kind == "sample":
            grow_a_word(modules["embedding.tokens"], micro_batches, Path(file))
        result = step(engine, micro_batches, num_steps_done=num_steps_done, **named)
        if num_steps_done + 1 == STEP and is_here and fault.kind in ("weight", "state"):
            what: What = "parameter" if fault.kind == "weight" else "exp_avg"
            tensor_of(engine, f"{fault.module}.weight", what).view(-1)[0] = fault.value
        return result

    Engine.step = stepped  # type: ignore[assignment, method-assign]


def spoil(output: Tensor, fault: Fault) -> Tensor:
    """An output with one element, or with one element of its gradient, that is not finite."""
    if fault.kind == "gradient":
        return _Spoiled.apply(output, fault.value)  # type: ignore[no-untyped-call]
    spoiled = output.clone()
    spoiled[0, 0, 0] = fault.value
    return spoiled


def grow_a_word(words: nn.Module, micro_batches: Any, file: Path) -> None:
    """The vector of a word that one sample alone has is finite, and too long to be squared."""
    found: dict[int, set[tuple[int, int]]] = {}
    for number, each in enumerate(micro_batches):
        for tokens, sample in zip(each.tokens.tolist(), each.sample_ids.tolist(), strict=True):
            for token in tokens:
                found.setdefault(token, set()).add((number, sample))
    word, places = next((word, places) for word, places in found.items() if len(places) == 1)
    ((number, sample),) = places
    file.write_text(f"{number} {sample}")
    held(words.weight.detach())[word] = 1e30  # type: ignore[arg-type, operator, union-attr]


def attack(case: Flip | Fault, folder: Path, seed: int) -> str:
    """Empty if the run said what it should, else what it said."""
    run, file = folder / "run", folder / "sample"
    if isinstance(case, Flip):
        argv = tiny(run, f"{RUN} {case.flags} --check-replicas-interval {case.every}")
        ended = run_job(argv, folder, plant=plant_flip, plant_args=(case, seed))
    else:
        ended = run_job(tiny(run, f"{RUN} {case.flags}"), folder, plant=plant_fault, plant_args=(case, str(file)))
    patterns = list(case.told)
    if file.exists():
        number, sample = file.read_text().split()
        patterns = [each.replace("MICRO", number).replace("SAMPLE", sample) for each in patterns]
    right = ended.status == 1 and "Traceback" not in ended.errors and checkpoints_of(run)[-1] == "step_00000002"
    right = right and all(re.search(pattern, ended.errors, re.MULTILINE) for pattern in patterns)
    return "" if right else f"status {ended.status}, {checkpoints_of(run)}: {ended.errors.strip()[-900:]}"


def main() -> int:
    """Run all of them; 1 if one was not named rightly."""
    parser = argparse.ArgumentParser(description="flipped bits, and numbers that are not finite")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("wanted", nargs="*", help="parameters, modules or kinds")
    args = parser.parse_args()
    cases = [case for case in (*FLIPS, *FAULTS) if not args.wanted or {*args.wanted} & {*map(str, vars(case).values())}]
    failed = {Flip: 0, Fault: 0}
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="flips-") as folder:
            wrong = attack(case, Path(folder), args.seed)
        failed[type(case)] += bool(wrong)
        name = f"{case.what} {case.parameter}" if isinstance(case, Flip) else f"{case.value} {case.kind} {case.module}"
        print(f"{'WRONG' if wrong else 'right':6} rank {case.rank} of {case.flags:50} {name}", flush=True)
        if wrong:
            print(f"    {wrong}\n    expected {case.told}")
    named = "parameter, ranks and step named", "rank, module, micro-batch and sample named"
    tried = {kind: sum(isinstance(case, kind) for case in cases) for kind in failed}
    flips = Result("flipped bits", tried[Flip], failed[Flip], f"{tried[Flip] - failed[Flip]} times {named[0]}")
    faults = Result("NaN and infinity", tried[Fault], failed[Fault], f"{tried[Fault] - failed[Fault]} times {named[1]}")
    return publish(flips, faults)


if __name__ == "__main__":
    sys.exit(main())
