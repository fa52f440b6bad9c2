"""Bytes that layers, embedding and head exchange in a step: over tp, cp, ep and etp.

A frozen product gathers its input no more for a weight gradient, and reduces the gradient of its input only where
something before it learns: in the first layer of the first stage not before the first adapter.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatronish.estimate.costs.step_traffic import SCALAR, StepTraffic
from megatronish.specs.adapter_targets import all_patterns, is_target
from megatronish.specs.costs import LinearShape
from megatronish.specs.layers import AttentionSpec, LayerSpec, layer_specs


class RingBytes(NamedTuple):
    """Bytes that a rank sends round the ring of attention in a forward and in a backward.

    `last` of the backward's are those of the last step: sums of gradients come home, and no block is computed with.
    """

    forward: int
    backward: int
    last: int

    @classmethod
    def of(cls, block: int, *, cp: int, width: int) -> "RingBytes":
        """Of so many elements of keys and values on a rank. Sums of their gradients go one step further, in fp32."""
        blocks, sums = (cp - 1) * block * width, block * 4
        return cls(blocks, blocks + cp * sums, sums)


def traded_heads(num_heads: int, num_kv_heads: int, *, tp: int, cp: int) -> int:
    """Heads whose channels are traded for the sequence in a forward: queries, keys, values, and the output.

    Key-value heads are repeated until the ranks of cp can share them out.
    """
    group, on_rank = num_heads // num_kv_heads, num_kv_heads // tp
    copies = next(n for n in range(1, group + 1) if group % n == 0 and on_rank * n % cp == 0)
    return 2 * num_heads + 2 * copies * num_kv_heads


@dataclass
class LayerTraffic(StepTraffic):
    """Traffic of forwards and backwards; `learns_before` says of the layer at work whether something before it does."""

    learns_before: bool = True

    @cached_property
    def specs(self) -> list[LayerSpec]:
        """Layers of the stage."""
        specs = layer_specs(self.config.model)
        return [specs[layer] for layer in self.load.all_layers]

    def forwards(self, spec_index: int) -> int:
        """How often a layer of the stage runs forward for one micro-batch."""
        recompute, place = self.config.recompute, spec_index
        if recompute.recompute_granularity != "full":
            return 1
        if recompute.recompute_method == "uniform":
            return 2
        for layers in self.load.layers:
            if place < len(layers):
                return 2 if place < recompute.recompute_num_layers else 1
            place -= len(layers)
        raise AssertionError("the layer is in no chunk")

    def layers(self) -> None:
        """Tensor, context and expert parallelism inside of layers."""
        self.learns_before = not (self.freezes and self.load.is_first)
        for index, (layer, spec) in enumerate(zip(self.load.all_layers, self.specs, strict=True)):
            forwards, name = self.forwards(index), f"layers.{layer}"
            # What is computed again begins with a copy of its input that has a gradient.
            self.learns_before |= forwards > 1
            if spec.attention.qk_norm and spec.attention.norm_across_heads:
                self._norms_across_heads(f"{name}.attention.qkv", forwards)
            self._cores(spec.attention, forwards + (self.config.recompute.recompute_granularity == "selective"))
            linears = spec.cost(self.config.model).linears
            for experts in [each for each in linears if each.copies > 1 and each.cut == "column"]:
                self._experts(experts, forwards)
            # Column-parallel products and the row-parallel ones behind them.
            dense = [each for each in linears if each.copies == 1 and each.cut != "none"]
            for first, second in zip(dense[::2], dense[1::2], strict=True):
                self._pair(name, first, second, forwards)
        if self.config.recompute.distribute_saved_activations:
            size = self.config.recompute.recompute_num_layers
            groups = sum(
                min(size, len(layers)) if self.config.recompute.recompute_method == "block" else -(-len(layers) // size)
                for layers in self.load.layers
            )
            self.add("tp", "all-gather", self.num_microbatches * groups * self.hidden)

    def _pair(self, name: str, first: LinearShape, second: LinearShape, forwards: int) -> None:
        """A column-parallel and a row-parallel product, and their adapters."""
        size, times = self.num_microbatches * self.hidden, self.num_microbatches
        adapted = [
            sum(self._is_adapted(f"{name}.{linear.name}.{section}") for section, _ in linear.sections)
            for linear in (first, second)
        ]
        learns_inside = self.learns_before or adapted[0] > 0
        if self.cuts_sequence:
            # Forward; for the weight gradient; backward of the reduce-scatter at the end.
            self.add("tp", "all-gather", (forwards + (not self.freezes) + learns_inside) * size)
            self.add("tp", "reduce-scatter", (forwards + self.learns_before) * size)
        else:
            self.add("tp", "all-reduce", (forwards + self.learns_before) * size)
        self.learns_before = learns_inside or adapted[1] > 0
        if self.config.adapter.adapter_type == "lora":
            low = times * self.tokens * self.config.adapter.lora_rank * self.width
            if self.cuts_sequence:
                self.add("tp", "all-gather", low * (forwards * adapted[0] + adapted[1]))
                self.add("tp", "reduce-scatter", low * (adapted[0] + forwards * adapted[1]))
            else:
                self.add("tp", "all-reduce", low * (adapted[0] + forwards * adapted[1]))

    def _norms_across_heads(self, name: str, forwards: int) -> None:
        """A sum of squares of each token, of queries and of keys, and backward one more of each; in fp32."""
        for section in ("q", "k"):
            learns = self.learns_before or not self.freezes or self._is_adapted(f"{name}.{section}")
            self.add("tp", "all-reduce", self.num_microbatches * (forwards + learns) * self.tokens * 4)

    def _is_adapted(self, section: str) -> bool:
        return self.freezes and is_target(section, all_patterns(self.config.adapter))

    def _cores(self, attention: AttentionSpec, forwards: int) -> None:
        layout = self.config.layout
        if layout.cp == 1:
            return
        tokens = self.num_microbatches * self.tokens * attention.head_size // layout.tp
        if self.config.parallel.cp_comm_type == "p2p":
            ring = RingBytes.of(2 * tokens * attention.num_kv_heads, cp=layout.cp, width=self.width)
            size = forwards * ring.forward + ring.backward
            self.add("cp", "send", size)
            self.add("cp", "receive", size)
        else:
            heads = traded_heads(attention.num_heads, attention.num_kv_heads, tp=layout.tp, cp=layout.cp)
            self.add("cp", "all-to-all", (forwards + 1) * tokens * heads * self.width)

    def _experts(self, experts: LinearShape, forwards: int) -> None:
        """Rows to the experts and back, a count of them, and what ranks with parts of the same experts share."""
        layout, etp, times = self.config.layout, self.sizes["etp"], self.num_microbatches
        own = self.tokens // layout.tp * etp
        rows = own * experts.used // experts.copies * experts.copies
        hidden = self.config.model.hidden_size * self.width
        if layout.tp > 1 and not self.cuts_sequence:  # each rank of tp takes a part of the tokens
            self.add("tp", "all-gather", times * (forwards + 1) * self.hidden)
        self.add("ep", "all-to-all", times * (2 * (forwards + 1) * rows * hidden + experts.copies * SCALAR))
        weights = own * experts.used * 4
        self.add("etp", "all-gather", times * forwards * (own * hidden + weights + own * experts.used * SCALAR))
        self.add("etp", "all-gather", times * own * hidden)
        self.add("etp", "reduce-scatter", times * (own * hidden * (forwards + 1) + weights))
        model = self.config.model
        if model.moe_expert_capacity_factor is not None:
            self._capacity(experts.copies)
        if model.moe_router_load_balancing_type == "seq_aux_loss" and model.moe_aux_loss_coeff:
            counts = self.config.training.micro_batch_size * experts.copies * SCALAR
            for axis in ("tp", "cp"):
                self.add(axis, "all-reduce", times * forwards * counts)

    def _capacity(self, num_experts: int) -> None:
        """Choices of each expert, int32, in the blocks of a sequence, and where the blocks begin: of first forwards."""
        layout, parts = self.config.layout, 1
        blocks = 2 if layout.cp > 1 and layout.tp % 2 else 1
        block = 4 * self.config.training.micro_batch_size * num_experts + SCALAR
        for axis, ranks in (("tp", layout.tp), ("cp", layout.cp)):
            parts *= ranks
            self.add(axis, "all-gather", self.num_microbatches * blocks * parts * block)

    def ends(self) -> None:
        """Embedding, output layer and loss."""
        size, learns = self.num_microbatches * self.hidden, not self.freezes
        if self.load.is_first:
            if self.cuts_sequence:
                self.add("tp", "reduce-scatter", size)
                self.add("tp", "all-gather", learns * size)
            else:
                self.add("tp", "all-reduce", size)
        if self.load.is_last:
            if self.cuts_sequence:
                self.add("tp", "all-gather", (1 + learns) * size)
                self.add("tp", "reduce-scatter", size)
            else:
                self.add("tp", "all-reduce", size)
            self.add("tp", "all-reduce", self.num_microbatches * self.tokens * (4 + 2 * 4))
