"""How many bytes will a device hold? An estimate before any is allocated.

Model state is exact but for the padding of what is shared: in fp32 a parameter takes 4 bytes, its gradient 4 and Adam
8, 16 in all; with bf16 it takes 2, a gradient in fp32 4, master weight and Adam 12, 18 in all. What ZeRO shares is
divided by the ranks that share it (docs/SHARDING.md has the table), and what is whole for a part of a step alone is
called passing. Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), with flash attention:
34 s b h bytes a layer for a GPT in bf16, of which tensor parallelism splits 24 and sequence parallelism the rest. Not
counted: buffers of communication, what one operation needs while it runs, and what the allocator and the device's own
libraries keep (on CUDA, 1 to 2 GiB).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatronish.config.model import ModelConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.recompute import RecomputeConfig
from megatronish.config.training import AttentionBackend
from megatronish.flops import Parameters, matrices_of_layer, parameters_of_stage
from megatronish.layout import Layout


class Memory(NamedTuple):
    """Bytes on one device, and on its `host`: the CPU's memory.

    `passing` is what is whole for a part of a step: gradients of ZeRO-2 until they are exchanged, with ZeRO-3 the
    layers that were gathered and their gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    logits: int = 0
    passing: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """All of them on the device."""
        return sum(self) - self.host


class ZeroSettings(NamedTuple):
    """What ZeRO shares among how many ranks, and what of it waits in the CPU's memory."""

    stage: int = 0
    ranks: int = 1
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    bucket_size: int = 0
    overlap: bool = True

    @classmethod
    def of(cls, parallel: ParallelConfig, layout: Layout) -> "ZeroSettings":
        """As the flags say."""
        return cls(
            stage=parallel.zero,
            ranks=layout.dp * layout.cp // parallel.num_distributed_optimizer_instances if parallel.zero else 1,
            offloads_optimizer=parallel.optimizer_cpu_offload or parallel.param_cpu_offload,
            offloads_parameters=parallel.param_cpu_offload,
            bucket_size=parallel.ddp_bucket_size,
            overlap=parallel.overlap_grad_reduce,
        )


class Moment(NamedTuple):
    """How many micro-batches of each chunk wait: `live` for their backward, `due` for their weight gradients alone."""

    live: tuple[int, ...]
    due: tuple[int, ...]


class StageLoad(NamedTuple):
    """What a pipeline stage holds: the layers of each of its chunks, and the moments of a step."""

    layers: tuple[int, ...]
    moments: frozenset[Moment]
    is_first: bool
    is_last: bool


def expected_memory(
    model: ModelConfig,
    *,
    stages: Sequence[StageLoad],
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int,
    layout: Layout,
    sequence_parallel: bool = False,
    bf16: bool = False,
    optimizer: Literal["adam", "sgd", "muon"] = "adam",
    cp_comm_type: Literal["p2p", "a2a"] = "p2p",
    attention_backend: AttentionBackend = "auto",
    recompute: RecomputeConfig | None = None,
    sharing: ZeroSettings | None = None,
) -> list[Memory]:
    """Bytes on a device of each pipeline stage."""
    padded_vocab_size = model.padded_vocab_size(vocab_size, layout.tp)
    tokens = seq_length * micro_batch_size // layout.cp
    element_bytes, sharing = 2 if bf16 else 4, sharing or ZeroSettings()
    is_ring = layout.cp > 1 and cp_comm_type == "p2p"  # which keeps no probabilities, whatever it drops of them
    score_bytes = 0 if is_ring else bytes_per_score(model, attention_backend, element_bytes)
    keeping = Keeping(
        model, seq_length, element_bytes, score_bytes, layout.tp, sequence_parallel, recompute or RecomputeConfig()
    )
    expected = []
    for stage in stages:
        held = parameters_of_stage(
            model,
            vocab_size=padded_vocab_size,
            seq_length=seq_length,
            num_layers=sum(stage.layers),
            is_first=stage.is_first,
            is_last=stage.is_last,
        )
        activations, logits = max((keeping.held(stage, moment, padded_vocab_size) for moment in stage.moments), key=sum)
        count = held.per_rank(layout.tp)
        num_moments = _num_moments(optimizer, held, sum(stage.layers) * matrices_of_layer(model), layout.tp)
        passing = _passing(
            model,
            sharing,
            count=count,
            num_layers=sum(stage.layers),
            table=padded_vocab_size * model.hidden_size // layout.tp if stage.is_first or stage.is_last else 0,
            tp=layout.tp,
            element_bytes=element_bytes,
        )
        expected.append(
            model_state(count, num_moments, sharing, bf16=bf16)._replace(
                activations=tokens * (activations + keeping.once(max(stage.layers))),
                logits=tokens * logits,
                passing=passing,
            )
        )
    return expected


