"""QK-clip (Kimi K2, arXiv:2507.20534, section 2.1): weights of queries and keys shrink where a logit grew too large.

After the update of a step in which the largest logit M of a head was above the threshold t, the head is to keep the
share s = t / M of its logits:

    heads of queries and keys   W_q *= s^alpha, W_k *= s^(1 - alpha); heads that share a key have the smallest share
    latent attention            the same of what RoPE does not turn; W_q *= s of the turned part, whose key is shared

Biases shrink with their weights. A factor is that of a row of the whole weight, so every rank multiplies rows of the
fp32 masters that it keeps, however the weight is cut. The largest logits of all heads are one small all-reduce over
all ranks. Each island clips by its own, as it clips gradients by its own norm.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatronish.attention.largest_logits import LargestLogits
from megatronish.config.config import Config
from megatronish.model.attention import SelfAttention
from megatronish.model.gpt import GPT
from megatronish.optim.optimizer import Optimizer
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.sharding import Shard
from megatronish.specs.layers import layer_specs

LARGEST = "max_attention_logit"


class QKClip:
    """Largest logits of a rank's attention, step by step, and their clip.

    Without a `threshold` they are measured alone. A run that wants none has no `logits`.
    """

    def __init__(
        self, logits: LargestLogits | None = None, *, threshold: float | None = None, alpha: float = 0.5
    ) -> None:
        self.logits, self.threshold, self.alpha = logits, threshold, alpha
        self.largest: Tensor | None = None  # of the last step, over the ranks of the island: fp32 [layers, heads]

    @classmethod
    def of(cls, config: Config, model: GPT, mesh: Mesh) -> "QKClip":
        """As the config says; attention learns where to write its logits."""
        if not config.measures_logits:
            return cls()
        optimizer, specs = config.optimizer, layer_specs(config.model)
        heads = max(spec.attention.num_heads for spec in specs)
        logits = LargestLogits.none_yet(len(specs), heads, device=mesh.device)
        for _, attention in _attention_of(model):
            attention.largest = logits
        return cls(
            logits, threshold=optimizer.qk_clip_threshold if optimizer.qk_clip else None, alpha=optimizer.qk_clip_alpha
        )

    def begin(self) -> None:
        """Forget the step before, and an evaluation since."""
        if self.logits is not None:
            self.logits.forget()

    def metrics(self, mesh: Mesh) -> dict[str, float]:
        """The largest logit of the step, over all ranks. A collective call."""
        if self.logits is None:
            return {}
        own, islands = self.logits.of_heads, mesh.islands
        of_islands = torch.full((islands.size, *own.shape), -torch.inf, device=own.device)
        of_islands[islands.rank] = own
        comm.all_reduce(of_islands, mesh.world, "max")
        self.largest = of_islands[islands.rank]
        return {LARGEST: max(of_islands.cpu().flatten().tolist())}

    @torch.no_grad()
    def end_step(self, model: GPT, optimizer: Optimizer) -> None:
        """Shrink the masters of this rank, which the step has updated, by the largest logits of all heads."""
        if self.threshold is None or self.largest is None:
            return
        is_above = self.largest.isfinite() & (self.largest > self.threshold)
        kept = torch.where(is_above, self.threshold / self.largest, torch.ones_like(self.largest))
        for prefix, attention in _attention_of(model):
            shares = kept[attention.layer, : attention.spec.num_heads]
            for linear, factors in attention.row_factors(shares, alpha=self.alpha).items():
                for parameter in ("weight", "bias"):
                    name = f"{prefix}.{linear}.{parameter}"
                    if name in optimizer.masters:
                        _multiply_rows(optimizer.shards[name], factors)


def _attention_of(model: GPT) -> Iterator[tuple[str, SelfAttention]]:
    """Names and modules of attention whose weights can be clipped."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SelfAttention))


def _multiply_rows(shard: Shard, factors: Tensor) -> None:
    """Multiply each row of the whole parameter that a shard has, or a part of, by its factor."""
    factors = factors.to(shard.master.device)
    for piece in shard.pieces:
        rows = piece.view(shard.master)
        start, number = piece.global_offset[0], piece.sizes[0]
        rows.mul_(factors[start : start + number].view(-1, *[1] * (rows.dim() - 1)))
