"""Specs of the layers of a model: what each layer is made of, as data that needs no torch.

A spec holds what may differ from layer to layer: heads, window and biases of its attention, size and activation of its
MLP. What all layers share (width D, kind of norm, dropout, rotary positions) stays in `ModelConfig`. Modules are built
from specs, and costs (parameters, FLOPs, memory, the split over pipeline stages) are computed from the same specs:
`cost` of a spec is the cost row of the module that is built from it. A new kind of sublayer is a spec with a cost row,
a module, and a test that holds one to the other (tests/estimate/test_layer_costs.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from megatronish.config.sections.dense import Activation
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import RecomputeModule
from megatronish.core.errors import UserError
from megatronish.core.names import BLOCK_NAMES, options_of
from megatronish.specs.attention import AttentionRun, AttentionSpec
from megatronish.specs.biased_attention import BiasedAttentionSpec
from megatronish.specs.costs import ActivationBytes, Count, LayerCost, LinearShape, NormShape
from megatronish.specs.latent_attention import LatentAttentionSpec


@dataclass(frozen=True)
class MLPSpec:
    """MLP: D -> F (gated: 2 F, gate before up), activation, F -> D."""

    kind: ClassVar[Literal["dense"]] = "dense"
    ffn_size: int
    activation: Activation = "gelu"
    bias: bool = True
    up_offset: float = 0.0
    """Added to the up-projection of a gated MLP."""
    clamp: float | None = None
    """Bound of a gated MLP on gate (from above) and up-projection (on both sides)."""

    @classmethod
    def of(cls, model: ModelConfig, ffn_size: int | None = None, *, bias: bool | None = None) -> "MLPSpec":
        """The MLP that the options of a config describe, perhaps of another width, with biases or without."""
        return cls(
            ffn_size=ffn_size or model.ffn_size,
            activation=model.activation,
            bias=model.mlp_bias if bias is None else bias,
            up_offset=model.glu_linear_offset if model.is_gated else 0.0,
            clamp=model.activation_func_clamp_value if model.is_gated else None,
        )

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation in ("swiglu", "geglu", "quick_geglu")

    @property
    def is_plain(self) -> bool:
        """Whether the activation is the usual one of its name, without offset and clamp."""
        return self.up_offset == 0 and self.clamp is None

    @property
    def sections(self) -> dict[str, int]:
        """Features of the first product: those of the gate and of the up-projection, or the latter alone."""
        return dict.fromkeys(("gate", "up") if self.is_gated else ("up",), self.ffn_size)

    @property
    def num_experts(self) -> int:
        """Experts of a layer: a plain MLP has none."""
        return 0

    @property
    def features(self) -> int:
        """Features of the first product."""
        return sum(self.sections.values())

    @property
    def activated_gate(self) -> int:
        """Features of plain SwiGLU's activated gate, which its operator does not keep."""
        return self.ffn_size if self.activation == "swiglu" and self.is_plain else 0

    def cost(self, model: ModelConfig, name: str = "mlp") -> LayerCost:
        """Kept besides the inputs of linear layers: the activation's input, and plain SwiGLU's activated gate.

        ReLU keeps its output, which is the input of the second product.
        """
        hidden, sections = model.hidden_size, tuple(self.sections.items())
        linears = LayerCost(
            linears=(
                LinearShape(hidden, self.features, "column", self.bias, name=f"{name}.fc1", sections=sections),
                LinearShape(self.ffn_size, hidden, "row", self.bias, name=f"{name}.fc2", sections=(("down", hidden),)),
            ),
            kept=Count(split=(0 if self.activation == "relu" else self.features) + self.activated_gate),
        )
        if self.activation != "xielu":
            return linears
        alpha_p, alpha_n = (
            LayerCost(vectors=Count(whole=1), vectors_name=f"{name}.xielu.{alpha}", vectors_see_parts=True)
            for alpha in ("alpha_p", "alpha_n")
        )
        return alpha_p + alpha_n + linears

    def more_kept(self, size: ActivationBytes, *, fused: bool, learns: bool) -> float:
        """Bytes that a GPU keeps more than the cost row says, with fused operators or without."""
        return -size.feature * self.activated_gate if fused else 0.0

    def again(self, run: AttentionRun) -> float:
        """Bytes of what is kept besides the input, and comes back if the MLP is computed again."""
        features = 0 if self.activation == "relu" else self.features
        return run.size.feature * (features + self.activated(fused=run.fused))

    def activated(self, *, fused: bool) -> int:
        """Features of the activation that are kept."""
        return self.ffn_size + (0 if fused else self.activated_gate)

    def transients(self, size: ActivationBytes) -> float:
        """Bytes that the backward needs besides what was kept: gradients of outputs, inputs and weights."""
        gathered, reduced = (size.hidden, size.residual) if size.gathers else (0.0, 0.0)
        matrix, activated = size.gradient.dense * size.hidden_size / size.tp, size.feature * self.ffn_size
        down = gathered + activated + matrix * self.ffn_size
        up = size.hidden + gathered + reduced - activated + matrix * self.features
        # xIELU has four tensors in fp32 at a time; the gradient of its output is in the place of that.
        between = activated * 4 * 4 / size.element if self.activation == "xielu" else 0.0
        return size.residual + max(down, between, up)

    def freed(self, size: ActivationBytes) -> float:
        """Bytes of what was kept that are free again once its backward is over."""
        return size.feature * (self.features + self.ffn_size) + 2 * size.residual


