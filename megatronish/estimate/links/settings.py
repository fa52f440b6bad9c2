"""Settings of a measurement of links: layout, sizes, runs and files, checked before a rank is started."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatronish.core.errors import UserError
from megatronish.core.layout import ExpertLayout, Layout
from megatronish.estimate.links.definitions import COLLECTIVES

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
LARGEST_ON_CPU, LARGEST_ON_GPU = "16M", "1G"


@dataclass(frozen=True)
class LinkArguments:
    """Measure collectives over the axes of a layout, or compare the ranks before a run."""

    tp: Annotated[int, tyro.conf.arg(aliases=["--tensor-model-parallel-size"])] = 1
    """Ranks of tensor parallelism."""
    pp: Annotated[int, tyro.conf.arg(aliases=["--pipeline-model-parallel-size"])] = 1
    """Stages of the pipeline."""
    cp: Annotated[int, tyro.conf.arg(aliases=["--context-parallel-size"])] = 1
    """Ranks of context parallelism."""
    dp: Annotated[int | None, tyro.conf.arg(aliases=["--data-parallel-size"])] = None
    """Ranks of data parallelism. By default all ranks / (tp pp cp), or 1 on a plain start."""
    ep: Annotated[int, tyro.conf.arg(aliases=["--expert-model-parallel-size"])] = 1
    """Ranks that share experts out, of those of dp, cp and tp."""
    etp: Annotated[int | None, tyro.conf.arg(aliases=["--expert-tensor-parallel-size"])] = None
    """Ranks that share every expert. By default tp."""
    axes: tuple[str, ...] = ()
    """Axes to measure: tp, cp, pp, dp, dp_cp (gradients), ep, etp, edp. By default each of more than one rank."""
    collectives: tuple[str, ...] = ()
    """Collectives to measure. By default all."""
    min_bytes: str = "1K"
    """Smallest size; K, M and G are powers of 1024."""
    max_bytes: str | None = None
    """Largest size. By default 16M on CPU, 1G on a GPU."""
    factor: int = 4
    """Each size is so many times the one before."""
    runs: int = 20
    """Measured runs of each size."""
    warmups: int = 5
    """Runs of each size before these."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Elements. By default fp32 on CPU, bf16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where every rank has a GPU."""
    distributed_backend: str = "auto"
    """auto: nccl on CUDA, gloo on CPU; or any that torch.distributed knows."""
    json: Path | None = None
    """Write a JSON object a line: each row of results and each fit."""
    png: Path | None = None
    """Draw times and bandwidths into this file."""
    preflight: bool = False
    """Compare versions, variables, clocks, disks, memory, links and speed of all ranks instead; status 1 tells of a
    problem."""
    save: Path = Path(".")
    """Folder of the checkpoints, whose free space --preflight compares."""

    def layout(self, num_ranks: int | None) -> Layout:
        """The layout on so many ranks; None on a plain start. UserError where it does not fit."""
        for name in ("tp", "pp", "cp", "dp", "ep", "etp", "runs"):
            if (getattr(self, name) or 1) < 1 or getattr(self, name) == 0:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.warmups < 0:
            raise UserError(f"warmups={self.warmups} must not be negative")
        model = self.tp * self.pp * self.cp
        if self.dp is None and num_ranks is not None and num_ranks % model:
            raise UserError(
                f"{num_ranks} ranks were started, which tp x pp x cp = {model} does not divide; change the layout or "
                "the number of ranks"
            )
        layout = Layout(pp=self.pp, cp=self.cp, tp=self.tp, dp=self.dp or (num_ranks or model) // model)
        if layout.world_size == 1:
            raise UserError("one rank has no links; give a layout of more, for example --dp 2")
        try:
            layout.expert_groups(self.experts)
        except ValueError as error:
            raise UserError(str(error)) from error
        return layout

    @property
    def experts(self) -> ExpertLayout:
        """Grid of the experts."""
        return ExpertLayout(self.ep, self.etp or self.tp) if self.ep > 1 else ExpertLayout()

    def sizes(self, *, is_cpu: bool) -> list[int]:
        """Bytes from the smallest to the largest size. UserError for no range."""
        largest = self.max_bytes or (LARGEST_ON_CPU if is_cpu else LARGEST_ON_GPU)
        first, last = _bytes_of("min_bytes", self.min_bytes), _bytes_of("max_bytes", largest)
        if first > last:
            raise UserError(f"min_bytes={self.min_bytes} must not be above max_bytes={largest}")
        if self.factor < 2:
            raise UserError(f"factor={self.factor} must be at least 2: sizes grow by it")
        sizes = [first]
        while sizes[-1] * self.factor <= last:
            sizes.append(sizes[-1] * self.factor)
        return sizes

    def refuse(self, layout: Layout) -> None:
        """UserError for collectives that are none, axes that are none of those of the layout, sizes and files."""
        self.sizes(is_cpu=True)
        axes = groups_of(layout, self.experts)
        for name in self.collectives:
            if name not in COLLECTIVES:
                raise UserError(f"collectives={name} is not known; use some of {', '.join(COLLECTIVES)}")
        for name in self.axes:
            if name not in axes:
                raise UserError(f"axes={name} has no two ranks in this layout; it has {', '.join(axes)}")
        if self.png is not None and self.png.suffix != ".png":
            raise UserError(f"png={self.png} must end in .png")


# dp_cp are the ranks of dp and cp together, which sum gradients; edp those that hold copies of the same experts.
DENSE_AXES, EXPERT_AXES = ("tp", "cp", "pp", "dp", "dp_cp"), ("ep", "etp", "edp")


def _bytes_of(name: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip().upper().replace("IB", "B"))
    if match is None or not int(match[1]):
        raise UserError(f"{name}={text} must be a number of bytes above 0, as 1024, 64K, 16M or 1G")
    return int(match[1]) * UNITS[match[2]]


def groups_of(layout: Layout, experts: ExpertLayout) -> dict[str, list[list[int]]]:
    """Groups of each axis of more than one rank. Axes of the same groups count once, under their first name."""
    groups = {name: layout.groups(*name.split("_")) for name in DENSE_AXES}
    if experts.ep > 1:
        groups |= {name: layout.expert_groups(experts)[name] for name in EXPERT_AXES}
    distinct: dict[str, list[list[int]]] = {}
    for name, ranks in groups.items():
        if len(ranks[0]) > 1 and ranks not in distinct.values():
            distinct[name] = ranks
    return distinct
