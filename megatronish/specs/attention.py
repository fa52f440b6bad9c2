"""Spec of attention: its heads and windows, and what follows from them in parameters, FLOPs, memory and exchange.

A new kind of attention is a spec with these methods, which `attention_kind` (layers.py) returns, a module, and a line
in `ATTENTIONS` (model/block.py).

What a layer keeps for its backward is in its cost row: with flash attention and without dropout masks, which are
computed again, 32 s b h bytes a layer for a GPT in bf16 (Korthikanti et al. 2022, arXiv:2205.05198, section 4). A GPU
keeps some tensors of attention more:

    RoPE    queries and keys as they were before they were turned
    SDPA    with `--attention-backend flash`, a dense mask of numbers of a window or of documents for each layer. No
            kernel that takes a mask knows shared heads, nor does one in fp32, so that each query head gets a key/value
            head of its own
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from megatronish.config.sections.dense import SoftmaxType
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import EXPLICIT, AttentionBackend, RecomputeModule
from megatronish.specs.block_pattern import BlockPattern
from megatronish.specs.chunk_sizes import chunk_sizes
from megatronish.specs.costs import ActivationBytes, AttentionCore, Count, DeviceType, LayerCost, LinearShape, NormShape


@dataclass(frozen=True)
class AttentionRun:
    """How attention runs on a rank: sizes of a micro-batch, and the choices of a config that its memory depends on."""

    size: ActivationBytes
    tokens: int
    """On this rank of cp, of all samples."""
    seq_length: int
    micro_batch_size: int
    cp: int
    is_ring: bool
    backend: AttentionBackend
    has_dropout: bool
    has_rope: bool
    has_alibi: bool
    packs_documents: bool
    recomputed: frozenset[RecomputeModule]
    """Parts of a layer that are computed again in the backward, of --recompute-modules."""
    kernels: bool
    """Whether fused operators run."""
    device: DeviceType = "cuda"
    sends_latents: bool = False
    """Whether latents go round the ring, where a layer has them."""

    @property
    def fused(self) -> bool:
        """Whether activations are fused operators, which a CPU has none of."""
        return self.kernels and self.device == "cuda"

    @property
    def is_selective(self) -> bool:
        """Whether the core of attention is computed again in the backward."""
        return "core_attn" in self.recomputed

    @property
    def masked_pairs(self) -> int:
        """Queries and keys of the masks of a micro-batch: one for all samples, or one for the documents of each."""
        return self.seq_length**2 * (self.micro_batch_size if self.packs_documents else 1)


class Temperature(NamedTuple):
    """Factor of queries that grows with their position p: 1 + scale ln(1 + floor((p + 1) / floor))."""

    scale: float
    floor: int

    @classmethod
    def of(cls, model: ModelConfig) -> "Temperature | None":
        """That of the layers without RoPE, None if all their queries count alike."""
        scale = model.attn_temperature_scale
        return None if scale is None else cls(scale, model.attn_temperature_floor)


class Exchange(NamedTuple):
    """Bytes of a collective that a layer does in a forward, and in a backward, of one micro-batch.

    That of the core of attention is `in_core`, and done again with it. `sections` name the adapters without which
    a backward leaves it out where nothing before it learns; none: it does not. That of weights (`of_weights`) has a
    backward if these learn.
    """

    axis: str
    collective: str
    forward: int
    backward: int
    in_core: bool = True
    sections: tuple[str, ...] = ()
    of_weights: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention: N query heads and K key/value heads of size H; grouped queries where K < N."""

    kind: ClassVar[str] = "heads"
    """Key in `ATTENTIONS` of model/block.py."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    """Keys that a token sees at most, itself included; None: all before it."""
    pattern: BlockPattern | None = None
    """Blocks of keys that a token sees; None: all before it."""
    qk_norm: bool = False
    """Each head's queries and keys are normalised."""
    norm_across_heads: bool = False
    """All heads are normalised at once."""
    norm_by_head: bool = False
    """Each head has a weight of its own."""
    norm_one_plus: bool = False
    """The weight of a norm of heads is stored as w - 1."""
    norm_after_rope: bool = False
    """Queries and keys are normalised after they were turned."""
    norm_plain: bool = False
    """The norm of heads is an RMSNorm without a weight."""
    clip: float | None = None
    """Bound of queries, keys and values on both sides."""
    qkv_bias: bool = True
    out_bias: bool = True
    rotary: bool = True
    """Queries and keys are turned, in a model with RoPE."""
    softmax: SoftmaxType = "vanilla"
    factor: float | None = None
    """Factor of the queries, besides the root of the size of a head that divides scores; None: 1."""
    temperature: Temperature | None = None
    """Factor of the queries by their positions."""
    cap: float | None = None
    """Soft cap of the scores; with one, probabilities are explicit."""

    @classmethod
    def of(cls, model: ModelConfig, *, windowed: bool = True, rotary: bool = True) -> Self:
        """Attention as the options of a config describe it, with RoPE and a window or a pattern, or without."""
        # Llama 4 normalises queries and keys only where it turns them.
        is_l2 = model.qk_l2_norm and rotary
        return cls(
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            window=model.window_size if windowed else None,
            pattern=BlockPattern.of(model) if windowed else None,
            qk_norm=model.qk_layernorm or is_l2,
            norm_plain=is_l2,
            norm_across_heads=model.qk_layernorm_across_heads,
            norm_by_head=model.qk_layernorm_by_head,
            norm_one_plus=model.qk_layernorm_1p,
            norm_after_rope=model.qk_layernorm_after_rope,
            clip=model.clip_qkv,
            qkv_bias=model.qkv_bias,
            out_bias=model.attention_bias,
            rotary=rotary,
            softmax=model.softmax_type,
            factor=model.score_factor,
            temperature=None if rotary else Temperature.of(model),
            cap=model.attn_logit_softcapping,
        )

    @property
    def is_windowed(self) -> bool:
        """Whether a token does not see all before it."""
        return self.window is not None or self.pattern is not None

    @property
    def sections(self) -> dict[str, int]:
        """Features of all queries, all keys and all values: the sections of the qkv projection."""
        size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return {"q": size, "k": kv_size, "v": kv_size}

    def cost(self, model: ModelConfig) -> LayerCost:
        """Kept besides the inputs of linear layers and norms: queries, keys and values, also as they were unclipped."""
        hidden, (queries, keys, values) = model.hidden_size, self.sections.values()
        sections = tuple(self.sections.items())
        qkv = LinearShape(
            hidden, queries + keys + values, "column", self.qkv_bias, name="attention.qkv", sections=sections
        )
        out = LinearShape(queries, hidden, "row", self.out_bias, name="attention.out", sections=(("o", hidden),))
        names = ("attention.q_norm", "attention.k_norm")
        # A norm across all heads is cut over tp with its weight; a norm of one head has the same weight on all ranks.
        if self.norm_across_heads:
            norms = tuple(
                NormShape("RMSNorm", size, is_split=True, cuts_weight=True, name=name)
                for name, size in zip(names, (queries, keys), strict=True)
            )
        else:
            norms = tuple(
                NormShape(
                    "RMSNorm" if self.norm_plain else model.normalization,
                    self.head_size,
                    heads,
                    is_split=True,
                    name=name,
                    learned="none" if self.norm_plain else model.norm_parameters,
                    each_weight=self.norm_by_head,
                )
                for name, heads in zip(names, (self.num_heads, self.num_kv_heads), strict=True)
            )
        return LayerCost(
            linears=(qkv, out),
            norms=norms if self.qk_norm else (),
            cores=(
                AttentionCore(
                    self.num_heads,
                    self.head_size,
                    self.head_size,
                    self.window,
                    self.pattern,
                    model.is_causal,
                    num_kv_heads=self.num_kv_heads,
                ),
            ),
            # A clip keeps what went into it, to know which features it stopped.
            kept=Count(split=(queries + keys + values) * (1 if self.clip is None else 2)),
            vectors=Count(split=self.num_heads if self.softmax == "learnable" else 0),
            vectors_name="attention.sinks",
        )

    def heads_over(self, tp: int) -> int:
        """Key/value heads of all ranks of tp: where several share one, each has the whole of it."""
        return self.num_kv_heads * ranks_of_a_head(self.num_kv_heads, tp)

    # Masks

    def is_masked(self, run: AttentionRun) -> bool:
        """Whether more is masked than what comes later."""
        return self.is_sparse(run) or run.has_alibi or run.packs_documents

    def is_sparse(self, run: AttentionRun) -> bool:
        """Whether a window or a pattern hides some of what comes before: a CPU makes no dense mask and no biases."""
        # A window as long as the sequence hides nothing, and a layer with it runs as one without.
        is_windowed = self.window is not None and self.window < run.seq_length
        return is_windowed or (self.pattern is not None and not self.pattern.is_whole(run.seq_length))

    def is_flex(self, run: AttentionRun) -> bool:
        """Whether a mask needs FlexAttention, whose output is in the order of the sequence."""
        return self.is_masked(run) and run.backend == "auto" and not self.is_explicit(run.backend)

    @property
    def of_scores(self) -> str | None:
        """What its scores have that explicit probabilities alone know, in words; None: nothing."""
        return None if self.cap is None else "a soft cap"

    def is_explicit(self, backend: AttentionBackend) -> bool:
        """Whether there are explicit probabilities: the backend has them, or the scores need them."""
        return backend in EXPLICIT or self.of_scores is not None

    def is_sdpa(self, run: AttentionRun) -> bool:
        """Attention with dropout goes block by block, and sinks are added to flash attention."""
        is_plain = not self.is_explicit(run.backend) and not run.has_dropout and self.softmax == "vanilla"
        return is_plain and not run.is_ring

    def has_dense_mask(self, run: AttentionRun) -> bool:
        """Whether SDPA gets a dense mask."""
        return self.is_sdpa(run) and run.backend == "flash" and self.is_masked(run)

    def repeats_heads(self, run: AttentionRun) -> bool:
        """Whether keys and values are copied, one of each for every query head."""
        # No kernel in fp32 knows shared heads, so every query head gets a key and a value head of its own.
        is_fp32 = self.is_sdpa(run) and run.size.element == 4 and not self.is_flex(run)
        return self.heads_over(run.size.tp) < self.num_heads and (self.has_dense_mask(run) or is_fp32)

    # Memory

    def projected(self, run: AttentionRun) -> float:
        """Bytes of queries, keys and values that `mla_up_proj` computes again: only latents are what they come from."""
        return 0.0

    def kept_of_others(self, run: AttentionRun) -> float:
        """Bytes of keys and values that a rank keeps of those with which it shares a head."""
        more = self.heads_over(run.size.tp) - self.num_kv_heads
        return run.size.feature * 2 * self.head_size * more

    def more_kept(self, run: AttentionRun) -> float:
        """Bytes that a GPU keeps more than the cost row says."""
        here = self.num_heads, self.heads_over(run.size.tp)
        heads, kv_heads = (number * self.head_size for number in here)
        turns, feature, kept = run.has_rope and self.rotary, run.size.feature, 0.0
        # As they were before they were turned: values are a part of the same tensor, of a shared head without queries.
        unturned = (0 if ranks_of_a_head(self.num_kv_heads, run.size.tp) > 1 else heads) + kv_heads
        if run.cp > 1 and not run.is_ring:
            kept += feature * heads  # the output as it was computed, and as it has come back
        else:
            if turns:
                kept += feature * unturned
            elif self.temperature is not None:  # queries as they were, with the keys and values that came with them
                kept += feature * heads
            copies = run.micro_batch_size > 1 and not run.has_dropout
            if run.cp == 1 and copies and not self.is_flex(run):
                kept += feature * heads  # in the order of the heads, and in that of the sequence
        if run.is_selective:
            return kept
        if self.has_dense_mask(run) and not run.has_alibi:
            kept += run.size.element * run.masked_pairs
        if self.repeats_heads(run):
            kept += feature * 2 * heads
            if turns and run.cp == 1:  # nothing else keeps the turned keys, nor what was turned
                kept -= feature * (unturned + 2 * kv_heads)
        return kept

    def transients(self, run: AttentionRun) -> float:
        """Bytes that the backward needs besides what was kept."""
        size, heads = run.size, self.num_heads * self.head_size
        sizes = heads + 2 * self.heads_over(size.tp) * self.head_size
        num_bytes = size.residual + size.feature * (sizes + heads)
        if self.is_explicit(run.backend):
            return num_bytes + self._explicit_transients(run)
        # SDPA computes its probabilities again, tile by tile, so that none are in memory.
        if not run.is_ring and not run.has_dropout:  # with gradients of copied keys and values
            return num_bytes + (size.feature * 2 * heads if self.repeats_heads(run) else 0)
        unit = run.tokens / size.tp
        # The kernel with dropout draws its masks by a hash of the place, where they are needed.
        if run.has_dropout and run.kernels and not run.is_ring and self.pattern is None:  # flash attention
            return num_bytes
        num_bytes += unit * 4 * (sizes + (3 * (sizes - heads) if run.is_ring else 0))
        if run.has_dropout:  # three blocks of scores at a time, and eight without fused operators
            row = 4 * run.micro_batch_size * run.seq_length * self.num_heads // size.tp
            chunks = chunk_sizes(run.device)
            block = min(chunks.score_bytes, min(chunks.score_queries, run.seq_length) * row)
            if run.is_ring:  # tiles of half of what a rank has
                block = row * run.seq_length // (2 * run.cp) ** 2
            if self.pattern is not None:  # rectangles
                most = run.seq_length // (2 * run.cp if run.is_ring else 1)
                sides = self.pattern.block_size, self.pattern.longest_run(run.seq_length)
                block = row // run.seq_length * min(sides[0], most) * min(sides[1], most)
            num_bytes += block * (3 if run.kernels else 8)
        return num_bytes

    def _explicit_transients(self, run: AttentionRun) -> float:
        """Scores in the backward of explicit attention, and the probabilities that selective recomputation restores."""
        width = run.size.element
        # Gradients of probabilities and of scores. What the product with the values has kept is gone by then: with
        # dropout the dropped probabilities, else those in half precision where the softmax is in fp32.
        if self.has_fused_softmax(run):
            more = width if run.has_dropout else 2 * width
        else:
            more = 6 if width == 2 else 4 if run.has_dropout else 8
        if run.is_selective:
            more += self.bytes_per_score(run)
        return more * run.tokens * run.seq_length * self.num_heads / run.size.tp

    def has_fused_softmax(self, run: AttentionRun) -> bool:
        """Whether the softmax of explicit scores is the fused one, which knows scores alone: no ALiBi, no sinks."""
        return self.is_softmax_fused(run.backend, has_alibi=run.has_alibi)

    def is_softmax_fused(self, backend: AttentionBackend, *, has_alibi: bool) -> bool:
        """The same, where no more is known of a run."""
        return backend == "fused_softmax" and not has_alibi and self.softmax == "vanilla" and self.of_scores is None

    def bytes_per_score(self, run: AttentionRun) -> int:
        """Bytes that attention keeps of each query with each key: probabilities, dropout's mask, and what that left.

        The fused softmax keeps its output, in the dtype of the model; torch's one in fp32, and a copy for the product
        with the values where these are shorter; with ALiBi or sinks there is only torch's. A cap keeps its output, in
        fp32. SDPA, and attention with dropout block by block, keep nothing.
        """
        width = run.size.element
        if not self.is_explicit(run.backend):
            return 0
        # torch's softmax runs in fp32 whatever the model's dtype, for sums of thousands of exponentials.
        if not self.has_fused_softmax(run):
            capped = 0 if self.cap is None else 4
            return 4 + capped + (1 + width if run.has_dropout else 2 if width == 2 else 0)
        return width + (1 + width if run.has_dropout else 0)

    # Exchange

    def exchanges(
        self,
        tokens: int,
        *,
        width: int,
        tp: int,
        cp: int,
        is_ring: bool,
        cuts_sequence: bool = False,
        sends_latents: bool = False,
    ) -> list[Exchange]:
        """What a rank exchanges inside of attention, for so many tokens with elements of `width` bytes."""
        exchanges = []
        if self.qk_norm and self.norm_across_heads:  # a sum of squares of each token, in fp32
            sums = tokens * 4
            exchanges += [Exchange("tp", "all-reduce", sums, sums, False, sections_of("attention.qkv"))] * 2
        # Each of the ranks that share a head projects a part of it, so that no weight is stored twice.
        if ranks_of_a_head(self.num_kv_heads, tp) > 1:  # keys and values of the head that a rank's queries share
            heads = 2 * tokens * self.head_size * width
            exchanges += [Exchange("tp", "all-to-all", heads, heads, False, sections_of("attention.qkv"))]
            if self.qk_norm and self.norm_by_head:
                weights = self.head_size * width
                exchanges += [Exchange("tp", "all-to-all", weights, weights, False, of_weights=True)]
        if cp == 1:
            return exchanges
        # The ring sends keys and values past every rank; the all-to-all trades heads for the whole sequence.
        unit = tokens * self.head_size // tp
        if is_ring:
            ring = RingBytes.of(2 * unit * self.heads_over(tp), cp=cp, width=width)
            return [*exchanges, *(Exchange("cp", kind, ring.forward, ring.backward) for kind in ("send", "receive"))]
        traded = unit * traded_heads(self.num_heads, self.num_kv_heads, tp=tp, cp=cp) * width
        return [*exchanges, Exchange("cp", "all-to-all", traded, traded)]


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
    num_kv_heads = max(num_kv_heads, tp)
    group, on_rank = num_heads // num_kv_heads, num_kv_heads // tp
    # The fewest copies with which each rank of cp gets whole heads: more would be sent for nothing.
    copies = next(n for n in range(1, group + 1) if group % n == 0 and on_rank * n % cp == 0)
    return 2 * num_heads + 2 * copies * num_kv_heads


def ranks_of_a_head(num_kv_heads: int, tp: int) -> int:
    """Ranks of tp that share a key/value head, of which each projects a part: 1 where each has whole heads."""
    return max(1, tp // num_kv_heads)


def sections_of(layer: str) -> tuple[str, ...]:
    """Names of the parts of a projection of queries, keys and values, by that of the layer: with one, all learn."""
    return tuple(f"{layer}.{part}" for part in "qkv")