@dataclass(frozen=True)
class ExpertsSpec:
    """Mixture of experts in the place of an MLP: E experts, of which a token passes K, and shared ones.

    Each expert is an MLP; with biases the router has one, too. `shared` are experts that every token passes, as one
    MLP; with `shared_gate` their output has a gate.
    """

    kind: ClassVar[Literal["experts"]] = "experts"
    num_experts: int
    num_chosen: int
    expert: MLPSpec
    shared: MLPSpec | None = None
    shared_gate: bool = False
    weighs_input: bool = False
    """The weight of a token's one expert multiplies its input, not its output."""

    def cost(self, model: ModelConfig) -> LayerCost:
        """Router, experts and shared experts; the rows that come back are kept, too.

        A rank has as many rows as its tokens make where the load is even.
        """
        hidden, used, size = model.hidden_size, self.num_chosen, self.expert.ffn_size
        copies, features = self.num_experts, self.expert.features
        gate_up, down, bias = tuple(self.expert.sections.items()), (("down", hidden),), self.expert.bias
        cost = LayerCost(
            linears=(
                LinearShape(
                    *(hidden, self.num_experts, "none", bias),
                    name="mlp.router",
                    bias_name="logit_bias",
                    splits_tokens=True,
                ),
                LinearShape(hidden, features, "column", bias, copies, used, "mlp.experts.gate_up", gate_up),
                LinearShape(size, hidden, "row", bias, copies, used, "mlp.experts.down", down),
            ),
            kept=Count(split=used * (features + self.expert.activated_gate), experts=used * hidden),
        )
        if self.shared is not None:
            cost += self.shared.cost(model, "mlp.shared")
        if self.shared_gate:
            cost += LayerCost(linears=(LinearShape(hidden, 1, "none", name="mlp.shared_gate"),))
        return cost

    def more_kept(self, size: ActivationBytes, *, fused: bool, learns: bool) -> float:
        """Bytes that a GPU keeps more than the cost row says: a router that learns has its tokens in fp32."""
        routed = size.feature / size.element * 4 * size.hidden_size if learns else 0.0
        gate = size.feature * self.num_chosen * self.expert.activated_gate if fused else 0.0
        return routed - size.residual - gate

    def again(self, run: AttentionRun) -> float:
        """Bytes of what is kept besides the input, and comes back if all is computed again."""
        size, rows = run.size, self._of_rows(run)
        if run.device == "cuda":  # the router's tokens in fp32
            rows += size.feature / size.element * 4 * size.hidden_size - size.residual
        return rows if self.shared is None else rows + size.residual + self.shared.again(run)

    def transients(self, size: ActivationBytes) -> float:
        """Bytes that the backward needs besides what was kept: gradients of rows, and of the weights of all experts."""
        rows, activated = self._rows(size), self._features(size) * self.expert.ffn_size
        matrix = size.gradient.grouped * self.num_experts * size.hidden_size / size.grid
        down = rows + activated + matrix * self.expert.ffn_size
        up = rows - activated + matrix * self.expert.features
        # Before both: gradients of rows that came back, and their products with the rows, which weights' gradients sum.
        return size.residual + max(2 * rows, down, up)

    def freed(self, size: ActivationBytes) -> float:
        """Bytes of what was kept that are free again once its backward is over."""
        return 2 * self._rows(size) + self._features(size) * 3 * self.expert.ffn_size

    def padding(self, run: AttentionRun) -> float:
        """Bytes of what is kept of rows more than the cost row says: of those that there is room for."""
        return self._of_rows(run) * (1 - 1 / run.size.rows)

    def left_out_of_rows(self, run: AttentionRun) -> float:
        """Bytes of the activations of rows."""
        return self._features(run.size) * self.expert.activated(fused=run.fused)

    def _of_rows(self, run: AttentionRun) -> float:
        """Bytes of what is kept of rows: inputs and outputs, and what is between."""
        return 2 * self._rows(run.size) + self._features(run.size) * self.expert.features + self.left_out_of_rows(run)

    def _features(self, size: ActivationBytes) -> float:
        """Bytes of a feature of all rows."""
        return size.feature * self.num_chosen * size.rows

    def _rows(self, size: ActivationBytes) -> float:
        """Bytes of the rows of a rank's experts: ranks of etp have those of each other's tokens, too."""
        return size.etp * self._features(size) * size.hidden_size


