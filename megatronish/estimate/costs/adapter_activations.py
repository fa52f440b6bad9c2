"""Bytes that a layer keeps for its backward more, or fewer, because its weights are frozen and adapters learn.

A frozen product keeps no input. LoRA keeps the input of each section (with dropout a copy for each of them) and the
product with A; IA3 keeps the features that it scales.
"""

from collections.abc import Iterable

from megatronish.config.sections.adapter import AdapterConfig
from megatronish.estimate.costs.adapters import all_patterns, is_target
from megatronish.specs.layers import AttentionSpec, ExpertsSpec, LayerSpec, MLPSpec


class AdapterActivations:
    """Bytes of a layer by name for a micro-batch. `residual` are those of a column-parallel layer's input.

    `unit` are the bytes of one feature of all tokens, of one tp rank's features `split`.
    """

    def __init__(self, adapter: AdapterConfig, *, unit: float, tp: int, residual: float) -> None:
        self.adapter, self.patterns = adapter, all_patterns(adapter)
        self.unit, self.split, self.residual = unit, unit / tp, residual

    def of_layer(self, name: str, spec: LayerSpec) -> float:
        """All changes of a layer."""
        found = self._of_pair(f"{name}.attention", ("qkv", "out", "o"), spec.attention)
        if isinstance(spec.mlp, ExpertsSpec):  # whose rows have no dropout
            return found
        return found + self._of_pair(f"{name}.mlp", ("fc1", "fc2", "down"), spec.mlp)

    def _of_pair(self, name: str, names: tuple[str, str, str], spec: AttentionSpec | MLPSpec) -> float:
        """A column-parallel and a row-parallel layer."""
        first, second, section = names
        in_first = self._number(f"{name}.{first}", spec.sections)
        in_second = self._number(f"{name}.{second}", (section,))
        is_attention = isinstance(spec, AttentionSpec)
        width = spec.sections["q"] if isinstance(spec, AttentionSpec) else spec.ffn_size
        if self.adapter.adapter_type == "ia3":
            scaled = sum(spec.sections.values()) if in_first else 0
            return self.split * scaled - self.residual
        copies = (in_first - 1) * self.residual if self.adapter.lora_dropout or not in_first else 0.0
        low = self.unit * self.adapter.lora_rank * (in_first + in_second)
        if is_attention:  # the operator of attention keeps its output, too
            return copies + low + (self.split * width if in_second and self.adapter.lora_dropout else 0.0)
        return copies + low - (0.0 if in_second else self.split * width)

    def _number(self, layer: str, sections: Iterable[str]) -> int:
        return sum(is_target(f"{layer}.{section}", self.patterns) for section in sections)
