"""Cases of the theorem: every layout of at most eight ranks, and the features that are dealt to it."""

import itertools
from collections.abc import Sequence, Set
from dataclasses import replace
from math import lcm
from typing import Any, Literal

from pairwise import Choices, Chosen, Pair, cheapened, pairwise, possible_pairs
from problem import CHUNKS, Problem, Spread

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import RecomputeConfig
from megatronish.core.layout import Layout

LAYOUTS = [
    Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    for cp, dp, tp, pp in itertools.product((1, 2, 4), *[range(1, 9)] * 3)
    if dp * tp * pp * cp <= 8
]
RECOMPUTE = {
    "none": RecomputeConfig(),
    "selective": RecomputeConfig("selective"),
    "uniform": RecomputeConfig("full", "uniform", 2, offload_saved_activations=True),
    "block": RecomputeConfig("full", "block", 1),
}


def choices(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """What each feature may be in this layout, facts of the layout among them. None: the layout has nothing of it."""
    return {
        "family": ("gpt2", "llama", "qwen", "bloom", "gpt_oss", "bert", "t5"),
        "tied": (True, False),
        "sequence_parallel": (True, False) if layout.tp > 1 else (None,),
        "dropout": (0.0, 0.1),
        "schedule": tuple(CHUNKS) if layout.pp > 1 else (None,),
        "split": ("even", "uneven", "auto") if layout.pp > 1 else (None,),
        "recompute": tuple(RECOMPUTE),
        "cp_comm_type": ("p2p", "a2a") if layout.cp > 1 else (None,),
        "attention_backend": ("auto", "fused_softmax"),
        "sight": ("all", "window", "fixed", "bigbird"),
        "eod_mask_loss": (True, False),
        "documents": (True, False),
        "micro_batch_size": (1, 2),
        "num_microbatches": (1, 3, 4) if layout.pp in (2, 3) else (1, 3),
        "overlap": (True, False) if layout.dp * layout.cp > 1 else (None,),
        "optimizer": ("sgd", "adam", "muon"),
        "decoupled": (True, False),
        "zero": (0, 1, 2, 3) if layout.dp * layout.cp > 1 else (0, 1),
        "copies": (1, 2) if layout.dp * layout.cp in (4, 6, 8) else (None,),
        "offload": ("none", "optimizer", "parameters"),
        "on_disk": (True, False),
        "dp": (layout.dp > 1,),
        "tp": (layout.tp > 1,),
        "pp": (min(layout.pp, 3),),
        "cp": (layout.cp,),
    }


IN_THE_PRODUCT = ("family", "tied", "sequence_parallel", "dropout", "schedule", "recompute", "cp_comm_type")
# Few layouts have both a long ring, many data ranks or tp, and a pipeline: they are dealt features several times.
CASES = [
    *LAYOUTS,
    *[Layout(pp=2, cp=4)] * 4,
    *[Layout(tp=2, cp=4)] * 2,
    Layout(dp=2, cp=4),
    *[Layout(tp=2, pp=2, cp=2)] * 2,
    *[Layout(tp=2, pp=2)] * 2,
    Layout(pp=3, cp=2),
    *[Layout(dp=4, pp=2)] * 3,
    *[Layout(dp=2, pp=2)] * 3,
    *[Layout(tp=2, pp=2)] * 2,
    Layout(pp=2, cp=4),
]
CHOICES = [choices(layout) for layout in CASES]
ADAPTERS = {
    "lora": AdapterConfig(adapter_type="lora", lora_rank=3, lora_alpha=6.0),
    "ia3": AdapterConfig(adapter_type="ia3", adapter_targets=("q", "k", "v", "o", "down")),
    "qlora": AdapterConfig(adapter_type="lora", lora_rank=3, lora_alpha=6.0, quantize_base="nf4"),
    "int8": AdapterConfig(adapter_type="lora", lora_rank=3, lora_alpha=6.0, quantize_base="int8"),
}


POSITIONS = {"gpt2": "learned_absolute", "bert": "learned_absolute", "bloom": "alibi", "t5": "relative"}


def model_of(layout: Layout, chosen: Chosen) -> ModelConfig:
    """A small model that the layout divides."""
    family = chosen["family"]
    llama, qwen, oss = family in ("llama", "gpt_oss"), family == "qwen", family == "gpt_oss"
    t5 = family == "t5"
    sight = "all" if family in ("bert", "t5") else chosen["sight"]  # it has neither windows nor patterns
    # At least 3; where heads are traded for sequence, tp cp of them, and key/value heads that cp need not divide.
    trades_heads = exchange_of(layout, chosen) == "a2a"
    unit = layout.tp * layout.cp if trades_heads else layout.tp
    heads = kv_heads = -(-3 // unit) * unit
    if llama and trades_heads:
        kv_heads = layout.tp
    elif llama:
        heads = 2 * kv_heads
    positions = layout.pp * CHUNKS[chosen["schedule"] or "1f1b"]
    num_layers = max(positions, 2 if layout.pp == 1 else 4) + (chosen["split"] in ("uneven", "auto"))
    return ModelConfig(
        model_type=family if family in ("bert", "t5") else "gpt",  # type: ignore[arg-type]
        encoder_num_layers=num_layers // 2 if t5 else None,
        decoder_num_layers=num_layers - num_layers // 2 if t5 else None,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=6,
        bert_no_binary_head=family == "bert" and chosen["eod_mask_loss"],
        num_layers=num_layers,
        hidden_size=20 if qwen else 4 * heads,
        num_attention_heads=heads,
        kv_channels=6 if qwen else None,
        ffn_hidden_size=5 * heads,
        group_query_attention=llama,
        num_query_groups=kv_heads if llama else None,
        position_embedding_type=POSITIONS.get(family, "rope"),  # type: ignore[arg-type]
        normalization="RMSNorm" if llama or qwen or t5 else "LayerNorm",
        swiglu=family == "llama" or qwen,
        quick_geglu=oss,
        geglu=t5 and not chosen["tied"],
        relu=t5 and chosen["tied"],
        glu_linear_offset=1.0 if oss else 0.0,
        activation_func_clamp_value=0.3 if oss and chosen.get("clamped", True) else None,
        embed_layernorm=family == "bloom",
        softmax_type={"gpt_oss": "learnable", "bloom": "off-by-one"}.get(family, "vanilla"),  # type: ignore[arg-type]
        disable_bias_linear=family == "llama" or qwen or t5,
        add_qkv_bias=qwen,
        add_attention_bias=family == "llama" and chosen["tied"],
        add_mlp_bias=family == "llama" and not chosen["tied"] and chosen["eod_mask_loss"],
        qk_layernorm=qwen,
        window_size=5 if sight == "window" else None,
        window_attn_skip_freq="2" if oss and sight != "all" else None,
        attention_pattern=sight if sight in ("fixed", "bigbird") else "none",
        attention_block_size=2,
        attention_local_blocks=2 if sight == "fixed" else 1,
        no_rope_freq=str([1] + [0] * (num_layers - 1)) if oss else None,
        untie_embeddings_and_output_weights=not chosen["tied"],
        attention_dropout=chosen["dropout"],
        hidden_dropout=chosen["dropout"],
        init_method_std=0.2,  # attention that is far from uniform
        make_vocab_size_divisible_by=4,
    )


def exchange_of(layout: Layout, chosen: Chosen) -> Literal["p2p", "a2a"]:
    """How attention reaches the rest of a sequence: scores with a learned bias go round no ring."""
    return "a2a" if layout.cp > 1 and chosen["family"] == "t5" else chosen["cp_comm_type"] or "p2p"


def num_microbatches_of(layout: Layout, chosen: Chosen) -> int:
    """Of a step. Where 4 is dealt, a multiple of two or three stages is meant, or one more than three.

    With two stages the least multiple is as good: more than stages are the 3 that are dealt, too. Chunks that are
    interleaved take micro-batches in groups of the stages, and 4 are two whole groups.
    """
    number: int = chosen["num_microbatches"]
    return 2 if number == 4 and layout.pp == 2 and chosen["schedule"] != "interleaved" else number


def problem_of(layout: Layout, chosen: Chosen) -> Problem:
    cut = lcm(2 * layout.cp, layout.cp * layout.tp) if layout.cp > 1 else layout.tp
    unit = 3 * cut if chosen["family"] == "t5" else cut  # each of its sides is cut
    return Problem(
        model=model_of(layout, chosen),
        seq_length=-(-12 // unit) * unit,
        global_batch_size=layout.dp * chosen["micro_batch_size"] * num_microbatches_of(layout, chosen),
        eod_mask_loss=chosen["eod_mask_loss"],
        documents=chosen["documents"],
        optimizer=chosen["optimizer"],
        decoupled=chosen["decoupled"],
    )


def adapted_problem_of(layout: Layout, chosen: Chosen) -> Problem:
    """The same with adapters, which alone learn; a quantised base has whole blocks of 64 inputs on every rank."""
    problem, adapter = problem_of(layout, chosen), ADAPTERS[chosen["adapter"]]
    if adapter.adapter_type == "lora":
        adapter = replace(adapter, lora_dropout=chosen["dropout"])
    model = problem.model
    if adapter.quantize_base is not None:
        std = 0.05 if model.has_encoder else 0.1  # a T5 does not scale its scores: larger ones choose one key alone
        model = replace(model, hidden_size=64, kv_channels=64, ffn_hidden_size=64 * layout.tp, init_method_std=std)
    return replace(problem, model=model, adapter=adapter)


def offload_of(zero: int, asked: str) -> str:
    """What of it the stage can have."""
    if zero == 0:
        return "none"
    return "optimizer" if zero < 3 and asked == "parameters" else asked


def spread_of(layout: Layout, chosen: Chosen) -> Spread:
    splits = chosen["schedule"] in ("zb-h1", "zb-v")  # which stages 2 and 3 cannot have
    zero = min(chosen["zero"], 1) if splits else chosen["zero"]
    is_ring = layout.cp > 1 and exchange_of(layout, chosen) == "p2p"  # which has no choice of backends
    shares = chosen["recompute"] == "uniform" and layout.tp > 1 and not chosen["sequence_parallel"]
    return Spread(
        layout=layout,
        micro_batch_size=chosen["micro_batch_size"],
        sequence_parallel=bool(chosen["sequence_parallel"]),
        # No feature of its own, which would need more cases: it follows one that says nothing of layers.
        by_pieces=bool(chosen["sequence_parallel"]) and chosen["eod_mask_loss"],
        schedule=chosen["schedule"] or "1f1b",
        num_chunks=CHUNKS["interleaved"] if chosen["schedule"] == "interleaved" else None,
        split=chosen["split"] or "even",
        cp_comm_type=exchange_of(layout, chosen),
        attention_backend="auto" if is_ring else chosen["attention_backend"],
        recompute=replace(RECOMPUTE[chosen["recompute"]], distribute_saved_activations=shares),
        overlap=chosen["overlap"] is not False,
        zero=zero,
        copies=chosen["copies"] or 1 if zero else 1,
        offload=offload_of(zero, chosen["offload"]),
        on_disk=chosen["on_disk"] and offload_of(zero, chosen["offload"]) != "none",
    )


AGAIN = {"none": 1.0, "selective": 1.3, "block": 1.7, "uniform": 2.0}
"""Work of a layer with recomputation, relative to one without."""


def cost_of(layout: Layout, chosen: Chosen) -> float:
    """About what a case takes: what each rank does once, and its layers of all micro-batches."""
    layers = model_of(layout, chosen).num_layers / layout.pp * num_microbatches_of(layout, chosen)
    return layout.world_size * (5.0 + layers * AGAIN[chosen["recompute"]] * (1.3 if chosen["zero"] == 3 else 1.0))


COSTLY = ("num_microbatches", "recompute", "split")
"""Features that say what a case takes, and take nothing from what another one means, as schedule and ZeRO do."""


def deal(
    layouts: Sequence[Layout], cases: Sequence[Choices], *, seed: int, wanted: Set[Pair] | None = None
) -> list[Chosen]:
    """One way to fill the case of each layout; together they cover `wanted`.

    Of the features that are wanted with others, none takes more than that needs.
    """
    wanted = possible_pairs(cases) if wanted is None else wanted
    in_pairs = {name for pair in wanted for name, _ in pair}

    def cost(number: int, chosen: Chosen) -> float:
        return cost_of(layouts[number], chosen)

    filled = pairwise(cases, seed=seed, wanted=wanted)
    features = [name for name in COSTLY if name in in_pairs]
    return cheapened(cases, filled, cost=cost, features=features, wanted=wanted)


def fewest_adapted(dealt: Sequence[Chosen]) -> dict[int, str]:
    """Kinds of adapters of few and cheap cases, by their numbers, in which each kind meets every feature."""
    pairs = {
        (number, kind): {frozenset({("adapter", kind), item}) for item in chosen.items()}
        for number, chosen in enumerate(dealt)
        for kind in ADAPTERS
    }
    costs = [cost_of(*case) ** 0.5 for case in zip(CASES, dealt, strict=True)]
    missing, found = set[Pair]().union(*pairs.values()), dict[int, str]()
    while missing:
        able = (case for case in pairs if case[0] not in found)
        number, kind = max(able, key=lambda case: len(pairs[case] & missing) / costs[case[0]])
        found[number] = kind
        missing -= pairs[number, kind]
    for number in sorted(found, key=lambda number: -costs[number]):
        others = set[Pair]().union(*(pairs[case] for case in found.items() if case[0] != number))
        if pairs[number, found[number]] <= others:
            del found[number]
    return found


WITHOUT_ADAPTERS = deal(CASES, CHOICES, seed=0)
ADAPTED = fewest_adapted(WITHOUT_ADAPTERS)
"""Cases whose adapters are trained in the usual run; `pytest --all-layouts` trains those of all.

They are trained after the model, on the same ranks, so that all weights learn in every case, too.
"""
KINDS = itertools.cycle(ADAPTERS)
DEALT = [chosen | {"adapter": ADAPTED.get(n) or next(KINDS)} for n, chosen in enumerate(WITHOUT_ADAPTERS)]


def pairs_of_adapters(pairs: Set[Pair]) -> set[Pair]:
    """Those that are a kind of adapter and a value of another feature."""
    return {pair for pair in pairs if any(name == "adapter" for name, _ in pair)}


def all_cases() -> list[tuple[Layout, Chosen]]:
    """Every layout with the product of its main features; the others as they were dealt to the layout."""
    return [
        (layout, dealt | dict(zip(IN_THE_PRODUCT, values, strict=True)))
        for layout, dealt, of_layout in zip(CASES, DEALT, CHOICES, strict=True)
        for values in itertools.product(*(of_layout[feature] for feature in IN_THE_PRODUCT))
    ]


def name_of(layout: Layout, chosen: Chosen) -> str:
    said: dict[str, dict[Any, str]] = {
        "tied": {True: "tied", False: "untied"},
        "sequence_parallel": {True: "sp", False: "", None: ""},
        "dropout": {0.1: "dropout", 0.0: ""},
        "eod_mask_loss": {True: "masked", False: ""},
        "documents": {True: "documents", False: ""},
        "overlap": {True: "", False: "no_overlap", None: ""},
        "decoupled": {True: "decoupled", False: ""},
        "sight": {"all": "", "window": "window", "fixed": "fixed", "bigbird": "bigbird"},
    }
    words = [chosen["family"], chosen.get("adapter", ""), *(said[feature][chosen[feature]] for feature in said)]
    words += [chosen["optimizer"]]
    words += [f"recompute_{chosen['recompute']}"] if chosen["recompute"] != "none" else []
    if layout.cp > 1:
        words.append(chosen["cp_comm_type"])
    words += [chosen["attention_backend"]] if spread_of(layout, chosen).attention_backend != "auto" else []
    if chosen["zero"]:
        words.append(f"zero{chosen['zero']}x{chosen['copies']}")
        where = "_on_disk" if chosen["on_disk"] else ""
        words += [f"offload_{chosen['offload']}{where}"] if chosen["offload"] != "none" else []
    if layout.pp > 1:
        words += [chosen["schedule"], chosen["split"]]
    sizes = f"{num_microbatches_of(layout, chosen)}x{chosen['micro_batch_size']}"
    return f"dp{layout.dp}_tp{layout.tp}_pp{layout.pp}_cp{layout.cp}-{'-'.join(filter(None, words))}-{sizes}"