def attention_kind(model: ModelConfig) -> type[AttentionSpec]:
    """The kind of self-attention that the options of a config describe."""
    return LatentAttentionSpec if model.multi_latent_attention else AttentionSpec


@dataclass(frozen=True)
class LayerSpec:
    """Transformer layer: norm, attention, norm, MLP, with dropout on the output of each sublayer."""

    attention: AttentionSpec
    mlp: MLPSpec | ExpertsSpec

    @classmethod
    def of(
        cls, model: ModelConfig, *, windowed: bool = True, rotary: bool = True, experts: bool = False
    ) -> "LayerSpec":
        """A layer as the options of a config describe it, with window, RoPE and experts or without."""
        return cls(
            attention_kind(model).of(model, windowed=windowed, rotary=rotary),
            _experts(model) if experts else MLPSpec.of(model),
        )

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Every attention of the layer."""
        return (self.attention,)

    def cost(self, model: ModelConfig) -> LayerCost:
        """Rows of both sublayers, and of the norms that the layer has."""
        attention, mlp = self.attention.cost(model), self.mlp.cost(model)

        def norm(name: str, *, shares_input: bool = False) -> LayerCost:
            return LayerCost(norms=(replace(_norm_shape(model, name), shares_input=shares_input),))

        match model.placement:
            case "output":
                return attention + norm("attention_output_norm") + mlp + norm("mlp_output_norm")
            case "sandwich":
                attention = norm("attention_norm") + attention + norm("attention_output_norm")
                return attention + norm("mlp_norm") + mlp + norm("mlp_output_norm")
            case "parallel":  # the input of two linear layers is kept once
                once = LayerCost(kept=Count(whole=-model.hidden_size))
                return norm("attention_norm") + attention + mlp + once
            case "parallel_norms":
                return norm("attention_norm") + attention + norm("mlp_norm", shares_input=True) + mlp
        return norm("attention_norm") + attention + norm("mlp_norm") + mlp

    def more_kept(self, run: AttentionRun, *, learns: bool) -> float:
        """Bytes that a GPU keeps more than the cost row says."""
        return self.mlp.more_kept(run.size, fused=run.kernels, learns=learns) + sum(
            each.more_kept(run) for each in self.attentions
        )

    # Parts that are computed again (--recompute-modules)

    def computes_again(self, linear: str, modules: frozenset[RecomputeModule]) -> bool:
        """Whether the linear layer of this name in the layer is computed again with its part."""
        if linear in ("attention.q", "attention.q_up", "attention.kv_up"):
            return "mla_up_proj" in modules
        if linear.startswith("mlp.shared.") and "shared_experts" in modules:
            return True
        return linear.startswith("mlp.") and self._whole in modules

    @property
    def _whole(self) -> RecomputeModule:
        """Name of the whole MLP among the parts."""
        return "moe" if self.mlp.kind == "experts" else "mlp"

    def left_out(self, run: AttentionRun, *, learns: bool, shares_norm: bool = False) -> float:
        """Bytes that are not kept, as they are computed again. Of a frozen layer those that no adapter may keep.

        `shares_norm`: attention and MLP read the output of one norm.
        """
        if not learns:
            return self._left_out_of_mlp(run)
        norm = run.size.residual if shares_norm and "layernorm" in run.recomputed else 0.0
        return self._again_of_attention(run) + self._again_of_mlp(run) - norm

    def _again_of_attention(self, run: AttentionRun) -> float:
        """Bytes that come back for the backward of attention."""
        projected = sum(each.projected(run) for each in self.attentions) if "mla_up_proj" in run.recomputed else 0.0
        return projected + (len(self.attentions) * run.size.residual if "layernorm" in run.recomputed else 0.0)

    def _again_of_mlp(self, run: AttentionRun) -> float:
        """Bytes that come back for the backward of the MLP. A router in half precision keeps its tokens in fp32."""
        of_norm, is_read = 0.0, self.mlp.kind == "dense" or self.mlp.shared is not None or self._whole in run.recomputed
        if "layernorm" in run.recomputed and (is_read or run.size.element == 4):
            of_norm = run.size.residual
        return of_norm + self._left_out_of_mlp(run)

    def _left_out_of_mlp(self, run: AttentionRun) -> float:
        parts, mlp = run.recomputed, self.mlp
        if self._whole in parts:
            return mlp.again(run)
        if mlp.kind == "dense":
            return 0.0
        left_out = 0.0
        if "moe_act" in parts:
            left_out += mlp.left_out_of_rows(run)
        if "shared_experts" in parts and mlp.shared is not None:
            left_out += mlp.shared.again(run)
        return left_out

    def transients(self, run: AttentionRun) -> float:
        """Bytes that the backward needs besides what was kept: that of the MLP, or then that of attention."""
        again = self._again_of_mlp(run)
        attention = max(each.transients(run) for each in self.attentions) + self._again_of_attention(run)
        return max(self.mlp.transients(run.size) + again, attention + again - self.mlp.freed(run.size))


@dataclass(frozen=True)
class SideSpec(LayerSpec):
    """Layer of an encoder or a decoder, of the part `share` of the rows: that of a decoder with cross attention.

    Experts of one side are refused (config/rules).
    """

    attention: BiasedAttentionSpec
    mlp: MLPSpec
    share: Fraction | int = 1
    cross: BiasedAttentionSpec | None = None
    ends_encoder: bool = False
    """Whether a norm follows, which is the last of the encoder."""

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Self-attention, and cross attention of a decoder."""
        return (self.attention,) if self.cross is None else (self.attention, self.cross)

    def cost(self, model: ModelConfig) -> LayerCost:
        """Rows of all sublayers with their norms, of the tokens of this side."""

        def norm(name: str) -> LayerCost:
            return LayerCost(norms=(replace(_norm_shape(model, name), share=self.share),))

        mlp = self.mlp.cost(model)
        own = tuple(replace(linear, share=self.share) for linear in mlp.linears)
        cost = norm("attention_norm") + self.attention.cost(model)
        if self.cross is not None:
            cost += norm("cross_attention_norm") + self.cross.cost(model)
        cost += norm("mlp_norm") + replace(mlp, linears=own, kept=Count(split=int(mlp.kept.split * self.share)))
        return cost + norm("final_norm") if self.ends_encoder else cost

    def more_kept(self, run: AttentionRun, *, learns: bool) -> float:
        """As of any layer, of the tokens of this side; the rows of the other side stay in one tensor with them."""
        mlp = self.mlp.more_kept(self._of_side(run.size), fused=run.kernels, learns=learns)
        return mlp + sum(each.more_kept(run) for each in self.attentions)

    def transients(self, run: AttentionRun) -> float:
        """As of any layer, of the tokens of this side, and the gradient of all rows."""
        size = self._of_side(run.size)
        attention = max(each.transients(run) for each in self.attentions)
        again, of_attention = self._again_of_mlp(run), self._again_of_attention(run)
        mlp = self.mlp.transients(size) + again
        return run.size.residual + max(mlp, attention + of_attention + again - self.mlp.freed(size))

    def _again_of_attention(self, run: AttentionRun) -> float:
        return super()._again_of_attention(replace(run, size=self._of_side(run.size)))

    def _left_out_of_mlp(self, run: AttentionRun) -> float:
        return super()._left_out_of_mlp(replace(run, size=self._of_side(run.size)))

    def _of_side(self, size: ActivationBytes) -> ActivationBytes:
        """Bytes of activations of this side's tokens."""
        names = ("feature", "hidden", "residual")
        return size._replace(**{name: getattr(size, name) * float(self.share) for name in names})


