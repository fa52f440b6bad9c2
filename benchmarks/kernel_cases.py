"""Cases of benchmarks/kernels.py: operations, sizes, and the contenders that each is compared with.

A case says how many bytes cannot be spared: each input read once, each output written once. What is a number a row does
not count, nor does the half of causal scores that nobody has to read. Contenders are torch's own functions, as anybody
would write them, eager and compiled, and apex, as far as it is there; it has not been here, and its part was written
from its sources.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.layers.vocabulary import vocab_parallel_cross_entropy
from megatronish.ops.activation import bias_gelu, bias_swiglu
from megatronish.ops.dropout import dropout_add
from megatronish.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megatronish.ops.softmax import scaled_causal_softmax, scaled_masked_softmax
from megatronish.parallel.mesh import Axis
from megatronish.parallel.streams import keep_mask

EPSILON, SCALE, DROPPED = 1e-5, 0.125, 0.1

Run = Callable[..., Any]


class Sizes(NamedTuple):
    """Device, dtype and sizes of the tensors of all cases."""

    device: torch.device
    dtype: torch.dtype
    num_bytes: int
    lengths: Sequence[int] = (1024, 4096, 16384)
    hidden: Sequence[int] = (1024, 4096, 12288)
    vocabularies: Sequence[int] = (32000, 128256)
    features: Sequence[int] = (4096, 14336)

    def rows(self, columns: int) -> int:
        """As many rows as fill the tensor."""
        return max(2, self.num_bytes // (columns * self.dtype.itemsize))

    def random(self, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Random leaf tensors of these shapes, one for each."""
        return tuple(torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_() for shape in shapes)


class Case(NamedTuple):
    """One operation at one size; contenders are functions of the tensors that `make` creates."""

    name: str
    shape: str
    make: Callable[[], tuple[Tensor, ...]]
    ours: Run
    torchs: Run
    apex: Run | None
    forward_bytes: int
    backward_bytes: int


