"""Time of one layer on one device: products, attention, pointwise operations, transfers and the host's launches.

The shapes are those of the layer's cost row (specs/costs.py), so every kind of layer that has a row has a time: grouped
queries, gated MLPs, windows and experts. T is the number of tokens of a micro-batch on a rank, B s / cp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from megatronish.core.layout import ranks_of_a_token
from megatronish.estimate.costs.candidate import Candidate, MeshSizes
from megatronish.estimate.costs.layer_kinds import LayerKind
from megatronish.estimate.planner.device_speed import Efficiencies, Links, Machine, gradient_seconds, product_seconds
from megatronish.estimate.planner.workload import Workload
from megatronish.specs.attention import RingBytes, traded_heads
from megatronish.specs.costs import AttentionCore, LayerCost, LinearShape
from megatronish.specs.ends import ends_of

BACKWARD_POINTWISE = 1.6  # bytes of the backward over those of the forward
SCORE_BYTES = {"fused_softmax": (8, 10), "blocks": (8, 10), "unfused": (40, 44)}
"""Bytes of a score, forward and backward, where scores are in memory: unfused, each operation reads and writes fp32."""
DROPPED = (5, 7)  # what dropout adds to these
LAUNCHES = {"dense": 25, "experts": 60, "rooms": 16, "adapters": 50, "softmax": 4}
"""Launches of a layer's pass: of dense layers and experts as the dry run counts them (docs/BENCHMARKS.md: half of 50,
times 94/39; half of the 33 more of rows in rooms), of adapters by the time that a layer with LoRA takes on a CPU. An
unfused softmax has four more than one kernel: to fp32, times the scale, masked, softmax, and back."""
HOST = {"eager": 1.0, "compiled": 0.5, "graph": 0.02}
"""Time of the host over that of an eager pass: of a compiled layer as on a CPU; next to none of a replayed graph."""
LOSS_BYTES = {True: (2, 4), False: (10, 8)}
"""Bytes a logit, forward and backward: one kernel reads it, another one reads it and writes its gradient; without them
there is a copy in fp32 that is read and written."""
ADDED = 3  # tensors that are read and written to add one to another
JOINED = 2  # the same to put the sections of an output together
DECODED_BYTES = {"nf4": 0.5 + 2, "int8": 1 + 2}  # of a weight: read in few bits, and written in 16


class Parts(NamedTuple):
    """Seconds by what they are for."""

    products: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    host: float = 0.0

    def plus(self, other: "Parts", times: float = 1.0) -> "Parts":
        """Sum of both, the other one several times."""
        return Parts(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def total(self) -> float:
        """Seconds of all of them together."""
        return sum(self)


class Passes(NamedTuple):
    """Forward, backward as far as the input gradient, and weight gradients of a micro-batch.

    `hideable` is what of the transfers overlapping computation can hide: the backward's behind the weight gradients,
    where these follow at once, and a ring's behind attention. `experts` are the products and transfers of experts.
    """

    forward: Parts
    backward: Parts
    weight: Parts
    hideable: float = 0.0
    experts: float = 0.0

    def plus(self, other: "Passes", times: float = 1.0) -> "Passes":
        """Sum of both, the other one several times."""
        return Passes(
            self.forward.plus(other.forward, times),
            self.backward.plus(other.backward, times),
            self.weight.plus(other.weight, times),
            self.hideable + times * other.hideable,
            self.experts + times * other.experts,
        )

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return self.forward.total + self.backward.total + self.weight.total


NOTHING = Passes(Parts(), Parts(), Parts())


class Brief(NamedTuple):
    """Sums of `Passes`, which a search adds up faster.

    `experts` are seconds of experts' products and transfers, which an uneven load makes longer.
    """

    forward: float
    backward: float
    weight: float
    hideable: float
    experts: float

    @classmethod
    def of(cls, passes: "Passes") -> "Brief":
        """The sums of a layer's passes."""
        return cls(passes.forward.total, passes.backward.total, passes.weight.total, passes.hideable, passes.experts)


