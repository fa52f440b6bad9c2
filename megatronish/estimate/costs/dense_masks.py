"""Bytes of dense masks: of windows, documents and ALiBi, where `--attention-backend flash` leaves SDPA alone.

SDPA turns a mask of bools into one of numbers in each layer, which waits there for the backward; ALiBi's biases are
made once for all layers. Neither kernel that takes them knows shared heads, so each query head gets a key/value head of
its own (attention/flash.py); so it is without a mask in fp32, which flash attention does not take.
"""

from megatronish.config.config import Config
from megatronish.specs.layers import AttentionSpec


class DenseMasks:
    """Masks of a config on a rank."""

    def __init__(self, config: Config, *, width: int) -> None:
        self._config, self._width = config, width
        model, layout = config.model, config.layout
        is_ring = layout.cp > 1 and config.parallel.cp_comm_type == "p2p"
        backend = config.training.attention_backend
        # Attention with dropout goes block by block, and sinks are added to flash attention.
        is_sdpa = backend in ("auto", "flash") and not model.attention_dropout and model.softmax_type == "vanilla"
        self._is_sdpa = is_sdpa and not is_ring
        self._may_be_dense = self._is_sdpa and backend == "flash"
        self._has_alibi = model.position_embedding_type == "alibi"
        self._square = config.training.seq_length**2
        self._samples = config.training.micro_batch_size if config.data.packs_documents else 1
        self._selects = config.recompute.recompute_granularity == "selective"
        self._heads = model.num_attention_heads // (layout.tp * layout.cp)

    def is_dense(self, spec: AttentionSpec) -> bool:
        """Whether SDPA gets a dense mask."""
        return self._may_be_dense and self._is_masked(spec)

    def repeats_heads(self, spec: AttentionSpec) -> bool:
        """Whether keys and values are copied, one of each for every query head."""
        is_fp32 = self._is_sdpa and self._width == 4 and not self._is_flex(spec)
        return spec.num_kv_heads < spec.num_heads and (self.is_dense(spec) or is_fp32)

    def _is_flex(self, spec: AttentionSpec) -> bool:
        return self._is_masked(spec) and self._config.training.attention_backend == "auto"

    def _is_masked(self, spec: AttentionSpec) -> bool:
        """Whether more is masked than what comes later."""
        is_windowed = spec.window is not None and spec.window < self._config.training.seq_length
        return is_windowed or self._has_alibi or self._config.data.packs_documents

    def of_layer(self, spec: AttentionSpec, *, unit: float) -> float:
        """Bytes that a layer keeps more than with flash attention; `unit` are those of a channel of all tokens."""
        if self._selects:
            return 0.0
        model, layout = self._config.model, self._config.layout
        found = 0.0
        if self.is_dense(spec) and not self._has_alibi:
            found += self._width * self._square * self._samples
        if self.repeats_heads(spec):
            heads, kv_heads = (number * spec.head_size for number in (spec.num_heads, spec.num_kv_heads))
            found += unit * 2 * heads
            if model.position_embedding_type == "rope" and spec.rotary and layout.cp == 1:
                # Nothing else keeps the turned keys, nor what queries and keys were turned from.
                found -= unit * (heads + 3 * kv_heads)
        return found

    def shared(self, specs: list[AttentionSpec]) -> float:
        """Bytes that are there once for all micro-batches: the mask of bools, and ALiBi's biases."""
        if self._config.data.packs_documents or not any(map(self.is_dense, specs)):
            return 0.0
        return self._square * self._of_pair

    def of_micro_batch(self, specs: list[AttentionSpec]) -> float:
        """Bytes of each micro-batch that waits, whose documents have a mask of their own."""
        if not self._config.data.packs_documents or not any(map(self.is_dense, specs)):
            return 0.0
        # The mask of bools is kept for the layers that are computed again.
        again = self._config.recompute.recompute_granularity is not None
        return self._samples * self._square * (self._of_pair - (0 if again else 1))

    @property
    def _of_pair(self) -> int:
        """Bytes of a query and a key."""
        return 1 + (self._width * self._heads if self._has_alibi else 0)
