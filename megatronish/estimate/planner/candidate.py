"""Candidate layout: what the search varies, and the group sizes that follow."""

from typing import Literal, NamedTuple

Recompute = Literal["none", "selective", "full"]


class MeshSizes(NamedTuple):
    """Sizes of the axes; layouts of one mesh differ in smaller choices."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        """All ranks: tp x cp x dp x pp."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def edp(self) -> int:
        """Ranks that hold copies of an expert."""
        return max(1, self.tp * self.cp * self.dp // (self.ep * self.etp))


class Candidate(NamedTuple):
    """One layout of a run."""

    mesh: MeshSizes
    micro_batch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    recompute: Recompute = "none"
    sequence_parallel: bool = False

    def num_microbatches(self, global_batch: int) -> int:
        """Micro-batches of a step."""
        return max(1, global_batch // (self.micro_batch * self.mesh.dp))

    @property
    def mesh_text(self) -> str:
        """The mesh as reports have it: `tp 8 pp 8 dp 16`."""
        mesh = self.mesh
        parts = [f"tp {mesh.tp}", f"pp {mesh.pp}", f"dp {mesh.dp}"]
        parts += [f"cp {mesh.cp}"] if mesh.cp > 1 else []
        parts += [f"ep {mesh.ep} etp {mesh.etp}"] if mesh.ep > 1 or mesh.etp not in (1, mesh.tp) else []
        return " ".join(parts)

    @property
    def choices_text(self) -> str:
        """The smaller choices: `1f1b, micro-batch 2, ZeRO-1`."""
        schedule = f"{self.schedule} x{self.chunks}" if self.schedule == "interleaved" else self.schedule
        return ", ".join(
            [
                *([schedule] if self.mesh.pp > 1 else []),
                f"micro-batch {self.micro_batch}",
                f"ZeRO-{self.zero}",
                *(["sequence parallel"] if self.sequence_parallel else []),
                *([f"{self.recompute} recomputation"] if self.recompute != "none" else []),
            ]
        )