def _norm_shape(model: ModelConfig, name: str) -> NormShape:
    return NormShape(
        model.normalization,
        model.hidden_size,
        one_plus=model.apply_layernorm_1p,
        name=name,
        learned=model.norm_parameters,
    )


def _experts(model: ModelConfig) -> ExpertsSpec:
    assert model.num_experts is not None
    shared = model.moe_shared_expert_intermediate_size
    return ExpertsSpec(
        model.num_experts,
        model.moe_router_topk,
        MLPSpec.of(model, model.expert_ffn_size, bias=model.moe_add_bias_linear),
        shared=None if shared is None else MLPSpec.of(model, shared, bias=False),
        shared_gate=model.moe_shared_expert_gate,
        weighs_input=model.moe_apply_probs_on_input,
    )


@dataclass(frozen=True)
class MixedModelConfig(ModelConfig):
    """Config of a model whose layers are given one by one: a spec for each of num_layers.

    The options of the config that describe a layer (heads, window, biases, size and activation of the MLP) are idle;
    but rotary positions turn heads of its head size.
    """

    layers: tuple[LayerSpec, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.layers) == self.num_layers, f"{len(self.layers)} specs for num_layers={self.num_layers}"


def transformer_layers(model: ModelConfig) -> Sequence[LayerSpec]:
    """Layers of --block transformer, as the options of the config say.

    The options give all layers one spec, except for window, RoPE and experts, which patterns leave out of some layers.
    """
    kinds = list(zip(model.windowed_layers, model.rotated_layers, model.expert_layers, strict=True))
    specs = {kind: LayerSpec.of(model, windowed=kind[0], rotary=kind[1], experts=kind[2]) for kind in set(kinds)}
    return tuple(specs[kind] for kind in kinds)


