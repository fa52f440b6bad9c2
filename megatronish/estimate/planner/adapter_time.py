"""Time of adapters in a layer whose own weights are frozen: low-rank products, scales, and 4-bit weights decoded.

A frozen weight has no gradient: the layer's forward and input gradients remain, and products of rank r join them. The
weight gradients of adapters are computed in the backward, in zero-bubble schedules too.
"""

from collections.abc import Sequence
from math import ceil

from megatronish.estimate.costs.adapters import LinearSection
from megatronish.estimate.planner.candidate import MeshSizes
from megatronish.estimate.planner.products import Machine
from megatronish.estimate.planner.workload import Workload
from megatronish.specs.costs import LayerCost

ADDED = 3  # tensors that are read and written to add one to another
JOINED = 2  # the same to put the sections of an output together
DECODED_BYTES = 0.5 + 2  # of a weight: read in 4 bits, and written in 16


class AdapterSeconds:
    """Seconds of the adapters of each kind of layer."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self.work, self.machine = work, machine
        self._sections = dict(zip(work.kinds, zip(work.sections, work.adapted_sections, strict=True), strict=True))

    def of_layer(
        self, row: LayerCost, mesh: MeshSizes, tokens: int, *, shares_sequence: bool
    ) -> tuple[float, float, float, float]:
        """Products and pointwise operations forward, and the same backward, with the adapters' weight gradients."""
        whole, adapted = self._sections[row]
        found = [0.0, 0.0, 0.0, 0.0]
        used = next((linear.used for linear in row.linears if linear.copies > 1), 0)
        for section in adapted:
            times = self._section(section, mesh, tokens, used, shares_sequence=shares_sequence)
            found = [mine + more for mine, more in zip(found, times, strict=True)]
        if self.work.adapter.quantize_base is not None:
            decoded = self._decoded(whole, mesh)
            found[1], found[3] = found[1] + decoded, found[3] + decoded
        return found[0], found[1], found[2], found[3]

    def _section(
        self, section: LinearSection, mesh: MeshSizes, tokens: int, used: int, *, shares_sequence: bool
    ) -> tuple[float, float, float, float]:
        """The same of one section."""
        cut, groups, rows = mesh.tp, 1, tokens
        if section.copies > 1:
            cut, groups = mesh.etp, max(1, section.copies // mesh.ep)
            rows = max(1, ceil(tokens * used * mesh.etp / (mesh.tp * groups)))
        is_row = section.section in ("o", "down")
        inner = max(1, section.in_features // (cut if is_row else 1))
        columns = max(1, section.out_features // (1 if is_row else cut))
        moved = self.work.element_bytes * rows * groups / self.machine.hbm
        if self.work.adapter.adapter_type == "ia3":
            scaled = moved * (inner if section.section == "down" else columns)
            return 0.0, 2 * scaled, 0.0, 4 * scaled
        # Under sequence parallelism A of a column-parallel layer and B of a row-parallel one have their own positions.
        own = max(1, rows // (mesh.tp if shares_sequence and section.copies == 1 else 1))
        rows_of_a, rows_of_b = (rows, own) if is_row else (own, rows)
        a, b = self._thin(rows_of_a, inner, groups), self._thin(rows_of_b, columns, groups)
        moved /= rows
        forward = (ADDED if is_row else ADDED + JOINED) * moved * rows_of_b * columns
        return a + b, forward, 2 * (a + b), ADDED * moved * rows_of_a * inner

    def _thin(self, rows: int, features: int, groups: int) -> float:
        """Seconds of products [rows, features] x [features, r], which take as long as their bytes or their FLOPs."""
        rank, machine = self.work.adapter.lora_rank, self.machine
        nbytes = self.work.element_bytes * groups * (rows * (features + rank) + features * rank)
        return max(2.0 * groups * rows * features * rank / machine.flops, nbytes / machine.hbm)

    def _decoded(self, sections: Sequence[LinearSection], mesh: MeshSizes) -> float:
        """Seconds to decode all weights of a layer once."""
        sizes = sum(
            each.in_features * each.out_features * each.copies / (mesh.tp if each.copies == 1 else mesh.ep * mesh.etp)
            for each in sections
        )
        return DECODED_BYTES * sizes / self.machine.hbm