def softmax_cases(sizes: Sizes) -> Iterator[Case]:
    """Softmax: masked, with documents of a quarter of the sequence, and causal, which reads half of the scores."""
    for length in sizes.lengths:
        heads = max(1, sizes.rows(length) // (2 * length))
        shape, count = (2, heads, length, length), 2 * heads * length**2 * sizes.dtype.itemsize
        places = torch.arange(length, device=sizes.device)
        causal = places[:, None] >= places
        visible = (causal & (places[:, None] * 4 // length == places * 4 // length)).expand(2, 1, -1, -1).contiguous()
        yield Case(
            "scaled masked softmax",
            "x".join(map(str, shape)),
            partial(sizes.random, shape),
            partial(scaled_masked_softmax, visible=visible, scale=SCALE),
            partial(_softmax, visible=visible),
            _apex_masked_softmax(~visible),
            2 * count + visible.numel(),
            3 * count,
        )
        yield Case(
            "scaled causal softmax",
            "x".join(map(str, shape)),
            partial(sizes.random, shape),
            partial(scaled_causal_softmax, scale=SCALE),
            partial(_softmax, visible=causal),
            _apex_causal_softmax(),
            3 * count // 2,
            2 * count,
        )


def _softmax(scores: Tensor, *, visible: Tensor) -> Tensor:
    return (scores.float() * SCALE).masked_fill(~visible, -torch.inf).softmax(-1).to(scores.dtype)


def norm_cases(sizes: Sizes) -> Iterator[Case]:
    """Norms of x, and of x + residual, which is an output too."""
    for hidden in sizes.hidden:
        rows, size = sizes.rows(hidden), sizes.rows(hidden) * hidden * sizes.dtype.itemsize
        for adds in (False, True):
            streams = [(rows, hidden)] * (2 if adds else 1)
            for name, vectors in (("layer norm", 2), ("rms norm", 1)):
                is_layer = name == "layer norm"
                ours = (add_layer_norm, add_rms_norm) if adds else (layer_norm, rms_norm)
                torchs = partial(_layer_norm if is_layer else _rms_norm, adds=adds)
                yield Case(
                    f"{name} of a sum" if adds else name,
                    f"{rows}x{hidden}",
                    partial(sizes.random, *streams, *[(hidden,)] * vectors),
                    partial(ours[0 if is_layer else 1], epsilon=EPSILON),
                    torchs,
                    None if adds else _apex_norm(is_layer, hidden),
                    (4 if adds else 2) * size,
                    (4 if adds else 3) * size,
                )


def _layer_norm(*tensors: Tensor, adds: bool) -> Any:
    *streams, weight, bias = tensors
    total = streams[0] + streams[1] if adds else streams[0]
    normalised = F.layer_norm(total, weight.shape, weight, bias, EPSILON)
    return (normalised, total) if adds else normalised


def _rms_norm(*tensors: Tensor, adds: bool) -> Any:
    *streams, weight = tensors
    total = streams[0] + streams[1] if adds else streams[0]
    normalised = F.rms_norm(total, weight.shape, weight, EPSILON)
    return (normalised, total) if adds else normalised


def cross_entropy_cases(sizes: Sizes) -> Iterator[Case]:
    """The whole loss of one rank: besides the logits there are only scalars a token."""
    for vocabulary in sizes.vocabularies:
        tokens = sizes.rows(vocabulary)
        size = tokens * vocabulary * sizes.dtype.itemsize

        def make(tokens: int = tokens, vocabulary: int = vocabulary) -> tuple[Tensor, ...]:
            labels = torch.randint(vocabulary, (tokens, 1), device=sizes.device)
            return *sizes.random((tokens, 1, vocabulary)), labels

        yield Case(
            "cross entropy",
            f"{tokens}x{vocabulary}",
            make,
            partial(vocab_parallel_cross_entropy, vocab_size=vocabulary, tp=Axis("tp")),
            _cross_entropy,
            _apex_cross_entropy(),
            size,
            2 * size,
        )


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def activation_cases(sizes: Sizes) -> Iterator[Case]:
    """Activations; the input of SwiGLU is twice as wide as its output."""
    for features in sizes.features:
        rows = sizes.rows(features)
        size = rows * features * sizes.dtype.itemsize
        make = partial(sizes.random, (rows, features), (features,))
        for tanh in ("none", "tanh"):
            yield Case(
                "bias + gelu" + (" by tanh" if tanh == "tanh" else ""),
                f"{rows}x{features}",
                make,
                partial(bias_gelu, approximate=tanh),
                partial(_gelu, approximate=tanh),
                None,
                2 * size,
                3 * size,
            )
        yield Case(
            "bias + swiglu", f"{rows}x{features}", make, bias_swiglu, _swiglu, None, 3 * size // 2, 5 * size // 2
        )


def _gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _swiglu(x: Tensor, bias: Tensor) -> Tensor:
    gate, up = (x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def dropout_cases(sizes: Sizes) -> Iterator[Case]:
    """Dropout and the residual addition, with the same masks: a hash of each element's place, in no memory of its own.

    The backward reads one gradient and writes that of x; the residual's is the gradient itself.
    """
    keys = torch.tensor([1234567, -7654321], dtype=torch.int32, device=sizes.device)
    for hidden in sizes.hidden:
        rows = sizes.rows(hidden)
        sample = torch.zeros(1, dtype=torch.int64, device=sizes.device)
        places = {"positions": torch.arange(rows, device=sizes.device), "sample_ids": sample}
        size = rows * hidden * sizes.dtype.itemsize
        yield Case(
            "dropout + residual",
            f"{rows}x1x{hidden}",
            partial(sizes.random, *[(rows, 1, hidden)] * 2),
            partial(dropout_add, keys=keys, rate=DROPPED, **places),
            partial(_dropout, keys=keys, **places),
            None,
            3 * size,
            2 * size,
        )


def _dropout(x: Tensor, residual: Tensor, *, keys: Tensor, positions: Tensor, sample_ids: Tensor) -> Tensor:
    columns = torch.arange(x.shape[-1], device=x.device)
    keep = keep_mask(keys, places=(sample_ids, positions.unsqueeze(-1)), columns=columns, rate=DROPPED)
    return torch.where(keep, x / (1 - DROPPED), 0.0) + residual


FAMILIES = {
    "softmax": softmax_cases,
    "norm": norm_cases,
    "cross_entropy": cross_entropy_cases,
    "activation": activation_cases,
    "dropout": dropout_cases,
}


# apex


def _apex_masked_softmax(hidden: Tensor) -> Run | None:
    try:
        from apex.transformer.functional.fused_softmax import ScaledMaskedSoftmax
    except ImportError:
        return None
    return lambda scores: ScaledMaskedSoftmax.apply(scores, hidden, SCALE)


def _apex_causal_softmax() -> Run | None:
    try:
        from apex.transformer.functional.fused_softmax import ScaledUpperTriangMaskedSoftmax
    except ImportError:
        return None
    return lambda scores: ScaledUpperTriangMaskedSoftmax.apply(scores.flatten(0, 1), SCALE).view_as(scores)


def _apex_norm(is_layer: bool, hidden: int) -> Run | None:
    try:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
    except ImportError:
        return None
    function = fused_layer_norm_affine if is_layer else fused_rms_norm_affine
    return lambda *tensors: function(*tensors, (hidden,), EPSILON)


def _apex_cross_entropy() -> Run | None:
    try:
        from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
    except ImportError:
        return None
    # Without smoothing; no label is padding; losses in fp32.
    return lambda logits, labels: SoftmaxCrossEntropyLoss.apply(
        logits.flatten(0, 1), labels.flatten(), 0.0, -1, True
    ).view_as(labels)