def t5_layers(model: ModelConfig) -> Sequence[SideSpec]:
    """Layers of a T5: those of the encoder, of which the last one ends in a norm, then those of the decoder."""
    assert model.encoder_num_layers is not None
    number, encoder = model.encoder_num_layers, model.encoder_share
    decoder, mlp = 1 - encoder, MLPSpec.of(model)
    seen = BiasedAttentionSpec.of_side(model, queries=encoder, keys=encoder, causal=False)
    own = BiasedAttentionSpec.of_side(model, queries=decoder, keys=decoder, causal=True)
    cross = BiasedAttentionSpec.of_side(model, queries=decoder, keys=encoder, causal=False, crosses=True)
    return (
        *[SideSpec(seen, mlp, share=encoder)] * (number - 1),
        SideSpec(seen, mlp, share=encoder, ends_encoder=True),
        *[SideSpec(own, mlp, share=decoder, cross=cross)] * (model.num_layers - number),
    )


LAYERS: dict[str, Callable[..., Sequence[LayerSpec]]] = {"transformer": transformer_layers, "t5": t5_layers}
"""Specs of all layers of a model, by --block. Keyword arguments are the options of the name in `BLOCK_NAMES`."""


@dataclass(frozen=True)
class PredictionSpec(LayerSpec):
    """Layer of multi-token prediction: norms of an embedding and of a hidden state, 2 D -> D, a layer, a norm."""

    @classmethod
    def after(cls, last: LayerSpec) -> "PredictionSpec":
        """One whose layer is as the last of the model."""
        return cls(last.attention, last.mlp)

    def cost(self, model: ModelConfig) -> LayerCost:
        """Rows of the layer, and of what is before and after it."""
        hidden = model.hidden_size
        before = LayerCost(
            linears=(LinearShape(2 * hidden, hidden, "none", name="projection", sections=(("projection", hidden),)),),
            norms=(
                _norm_shape(model, "embedding_norm"),
                replace(_norm_shape(model, "hidden_norm"), shares_input=True),  # with the output layer
            ),
        )
        return super().cost(model) + before + LayerCost(norms=(_norm_shape(model, "final_norm"),))


def layer_specs(model: ModelConfig) -> Sequence[LayerSpec]:
    """Every layer of a model, first layer first, and at last those of multi-token prediction."""
    specs = main_layer_specs(model)
    return (*specs, *[PredictionSpec.after(specs[-1])] * model.num_depths)


def main_layer_specs(model: ModelConfig) -> Sequence[LayerSpec]:
    """The layers whose output is the model's: those that are given, or those of its kind of block."""
    if isinstance(model, MixedModelConfig):
        return model.layers
    specs = LAYERS[model.layer_table](model, **options_of(BLOCK_NAMES, model.block, model.block_args))
    if len(specs) != model.num_layers:
        raise UserError(
            f"block={model.block} gives {len(specs)} specs for num_layers={model.num_layers}; correct its `layers`"
        )
    return specs
