"""What layouts cut and keep, drawn from the arithmetic of the package: python docs/pictures/draw_layouts.py"""

import sys
from collections.abc import Callable
from pathlib import Path

PICTURES = Path(__file__).parent
sys.path += [str(PICTURES), str(PICTURES.parents[1])]

from svg import Drawing  # noqa: E402

from megatronish.core.layout import ExpertLayout, Layout  # noqa: E402

LAYERS = 8
PARTS = ("weights", "gradients", "masters and moments")
BYTES = {"weights": 2, "gradients": 4, "masters and moments": 12}
"""Bytes a parameter in 16 bits with AdamW: docs/SHARDING.md."""
KEPT = {0: "18", 1: "6 + 12/N", 2: "2 + 16/N", 3: "16/N"}


def ranks() -> Drawing:
    """What dp, tp and pp cut: a model in one process, and on eight ranks."""
    layout = Layout(pp=2, dp=2, tp=2)
    drawing = Drawing(760, 390, "what data, tensor and pipeline parallelism cut, on eight ranks")
    drawing.words(30, 30, "one process", size=14).words(30, 48, "has all layers and all samples", kind="soft")
    for layer in range(LAYERS):
        drawing.box(30, 66 + 24 * layer + 12 * (layer >= LAYERS // 2), 150, 20, "whole", f"layer {layer}")
    drawing.box(30, 300, 150, 18, "whole", "samples 0 to 7")
    drawing.arrow((196, 166), (232, 166), kind="line")
    for dp in range(layout.dp):
        left = 252 + 224 * dp
        drawing.words(left, 30, f"dp {dp}", size=14).words(left, 48, "a copy of the model", kind="soft")
        for layer in range(LAYERS):
            pp = layer // (LAYERS // layout.pp)
            for tp in range(layout.tp):
                top = 66 + 24 * layer + 12 * pp
                drawing.box(left + 92 * tp, top, 88, 20, f"h{layout.rank(pp=pp, dp=0, tp=tp) % 2 + 2 * pp}")
        for pp in range(layout.pp):
            for tp in range(layout.tp):
                rank = layout.rank(pp=pp, dp=dp, tp=tp)
                drawing.box(left + 92 * tp + 14, 102 + 108 * pp, 60, 22, "card")
                drawing.words(left + 92 * tp + 44, 117 + 108 * pp, f"rank {rank}", size=13, anchor="middle")
        half = 4 * dp
        drawing.box(left, 300, 180, 18, "whole", f"samples {half} to {half + 3}")
        for tp in range(layout.tp):
            drawing.brace((left + 92 * tp, 275), (left + 92 * tp + 88, 275), 5)
            drawing.words(left + 92 * tp + 44, 293, f"tp {tp}", kind="soft", size=11, anchor="middle")
    for pp in range(layout.pp):
        middle = 113 + 108 * pp
        drawing.brace((664, middle - 47), (664, middle + 45), 6).words(678, middle + 4, f"pp {pp}", size=14)
    drawing.words(30, 344, "dp 2: two copies, each with half of the samples; their gradients are summed.")
    drawing.words(30, 361, "tp 2: each layer is cut into halves. pp 2: the layers are cut into two stages.")
    return drawing.words(30, 378, "cp, not drawn, cuts the tokens of each sample. Same colour: same part of the model.")


ATTENTION = ("q k v", "heads", "out")
MLP = ("up", "act", "down")
LANES = ("rank 0", "rank 1")


def block() -> Drawing:
    """One transformer block on two ranks: tp, and tp with sequence parallelism, with their collectives."""
    drawing = Drawing(760, 396, "one transformer block on two tensor-parallel ranks, and what is sent")
    drawing.words(16, 26, "tp 2: the residual stream is whole on both ranks", size=14)
    _block(drawing, 40, before="", after="all-reduce", kept="whole")
    drawing.words(16, 200, "tp 2 with --sequence-parallel: each rank has half of the positions", size=14)
    _block(drawing, 214, before="all-gather", after="reduce-scatter", kept="positions")
    drawing.words(
        16, 360, "Grey: the same on both ranks, or half of the positions. Colour: heads or columns of one rank."
    )
    return drawing.words(
        16,
        380,
        "An all-reduce sends as much as a reduce-scatter and an all-gather; the backward has the same, reversed.",
    )


def _block(drawing: Drawing, top: float, *, before: str, after: str, kept: str) -> None:
    """A row of the block: its parts from left to right, a lane for each rank, and collectives across both."""
    left, wide, lane = 62.0, 48, 62
    for rank, name in enumerate(LANES):
        drawing.words(16, top + lane * rank + 32, name, size=11)
    for parts in (ATTENTION, MLP):
        for label in ("input" if parts is ATTENTION else "+", "norm", before, *parts, after):
            if label in (before, after):
                left = _collective(drawing, left, top, label)
                continue
            for rank in range(len(LANES)):
                y = top + lane * rank
                if label in parts:
                    drawing.box(left, y, wide, 54, f"h{rank}", label)
                elif kept == "whole":
                    drawing.box(left, y, wide, 54, "whole", label)
                else:
                    drawing.box(left, y, wide, 54, "ghost").box(left, y + 27 * rank, wide, 27, "whole", label)
            left += wide + 4
    for rank in range(len(LANES)):
        y = top + lane * rank
        if kept == "whole":
            drawing.box(left, y, wide, 54, "whole", "+")
        else:
            drawing.box(left, y, wide, 54, "ghost").box(left, y + 27 * rank, wide, 27, "whole", "+")


def _collective(drawing: Drawing, left: float, top: float, name: str) -> float:
    """A collective over both lanes; where the next part begins."""
    if not name:
        return left
    drawing.box(left + 1, top, 18, 116, "sent").words(
        left + 14, top + 58, name, kind="sent-text", size=11, anchor="middle", turn=-90
    )
    return left + 24


def ring() -> Drawing:
    """Context parallelism over four ranks: which chunks each holds, and the way of keys and values."""
    size, cell = 4, 26
    drawing = Drawing(760, 300, "the ring of context parallelism over four ranks")
    drawing.words(24, 28, "a sequence in 8 chunks; a rank holds one of the front and its mirror image", size=13)
    places = [(24, 60), (24, 178), (236, 178), (236, 60)]
    for rank, (left, top) in enumerate(places):
        drawing.words(left, top - 6, f"cp rank {rank}", size=13)
        for chunk in range(2 * size):
            is_own = chunk in (rank, 2 * size - 1 - rank)
            kind = f"h{rank}" if is_own else "ghost"
            drawing.box(left + 22 * chunk, top, 20, cell, kind, str(chunk) if is_own else "")
        drawing.words(left, top + cell + 15, "its queries stay", kind="soft", size=11)
    drawing.arrow((56, 108), (56, 158)).arrow((204, 191), (231, 191))
    drawing.arrow((320, 158), (320, 108)).arrow((231, 73), (204, 73))
    drawing.words(64, 137, "keys, values", kind="sent-text").words(328, 137, "keys, values", kind="sent-text")
    drawing.words(24, 256, "Each block of keys and values visits every rank; while a rank computes with one,", size=12)
    drawing.words(
        24, 272, "the next one arrives. Partial results are merged by their log-sum-exp, in any order.", size=12
    )
    drawing.words(24, 288, "With the mirror image every rank has as much work under a causal mask.", size=12)
    drawing.words(486, 60, "whose block a rank has", size=13)
    for step in range(size):
        drawing.words(548 + 46 * step, 80, f"step {step}", kind="soft", anchor="middle", size=11)
    for rank in range(size):
        drawing.words(486, 105 + 32 * rank, f"rank {rank}", size=11)
        for step in range(size):
            owner = (rank - step) % size
            drawing.box(528 + 46 * step, 88 + 32 * rank, 40, 26, f"h{owner}", str(owner))
    return drawing


def zero() -> Drawing:
    """What each of four data ranks keeps under ZeRO 0 to 3, to scale."""
    size, scale = 4, 8.0
    drawing = Drawing(760, 340, "what four data ranks keep under each stage of ZeRO")
    drawing.words(20, 28, "what a data rank keeps between two steps, to scale; N = 4 ranks, bf16, AdamW", size=13)
    for number, part in enumerate(PARTS):
        drawing.box(250 + 120 * number, 40, 14, 12, f"h{number}")
        drawing.words(270 + 120 * number, 50, part, kind="soft", size=11)
    for stage, formula in KEPT.items():
        top = 68 + 58 * stage
        drawing.words(20, top + 16, f"ZeRO {stage}", size=14)
        drawing.words(20, top + 32, f"{formula} bytes", kind="soft", size=11)
        drawing.words(20, top + 45, "a parameter", kind="soft", size=11)
        for rank in range(size):
            left = 108.0 + 162 * rank
            if stage == 0:
                drawing.words(left, 64, f"rank {rank}", kind="soft", size=11)
            for number, part in enumerate(PARTS):
                width = BYTES[part] * scale
                shared = stage >= 3 - number
                rounded = stage == 3 and part == "weights"
                drawing.box(left, top, width, 40, "ghost" if shared else f"h{number}")
                if shared and not rounded:
                    drawing.box(left, top + 10 * rank, width, 10, f"h{number}")
                left += width + 2
    drawing.words(
        20,
        312,
        "Dashed: kept by the other ranks. Stage 3 keeps no 16-bit weights: they are rounded from the masters when",
    )
    return drawing.words(20, 328, "a layer is gathered. Every stage trains the same model.")


def expert_groups() -> Drawing:
    """Experts and their groups: eight data ranks, ep 4, two copies of each expert."""
    layout, experts, per_rank = Layout(dp=8), ExpertLayout(ep=4), 2
    groups = layout.expert_groups(experts)
    drawing = Drawing(760, 282, "experts of a layer on eight ranks: ep 4 x edp 2")
    drawing.words(24, 28, "8 experts on dp 8: ep 4 x etp 1 x edp 2", size=14)
    columns = {rank: column for group in groups["ep"] for column, rank in enumerate(group)}
    for row, group in enumerate(groups["ep"]):
        top = 56 + 96 * row
        for rank in group:
            left, first = 24 + 132 * columns[rank], per_rank * columns[rank]
            drawing.box(left, top, 116, 60, "whole").words(left + 8, top + 17, f"rank {rank}", size=12)
            for number in range(per_rank):
                label = f"expert {first + number}"
                drawing.box(left + 5 + 54 * number, top + 26, 52, 26, f"h{columns[rank]}")
                drawing.words(left + 31 + 54 * number, top + 43, label, anchor="middle", size=10)
            if columns[rank]:
                drawing.arrow((left - 3, top + 30), (left - 14, top + 30)).arrow(
                    (left - 14, top + 38), (left - 3, top + 38)
                )
        drawing.words(560, top + 24, "ep: all-to-all of tokens", kind="sent-text")
        drawing.words(560, top + 40, f"among ranks {group[0]} to {group[-1]}", kind="soft", size=11)
    for group in groups["edp"]:
        left = 82 + 132 * columns[group[0]]
        drawing.arrow((left, 134), (left, 119), kind="line").arrow((left, 134), (left, 149), kind="line")
    drawing.words(560, 130, "edp: gradients of copies", size=12).words(560, 144, "of an expert are summed", size=12)
    drawing.words(
        24,
        244,
        "Attention, norms and routers are copies on all eight ranks (dp): their gradients are summed over all of them.",
    )
    return drawing.words(
        24, 262, "The ranks of a row hold all experts once; a column holds the same experts, with other samples."
    )


def checkpoints() -> Drawing:
    """A checkpoint between two layouts: rectangles of global tensors under global names."""
    drawing = Drawing(760, 300, "a checkpoint that is saved by one layout and loaded by another")
    before, after = Layout(pp=2, tp=2), Layout(tp=4)
    for left, title, layout in ((24, "saved by", before), (584, "loaded by", after)):
        drawing.words(left, 28, f"{title} tp {layout.tp} x pp {layout.pp}", size=13)
    drawing.words(288, 28, "in the folder: global tensors", size=13)
    for layer in range(4):
        top = 48 + 44 * layer + 8 * (layer // 2)
        for tp in range(before.tp):
            rank = before.rank(pp=layer // 2, tp=tp)
            drawing.box(24 + 78 * tp, top, 74, 34, f"h{rank}", f"rank {rank}")
            drawing.box(288 + 92 * tp, top, 92, 34, f"h{rank}")
        drawing.words(380, top + 21, f"layers.{layer} ... weight", anchor="middle", size=12)
        for tp in range(after.tp):
            drawing.box(584 + 40 * tp, top, 37, 34, f"h{tp}", str(tp))
        drawing.arrow((184, top + 17), (280, top + 17), kind="line").arrow(
            (480, top + 17), (576, top + 17), kind="line"
        )
    drawing.words(196, 44, "each its rectangles", kind="soft", size=10).words(
        488, 44, "each what it needs", kind="soft", size=10
    )
    drawing.words(
        24, 252, "A tensor has one name and its true size, whatever the layout; each rank that wrote has a file, and an"
    )
    drawing.words(
        24, 268, "index names the rectangles in them. A loading rank reads the parts that it needs. Masters and moments"
    )
    return drawing.words(
        24, 284, "are stored in the same way, so a run resumes with any tp, pp, dp, cp and stage of ZeRO."
    )


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "ranks": ranks,
    "block": block,
    "ring": ring,
    "zero": zero,
    "expert_groups": expert_groups,
    "checkpoints": checkpoints,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw().text, encoding="utf-8")
