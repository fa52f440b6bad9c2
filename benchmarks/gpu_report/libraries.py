"""Contenders of the GPU report that are made of a library's layers, where it is installed.

They take the plain decoder's weights, and their first losses must agree with it. Liger 0.8.5 and torchtitan 0.3.0 were
tried on a CPU: in fp32 they have its losses and gradients. TransformerEngine does not import without CUDA; its calls
were read in 2.20.2.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from plain import PlainBlock, PlainDecoder, PlainHead, Shape, Step, autocast_step, fsdp_step
from torch import Tensor, nn


class LigerBlock(PlainBlock):
    """The plain block with Liger's product of SiLU and gate."""

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        out: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return out


class LigerHead(PlainHead):
    """The plain head with Liger's cross entropy, which never holds all logits."""

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        hidden = self.norm(x).flatten(0, 1).bfloat16()
        loss: Tensor = LigerFusedLinearCrossEntropyLoss()(weight.bfloat16(), hidden, labels.flatten())
        return loss


def liger(shape: Shape) -> PlainDecoder:
    """The plain decoder with Liger's norms, activations and loss."""
    from liger_kernel.transformers import LigerLayerNorm, LigerRMSNorm

    def norm() -> nn.Module:
        width = shape.hidden_size
        made: nn.Module = (
            LigerLayerNorm(width, eps=1e-5, bias=True) if shape.kv_heads is None else LigerRMSNorm(width, eps=1e-5)
        )
        return made

    model = PlainDecoder(shape)
    for block in model.blocks:
        block.__class__ = LigerBlock
        block.norm1, block.norm2 = norm(), norm()
    model.head.__class__ = LigerHead
    model.head.norm = norm()
    return model


class EngineBlock(nn.Module):
    """A block of TransformerEngine's layers with norms inside: [B, S, D] -> [B, S, D]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.shape, is_llama = shape, shape.kv_heads is not None
        kinds: dict[str, Any] = {"bias": not is_llama, "normalization": "RMSNorm" if is_llama else "LayerNorm"}
        width, groups = shape.hidden_size, shape.kv_heads or shape.num_heads
        self.sections = [width, *[groups * shape.head_size] * 2]
        self.qkv = te.LayerNormLinear(width, sum(self.sections), eps=1e-5, **kinds)
        self.inner = te.DotProductAttention(
            shape.num_heads,
            shape.head_size,
            num_gqa_groups=groups,
            attn_mask_type="causal",
            qkv_format="bshd",
            attention_dropout=0.0,
        )
        self.out = te.Linear(width, width, bias=not is_llama)
        activation = "swiglu" if is_llama else "gelu"
        self.mlp = te.LayerNormMLP(width, shape.ffn_size, eps=1e-5, activation=activation, **kinds)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        from plain import rotated

        parts = self.qkv(x).split(self.sections, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_size)) for part in parts)
        if rotation is not None:
            q, k = (rotated(each.transpose(1, 2), rotation).transpose(1, 2).contiguous() for each in (q, k))
        x = x + self.out(self.inner(q, k, v.contiguous()))
        out: Tensor = x + self.mlp(x)
        return out


def transformer_engine(shape: Shape) -> PlainDecoder:
    """The plain decoder with blocks of TransformerEngine, in bf16."""
    model = PlainDecoder(shape)
    model.blocks = nn.ModuleList(EngineBlock(shape) for _ in range(shape.num_layers))
    return model


class TitanBlock(nn.Module):
    """A block of torchtitan's Llama 3: [B, S, D] -> [B, S, D]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from torchtitan.models.common import CosSinRoPE, RMSNorm
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
        from torchtitan.models.llama3.model import Llama3TransformerBlock

        width, drawn = shape.hidden_size, {"weight": nn.init.ones_}  # how it would draw weights itself
        self.shape, norm = shape, RMSNorm.Config(normalized_shape=width, eps=1e-5)
        attention = make_gqa_config(
            dim=width,
            n_heads=shape.num_heads,
            n_kv_heads=shape.kv_heads,
            wqkv_param_init=drawn,
            wo_param_init=drawn,
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True,
            rope=CosSinRoPE.Config(dim=shape.head_size, max_seq_len=shape.seq_length, theta=500000.0),
        )
        mlp = make_ffn_config(dim=width, hidden_dim=shape.ffn_size, w1_param_init=drawn, w2w3_param_init=drawn)
        self.block = Llama3TransformerBlock.Config(
            attention=attention, feed_forward=mlp, attention_norm=norm, ffn_norm=norm
        ).build()

    def take(self, norm1: Tensor, qkv: Tensor, out: Tensor, norm2: Tensor, fc1: Tensor, fc2: Tensor) -> None:
        """Copy the weights of a plain block; torchtitan fuses queries, keys and values itself, in another order."""
        heads = [self.shape.num_heads, *[self.shape.kv_heads or self.shape.num_heads] * 2]
        names = ("attention.qkv_linear.wq", "attention.qkv_linear.wk", "attention.qkv_linear.wv")
        parts = qkv.split([each * self.shape.head_size for each in heads])
        weights = dict(zip(names, parts, strict=True)) | {"attention.wo": out, "feed_forward.w2": fc2}
        weights |= {"attention_norm": norm1, "ffn_norm": norm2}
        weights |= dict(zip(("feed_forward.w1", "feed_forward.w3"), fc1.chunk(2), strict=True))
        self.block.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})

    def forward(self, x: Tensor, _rotation: Tensor | None) -> Tensor:
        out: Tensor = self.block(x, None)
        return out


class TitanDecoder(PlainDecoder):
    """The plain decoder with blocks of torchtitan."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blocks = nn.ModuleList(TitanBlock(shape) for _ in range(shape.num_layers))

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor]) -> None:
        """Copy weights, in the order of the plain decoder's parameters: the embedding, blocks of six, the last norm."""
        self.tokens.weight.copy_(weights[0])
        for number, block in enumerate(self.blocks):
            assert isinstance(block, TitanBlock)
            block.take(*weights[1 + 6 * number : 7 + 6 * number])
        self.head.norm.weight.copy_(weights[-1])


class Library(NamedTuple):
    """A contender: the module that it needs, how it is made and trained, and whether its parts are compiled."""

    module: str
    make: Callable[[Shape], PlainDecoder]
    train: Callable[..., Step] = autocast_step
    is_compiled: bool = True
    is_llama_alone: bool = False


LIBRARIES = {
    "Liger": Library("liger_kernel", liger),
    "TransformerEngine": Library("transformer_engine", transformer_engine, is_compiled=False),
    "torchtitan": Library("torchtitan", TitanDecoder, fsdp_step, is_llama_alone=True),
}