class Keeping(NamedTuple):
    """What the layers of a chunk keep of each token, under recomputation or without."""

    model: ModelConfig
    seq_length: int
    element_bytes: int
    score_bytes: int
    tp: int
    sequence_parallel: bool
    recompute: RecomputeConfig

    def held(self, stage: StageLoad, moment: Moment, padded_vocab_size: int) -> tuple[int, int]:
        """(activations, logits): bytes a token at one moment."""
        live = sum(count * self.kept(layers) for count, layers in zip(moment.live, stage.layers, strict=True))
        due = sum(count * layers * self._queued for count, layers in zip(moment.due, stage.layers, strict=True))
        # The model ends in a stage's last chunk: inputs of the final norm and of the head, and the logits, whose
        # gradient takes their place.
        losses = moment.live[-1] + moment.due[-1] if stage.is_last else 0
        head = losses * 2 * self.model.hidden_size * self.element_bytes // (self.tp if self.sequence_parallel else 1)
        return live + due + head, losses * self.element_bytes * padded_vocab_size // self.tp

    @property
    def _queued(self) -> int:
        """What a layer leaves for its weight gradients: input and output gradient of its four products."""
        model, sections = self.model, 2 if self.model.swiglu else 1
        heads, kv_heads, size = model.num_attention_heads, model.num_kv_heads, model.head_size
        split = 2 * (heads + kv_heads) * size + (sections + 1) * model.ffn_size
        # Inputs are kept in parts under sequence parallelism; output gradients of the two that end a sublayer whole.
        inputs, gradients = (2 * model.hidden_size * self.element_bytes for _ in range(2))
        return split * self.element_bytes // self.tp + inputs // (self.tp if self.sequence_parallel else 1) + gradients

    def kept(self, num_layers: int) -> int:
        """Bytes a token that wait for the backward."""
        recompute = self.recompute
        if recompute.recompute_granularity != "full":
            return num_layers * self._layer(keeps_attention=recompute.recompute_granularity is None)
        groups = -(-num_layers // recompute.recompute_num_layers)
        if recompute.recompute_method == "block":
            groups = min(recompute.recompute_num_layers, num_layers)
            return groups * self._input + (num_layers - groups) * self._layer()
        return groups * self._input

    def once(self, num_layers: int) -> int:
        """Bytes a token of what is being computed again."""
        recompute = self.recompute
        if recompute.recompute_granularity != "full":
            return 0
        in_a_group = 1 if recompute.recompute_method == "block" else min(recompute.recompute_num_layers, num_layers)
        return in_a_group * self._layer()

    @property
    def _input(self) -> int:
        """The input of a group of layers."""
        recompute = self.recompute
        if recompute.offload_saved_activations:
            return 0
        is_shared = self.sequence_parallel or recompute.distribute_saved_activations
        return self.model.hidden_size * self.element_bytes // (self.tp if is_shared else 1)

    def _layer(self, *, keeps_attention: bool = True) -> int:
        return activation_bytes_per_token(
            self.model,
            seq_length=self.seq_length,
            element_bytes=self.element_bytes,
            score_bytes=self.score_bytes if keeps_attention else 0,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
        )


def bytes_per_score(model: ModelConfig, backend: AttentionBackend, element_bytes: int) -> int:
    """What attention keeps of each query with each key: probabilities, dropout's mask and what that left of them.

    The fused softmax keeps its output, in the dtype of the model; torch's one in fp32, and a copy for the product with
    the values where these are shorter. SDPA keeps nothing.
    """
    dropout = model.attention_dropout > 0
    if backend == "flash" or (backend == "auto" and not dropout):
        return 0
    if backend == "unfused":
        return 4 + (1 + element_bytes if dropout else 2 if element_bytes == 2 else 0)
    return element_bytes + (1 + element_bytes if dropout else 0)


def activation_bytes_per_token(
    model: ModelConfig, *, seq_length: int, element_bytes: int, score_bytes: int = 0, tp: int, sequence_parallel: bool
) -> int:
    """What one layer keeps of each token for its backward; `score_bytes` are `bytes_per_score`."""
    hidden, heads, kv_heads, size = model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.head_size
    # Inputs of two norms and two linear layers; two dropout masks of a byte an element.
    whole = 4 * hidden * element_bytes + (2 * hidden if model.hidden_dropout else 0)
    # Queries, keys, values and attention's output; then the MLP's features before and after the nonlinearity, and,
    # where it is gated, gate, activated gate, up and their product.
    split = (2 * heads + 2 * kv_heads) * size * element_bytes
    split += model.ffn_size * (4 if model.swiglu else 2) * element_bytes
    if model.qk_layernorm:
        split += (heads + kv_heads) * size * element_bytes
    split += heads * seq_length * score_bytes
    return split // tp + whole // (tp if sequence_parallel else 1)


def _num_moments(optimizer: Literal["adam", "sgd", "muon"], held: Parameters, in_matrices: int, tp: int) -> int:
    """Elements that the optimizer keeps beside masters: Adam's two of each, SGD's one, and Muon's one of a matrix."""
    count = held.per_rank(tp)
    return {"adam": 2 * count, "sgd": count, "muon": 2 * count - in_matrices // tp}[optimizer]


def model_state(count: int, num_moments: int, sharing: ZeroSettings, *, bf16: bool) -> Memory:
    """Parameters, gradients and optimizer of a rank that computes with `count` parameters, padding left out.

    `num_moments` are the elements that its optimizer would keep beside masters, were nothing shared. `bf16` stands for
    fp16 too.
    """
    stage, (share, moments) = sharing.stage, (-(-each // sharing.ranks) for each in (count, num_moments))
    parameters = 4 * share if stage == 3 else (2 if bf16 else 4) * count
    gradients = 4 * (count if stage < 2 else share)
    if sharing.offloads_parameters:
        return Memory(0, 0, 0, host=parameters + gradients + 4 * moments)
    if sharing.offloads_optimizer:  # masters, and the gradients that they are stepped by
        return Memory(parameters, gradients, 0, host=(4 + 4) * share + 4 * moments)
    masters = 4 * share if bf16 and stage < 3 else 0  # in fp32 they are the parameters, as ever with ZeRO-3
    return Memory(parameters, gradients, masters + 4 * moments)


BUCKETS_AT_ONCE = 3  # of ZeRO-2: two are exchanged while one fills


def _passing(
    model: ModelConfig, sharing: ZeroSettings, *, count: int, num_layers: int, table: int, tp: int, element_bytes: int
) -> int:
    """Bytes that are whole for a part of a step, on a rank of `count` parameters; `table` are those of an embedding."""
    if sharing.stage == 2:
        if not sharing.overlap:
            return 4 * count
        up = model.hidden_size * model.ffn_size * (2 if model.swiglu else 1) // tp
        bucket = max(sharing.bucket_size, up)  # a matrix is never cut
        return 4 * min(count, (BUCKETS_AT_ONCE - 1) * bucket + max(bucket, table))
    if sharing.stage == 3:
        # The layer at work, the next one, which is gathered meanwhile, and what is left of the stage around them; of
        # the gradients all but the next one's.
        one = parameters_of_stage(model, vocab_size=0, seq_length=0, num_layers=1, is_first=False, is_last=False)
        layer = one.per_rank(tp)
        rest = count - num_layers * layer
        return element_bytes * (rest + min(num_layers, 2) * layer + rest + layer)
    return 0


def format_bytes(size: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_table(stages: list[Memory]) -> str:
    """A row for each stage, a column for each kind of bytes; what few runs have is there where there is any."""
    optional = {"passing", "host"}
    names = [name for name in Memory._fields if name not in optional or any(getattr(each, name) for each in stages)]
    names.insert(len(names) - names.count("host"), "total")
    rows = [[f"stage {i}", *(format_bytes(getattr(each, name)) for name in names)] for i, each in enumerate(stages)]
    return "\n".join("".join(f"{cell:>12}" for cell in row).rstrip() for row in [["", *names], *rows])