def on_rank(linear: LinearShape, columns: int, mesh: MeshSizes, tokens: int) -> tuple[int, int, int, int]:
    """Rows, inner size and columns of the products of a linear layer on a rank, or of a section, and their number.

    Rows of experts are those of all tokens that meet on a rank, shared out evenly over its experts.
    """
    cut, groups, rows = mesh.tp, 1, tokens
    if linear.copies > 1:
        cut, groups = mesh.etp, max(1, linear.copies // mesh.ep)
        rows = max(1, ceil(tokens * linear.used * mesh.etp / (mesh.tp * groups)))
    inner = max(1, linear.in_features // cut) if linear.cut == "row" else linear.in_features
    return rows, inner, max(1, columns // cut) if linear.cut == "column" else columns, groups


class AdapterSeconds:
    """Seconds of the adapters of each kind of layer, whose own weights are frozen: low-rank products, scales, decoding.

    A frozen weight has no gradient: the layer's forward and input gradients remain, and products of rank r join them.
    The weight gradients of adapters are computed in the backward, in zero-bubble schedules too.
    """

    def __init__(self, work: Workload, machine: Machine) -> None:
        self.work, self.machine = work, machine

    def of_layer(
        self, kind: LayerKind, mesh: MeshSizes, tokens: int, *, shares_sequence: bool
    ) -> tuple[float, float, float, float]:
        """Products and pointwise operations forward, and the same backward, with the adapters' weight gradients."""
        seconds = [0.0, 0.0, 0.0, 0.0]
        for linear in kind.cost.linears:
            for section, columns in linear.sections:
                if f"{linear.name}.{section}" in kind.adapted:
                    times = self._section(linear, columns, mesh, tokens, shares_sequence=shares_sequence)
                    seconds = [mine + more for mine, more in zip(seconds, times, strict=True)]
        if self.work.adapter.quantize_base is not None:
            decoded = DECODED_BYTES[self.work.adapter.quantize_base] * self._decoded(kind.cost.linears, mesh)
            seconds[1], seconds[3] = seconds[1] + decoded, seconds[3] + decoded
        return seconds[0], seconds[1], seconds[2], seconds[3]

    def _section(
        self, linear: LinearShape, columns: int, mesh: MeshSizes, tokens: int, *, shares_sequence: bool
    ) -> tuple[float, float, float, float]:
        """The same of one section, of so many columns."""
        is_row, (rows, inner, columns, groups) = linear.cut == "row", on_rank(linear, columns, mesh, tokens)
        moved = self.work.element_bytes * rows * groups / self.machine.hbm
        if self.work.adapter.adapter_type == "ia3":
            scaled = moved * (inner if linear.sections[0][0] == "down" else columns)
            return 0.0, 2 * scaled, 0.0, 4 * scaled
        # Under sequence parallelism A of a column-parallel layer and B of a row-parallel one have their own positions.
        own = max(1, rows // (mesh.tp if shares_sequence and linear.copies == 1 else 1))
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

    def _decoded(self, linears: Sequence[LinearShape], mesh: MeshSizes) -> float:
        """Seconds to move all weights of a layer once, at a byte each."""
        sizes = sum(
            linear.in_features * columns * linear.copies / (mesh.tp if linear.copies == 1 else mesh.ep * mesh.etp)
            for linear in linears
            for _, columns in linear.sections
        )
        return sizes / self.machine.hbm


@dataclass(frozen=True)
class LayerClock:
    """Times of layers of a workload on a device; all ranks alike."""

    work: Workload
    machine: Machine
    links: Links
    efficiencies: Efficiencies
    host_seconds: float

    @cached_property
    def adapters(self) -> AdapterSeconds:
        """Times of adapters in layers of this workload."""
        return AdapterSeconds(self.work, self.machine)

    def passes(self, kind: LayerKind, candidate: Candidate) -> Passes:
        """Times of one layer for a micro-batch."""
        row, mesh, at = kind.cost, candidate.mesh, self.work.sizes(candidate)
        tokens, sends_latents = at.tokens, at.config.sends_latents
        products, of_experts = [0.0, 0.0, 0.0], 0.0
        for linear in row.linears:
            seconds = self._linear(linear, candidate)
            if sends_latents and linear.name == "attention.kv_up":  # of every block, in the backward twice
                opened, of_latents, of_weight = seconds
                seconds = mesh.cp * opened, mesh.cp * (opened + of_latents), mesh.cp * of_weight
            of_experts += sum(seconds[: 2 if self.work.adapter.is_used else 3]) if linear.copies > 1 else 0.0
            products = [mine + more for mine, more in zip(products, seconds, strict=True)]
        cores = [self._core(core, mesh, candidate.micro_batch) for core in row.cores]
        latent = self.work.model.kv_lora_rank + self.work.model.qk_pos_emb_head_dim if sends_latents else None
        ring = [self._context(core, mesh, tokens, cores[n], latent) for n, core in enumerate(row.cores)]
        attended = [sum(core[0] for core in cores), sum(core[1] for core in cores)]
        pointwise = self._pointwise(row, candidate, tokens)
        exchanged = self._expert_transfers(row, candidate)
        has_experts = any(linear.copies > 1 for linear in row.linears)
        tensor = self._tensor(row, candidate, is_backward=False)
        shared = sum(self._shared_heads(core, mesh, tokens) for core in row.cores)
        forward = Parts(products[0], attended[0], pointwise, tensor + shared, sum(part[0] for part in ring), exchanged)
        backward = Parts(
            products[1],
            attended[1],
            BACKWARD_POINTWISE * pointwise,
            self._tensor(row, candidate, is_backward=True) + shared,
            sum(part[1] for part in ring),
            exchanged,
        )
        for measured in row.cores if at.config.measures_logits else ():
            forward = forward.plus(self._largest_logits(measured, candidate))
        weight = Parts(products[2])
        launches = LAUNCHES["experts" if has_experts else "dense"]
        if has_experts and mesh.ep > 1 and at.config.parallel.has_rooms:
            launches += LAUNCHES["rooms"]
        if self.work.adapter.is_used:
            more = self.adapters.of_layer(kind, mesh, tokens, shares_sequence=candidate.sequence_parallel)
            forward = forward.plus(Parts(products=more[0], pointwise=more[1]))
            backward = backward.plus(Parts(products=more[2], pointwise=more[3]))
            weight, launches = Parts(), launches + LAUNCHES["adapters"] - LAUNCHES["dense"]
        if self.work.attention == "unfused":
            launches += LAUNCHES["softmax"] * len(row.cores)
        host = self.host_seconds * HOST[self.work.launches] * (launches + self._collectives(row, mesh))
        forward = forward._replace(host=self._waits(host / LAUNCHES["dense"], forward.total))
        backward = backward._replace(host=self._waits(host / LAUNCHES["dense"], backward.total + weight.total))
        if candidate.recompute == "full":
            backward = backward.plus(forward)
        elif candidate.recompute == "selective":
            core = Parts(attention=attended[0], context=sum(part[0] for part in ring))
            backward = backward.plus(self._again(kind, candidate, forward, core))
        hideable = min(tensor, weight.total) + sum(part[2] for part in ring)
        return Passes(forward, backward, weight, hideable, of_experts + 2 * exchanged if has_experts else 0.0)

    @staticmethod
    def _collectives(row: LayerCost, mesh: MeshSizes) -> int:
        """Collectives over tp of a layer's pass."""
        return sum(linear.cut == "row" and linear.copies == 1 for linear in row.linears) if mesh.tp > 1 else 0

    def _waits(self, host: float, device: float) -> float:
        """Seconds that a pass takes longer than the device needs, as the host has to launch it."""
        if device == 0.0:
            return host
        return device * ((1 + (host / device) ** self.efficiencies.queue) ** (1 / self.efficiencies.queue) - 1)

    def _again(self, kind: LayerKind, candidate: Candidate, forward: Parts, core: Parts) -> Parts:
        """What selective recomputation adds to a backward: the parts of a layer that --recompute-modules names."""
        parts, linears = self.work.config.recompute.named_modules, kind.cost.linears
        again = [linear for linear in linears if kind.spec.computes_again(linear.name, parts)]
        seconds = sum(self._linear(linear, candidate)[0] for linear in again)
        rows = sum(linear.cut == "row" and linear.copies == 1 for linear in linears)
        sums = sum(linear.cut == "row" and linear.copies == 1 for linear in again)
        sends = any(linear.copies > 1 for linear in again)
        return (core if "core_attn" in parts else Parts()).plus(
            Parts(
                products=seconds,
                pointwise=forward.pointwise * (seconds / forward.products if seconds else 0.0),
                tensor=forward.tensor * sums / max(1, rows),
                experts=forward.experts if sends else 0.0,
            )
        )

    def head(self, candidate: Candidate) -> Passes:
        """Output layer with its loss, and the dense layers at the end of the model."""
        mesh, tokens, hidden = candidate.mesh, self.work.sizes(candidate).tokens, self.work.model.hidden_size
        columns = self.work.model.padded_vocab_size(self.work.vocab_size, mesh.tp) // mesh.tp
        logits = tokens * columns / self.machine.hbm
        gather = self.links.gather(mesh.tp, 1, self.work.element_bytes * tokens * hidden) if mesh.tp > 1 else 0.0
        in_parts, is_frozen = candidate.sequence_parallel, self.work.adapter.is_used
        of_loss = LOSS_BYTES[self.work.fused_loss]
        passes = Passes(
            Parts(
                products=product_seconds(self.machine, tokens, hidden, columns),
                pointwise=of_loss[0] * logits,
                tensor=gather if in_parts else 0.0,
            ),
            Parts(
                products=product_seconds(self.machine, tokens, columns, hidden),
                pointwise=of_loss[1] * logits,
                tensor=(1 if is_frozen and in_parts else 2) * gather,
            ),
            Parts(products=0.0 if is_frozen else gradient_seconds(self.machine, tokens, hidden, columns)),
        )
        ends, of_logits = ends_of(self.work.model, seq_length=self.work.seq_length), passes
        for _ in range(self.work.model.num_depths):  # each layer of multi-token prediction uses it once more
            passes = passes.plus(of_logits)
        rows = max(1, tokens // (mesh.tp if in_parts else 1))
        for linear in ends.head.linears:
            passes = passes.plus(self._dense(linear, rows, is_frozen=is_frozen))
        for linear in ends.of_sequence.linears:
            passes = passes.plus(self._dense(linear, candidate.micro_batch, is_frozen=is_frozen))
        return passes

    def _dense(self, linear: LinearShape, rows: int, *, is_frozen: bool) -> Passes:
        """Linear layer that every rank of tp has whole, on so many rows, with what reads and writes its outputs."""
        machine, inner, columns = self.machine, linear.in_features, linear.out_features
        moved = 2 * self.work.element_bytes * rows * columns / machine.hbm
        return Passes(
            Parts(products=product_seconds(machine, rows, inner, columns), pointwise=moved),
            Parts(products=product_seconds(machine, rows, columns, inner), pointwise=BACKWARD_POINTWISE * moved),
            Parts(products=0.0 if is_frozen else gradient_seconds(machine, rows, inner, columns)),
        )

    def embedding(self, candidate: Candidate) -> Passes:
        """Lookup of tokens: a copy forward, sums of rows backward, and the reduction over tp."""
        mesh, tokens = candidate.mesh, self.work.sizes(candidate).tokens
        nbytes = self.work.element_bytes * tokens * self.work.model.hidden_size
        moved = 3 * nbytes / self.machine.hbm
        reduced = (1 if candidate.sequence_parallel else 2) * self.links.gather(mesh.tp, 1, nbytes)
        learns = 0.0 if self.work.adapter.is_used else 2.0
        return Passes(Parts(pointwise=moved, tensor=reduced), Parts(), Parts(pointwise=learns * moved))

    def _linear(self, linear: LinearShape, candidate: Candidate) -> tuple[float, float, float]:
        """Forward, input gradient and weight gradient of one linear layer."""
        mesh, tokens = candidate.mesh, self.work.sizes(candidate).tokens
        rows, inner, columns, groups = on_rank(linear, linear.out_features, mesh, tokens)
        if linear.copies > 1:
            rows = -(-rows // 8) * 8  # grouped products round up
        elif linear.cut == "none" and (candidate.sequence_parallel or linear.splits_tokens):
            rows = max(1, tokens // mesh.tp)
        machine = self.machine
        return (
            product_seconds(machine, rows, inner, columns, groups),
            product_seconds(machine, rows, columns, inner, groups),
            gradient_seconds(machine, rows, inner, columns, groups),
        )

    def _core(self, core: AttentionCore, mesh: MeshSizes, samples: int) -> tuple[float, float]:
        """Forward and backward of attention's core on one rank."""
        work, eff, s = self.work, self.efficiencies, self.work.seq_length
        rate = self.machine.flops / eff.gemm
        heads = core.num_heads / mesh.tp
        pairs = samples * heads * s * s / mesh.cp
        if work.attention == "flash":
            pairs = samples * heads * s / mesh.cp * core.keys(s, "causal")
            flops = 2 * pairs * (core.query_size + core.value_size)
            forward = self.machine.flash_seconds(flops, s, core.query_size, eff.half_length)
            return forward, eff.flash_backward * forward
        flops = 2 * pairs * (core.query_size + core.value_size)
        dropped = DROPPED if work.model.attention_dropout > 0 else (0, 0)
        forward, backward = (
            factor * flops / (rate * eff.bmm) + (nbytes + more) * pairs / self.machine.hbm
            for factor, nbytes, more in zip((1, 2), SCORE_BYTES[work.attention], dropped, strict=True)
        )
        return forward, backward + (forward if work.attention == "blocks" else 0.0)

    def _largest_logits(self, core: AttentionCore, candidate: Candidate) -> Parts:
        """Pass over queries and keys of the whole sequence that finds their largest logits, as --qk-clip asks for.

        A product block by block, of what a mask shows, whose scores are written and read once.
        """
        mesh, tokens, width = candidate.mesh, self.work.sizes(candidate).tokens, self.work.element_bytes
        pairs = tokens * core.num_heads / mesh.tp * core.keys(self.work.seq_length, "causal")
        rate = self.machine.flops / self.efficiencies.gemm * self.efficiencies.bmm
        seconds = 2 * pairs * core.query_size / rate + 2 * width * pairs / self.machine.hbm
        keys = width * mesh.cp * tokens * core.keys_values_size(mesh.tp) / (2 * mesh.tp)
        return Parts(attention=seconds, context=self.links.gather(mesh.cp, mesh.tp, keys))

    def _pointwise(self, row: LayerCost, candidate: Candidate, tokens: int) -> float:
        """Norms, dropout, residuals, activations, and copies around attention and experts: bytes over bandwidth."""
        tp, work = candidate.mesh.tp, self.work
        shared = tp if candidate.sequence_parallel else 1
        hidden = work.model.hidden_size
        whole = sum(4 * norm.size * norm.vectors for norm in row.norms if not norm.is_split)
        split = sum(4 * norm.size * norm.vectors for norm in row.norms if norm.is_split)
        residuals = sum(norm.size == hidden for norm in row.norms if not norm.is_split)
        whole += residuals * hidden * (7 if work.model.hidden_dropout > 0 else 4)
        for linear in row.linears:
            width = linear.out_features if linear.cut == "column" else linear.in_features
            if linear.cut != "none":
                split += 2 * linear.used * width
            if linear.copies > 1 and linear.cut == "column":
                split += 2 * 4 * linear.used * hidden  # rows are put in order for the experts, and back
        for core in row.cores:
            split += 4 * (core.queries_size + core.keys_values_size(tp)) + 2 * core.queries_size
        nbytes = tokens * (whole / shared + split / tp) * work.element_bytes / 2
        return nbytes * (self.efficiencies.fused if work.config.training.compile else 1.0) / self.machine.hbm

    def _tensor(self, row: LayerCost, candidate: Candidate, *, is_backward: bool) -> float:
        """Collectives over tp: of the inputs of column-parallel products, and of the outputs of row-parallel ones.

        Without sequence parallelism an all-reduce of the outputs, and backward one of the gradients of the inputs; with
        it a gather and a reduce-scatter, and backward the inputs are gathered once more. What comes after a way down to
        a latent has what came down as its input.
        """
        tp, came_down = candidate.mesh.tp, 0
        if tp == 1:
            return 0.0
        inputs, kept, outputs = list[float](), list[float](), list[float]()
        for linear in row.linears:
            if linear.copies > 1:
                continue
            if linear.cut == "row":
                outputs.append(float(linear.out_features * linear.share))
            elif linear.cut == "none":
                came_down = linear.out_features if linear.sections else 0
            else:
                inputs.append(float((came_down or linear.in_features) * linear.share))
                kept.append(float(linear.in_features * linear.share))
                came_down = 0
        if candidate.sequence_parallel:
            widths = [*inputs, *outputs, *(kept if is_backward else ())]
        else:
            widths = 2 * (inputs if is_backward else outputs)
        of_token = self.work.element_bytes * self.work.sizes(candidate).tokens
        return sum(self.links.gather(tp, 1, of_token * width) for width in widths)

    def _shared_heads(self, core: AttentionCore, mesh: MeshSizes, tokens: int) -> float:
        """Exchange of the parts of a key/value head between the ranks of tp that share it."""
        nbytes = self.work.element_bytes * tokens * float(core.keys_part) * 2 * core.query_size
        return self.links.all_to_all(core.sharers(mesh.tp), 1, nbytes)

    def _context(
        self, core: AttentionCore, mesh: MeshSizes, tokens: int, seconds: tuple[float, float], latent: int | None
    ) -> tuple[float, float, float]:
        """What cp adds forward and backward, and what of it attention can hide.

        Keys and values go round a ring, or `latent` numbers a token, in the backward with sums of their gradients; or
        heads are traded for sequence.
        """
        cp, tp, width = mesh.cp, mesh.tp, self.work.element_bytes
        if cp == 1:
            return 0.0, 0.0, 0.0
        keys_values = core.keys_values_size(tp)
        if self.work.config.parallel.cp_comm_type != "p2p":
            heads = traded_heads(core.num_heads, keys_values // (2 * core.query_size), tp=tp, cp=cp)
            exchange = self.links.all_to_all(cp, tp, width * tokens * heads * core.query_size / tp)
            return exchange, exchange, 0.0
        block = tokens * (keys_values // tp if latent is None else latent)
        ring, rate = RingBytes.of(block, cp=cp, width=width), self.links.bandwidth(cp, tp)
        forward = ring.forward / rate + (cp - 1) * self.links.latency
        last = ring.last / rate + self.links.latency  # behind nothing
        backward = (ring.backward - ring.last) / rate + 2 * (cp - 1) * self.links.latency
        hides = (cp - 1) / cp * self.efficiencies.hidden
        return forward, backward + last, min(forward, hides * seconds[0]) + min(backward, hides * seconds[1])

    def _expert_transfers(self, row: LayerCost, candidate: Candidate) -> float:
        """All-to-all of rows to experts and back, and gathers of tokens over etp, in one pass."""
        mesh, work = candidate.mesh, self.work
        if all(linear.copies == 1 for linear in row.linears):
            return 0.0
        at = work.sizes(candidate)
        tokens, rows = at.tokens // mesh.tp * mesh.etp, float(at.config.rows_of_experts[1])
        if work.by_deep_ep:
            num_experts = max(linear.copies for linear in row.linears)
            rows = tokens * ranks_of_a_token(num_chosen=work.model.moe_router_topk, num_experts=num_experts, ep=mesh.ep)
        width = work.element_bytes * work.model.hidden_size
        exchange = 2 * self.links.all_to_all(mesh.ep, mesh.etp, width * rows) if mesh.ep > 1 else 0.0
        gathers = 2 * self.links.gather(mesh.etp, 1, width * tokens) if mesh.etp > 1 else 0.0
        return exchange + gathers
