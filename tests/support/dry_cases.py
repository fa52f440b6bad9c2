"""Cases of dry runs: features of a training run dealt pairwise, each as the command line of a middling model."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from pairwise import Chosen, one_of_each, pairwise

from megatronish.core.layout import Layout

LAYOUTS = [
    Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    for dp, tp, pp, cp in product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2))
    if 2 <= dp * tp * pp * cp <= 16
]
MODELS = {
    "gpt": "--hidden-dropout 0 --attention-dropout 0 --ffn-hidden-size 4096 --normalization LayerNorm",
    "dropped": "--hidden-dropout 0.1 --attention-dropout 0.1 --ffn-hidden-size 4096 --seq-length 512",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4 --ffn-hidden-size 2816 "
    "--hidden-dropout 0 --attention-dropout 0",
    "experts": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --ffn-hidden-size 1024 --num-experts 8 --moe-router-topk 2 "
    "--hidden-dropout 0 --attention-dropout 0",
}
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
}
STATES = {
    "adam": "",
    "muon": "--optimizer muon",
    "offloaded": "--optimizer-cpu-offload",
    "lora": "--load never-read --adapter-type lora",
    "padded": "--hidden-size 1040 --kv-channels 64",
}
"""What learns, and where its states are; the last one needs padding in every bucket."""
CHUNKS = {"interleaved": 2, "zb-v": 2}
SEED = 4
KERNELS = {"assumed": True, "0": False}
"""Values of MEGATRONISH_KERNELS, each of which needs a process of its own."""


def choices(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """What each feature may be in this layout."""
    data = layout.dp * layout.cp
    return {
        "model": tuple(MODELS),
        "sequence_parallel": (True, False) if layout.tp > 1 else (None,),
        "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v") if layout.pp > 1 else (None,),
        "stage": ("first", "last") if layout.pp > 1 else (None,),
        "cp_comm_type": ("p2p", "a2a") if layout.cp > 1 else (None,),
        "zero": (0, 1, 2, 3) if data > 1 else (0, 1),
        "expert": ("ep", "etp") if layout.tp * data > 1 else (None,),
        "recompute": tuple(RECOMPUTE),
        "precision": ("--bf16", "--fp16", "fp32"),
        "state": tuple(STATES),
        "copies": (1, 2) if data > 1 else (1,),
        "kernels": tuple(KERNELS),
        "micro_batch_size": (1, 2),
        "num_microbatches": (max(2, layout.pp), 2 * layout.pp),
        "tp": (layout.tp,),
        "pp": (layout.pp,),
    }


class Case(NamedTuple):
    """A layout, and what each feature is in it."""

    layout: Layout
    chosen: Chosen

    @property
    def name(self) -> str:
        """The features in one word."""
        words = [f"{name}={value}" for name, value in self.chosen.items() if value is not None and name not in "tp pp"]
        return f"{self.layout}: {' '.join(words)}"

    @property
    def rank(self) -> int:
        """The rank that is run: of the first or the last stage, not the first of any axis."""
        layout = self.layout
        stage = layout.pp - 1 if self.chosen["stage"] == "last" else 0
        return layout.rank(pp=stage, dp=layout.dp - 1, cp=layout.cp - 1, tp=layout.tp - 1)

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts on a stage."""
        return 2 * CHUNKS.get(self.chosen["schedule"] or "", 1) if self.chosen["model"] == "experts" else 0

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        found: int = self.chosen["num_microbatches"]
        return found

    @property
    def waits(self) -> dict[str, int]:
        """Waits of the host in a step, by file: for sums, for rows of experts, and for gradients that it steps by."""
        of_experts = self.num_expert_layers * self.num_microbatches
        found = {
            "engine/results.py": 1,
            "layers/dispatch.py": of_experts if self.ep > 1 else 0,
            "ops/grouped_mm.py": of_experts if self.ep == 1 and self.chosen["precision"] == "fp32" else 0,
            "parallel/data_parallel/zero.py": int(self.chosen["state"] == "offloaded" and self.zero > 0),
        }
        return {file: number for file, number in found.items() if number}

    @property
    def ep(self) -> int:
        """Ranks that hold different experts."""
        layout = self.layout
        return min(8, layout.dp * layout.cp * layout.tp // self.copies) if self.chosen["expert"] == "ep" else 1

    @property
    def kernels(self) -> str:
        """Value of MEGATRONISH_KERNELS."""
        found: str = self.chosen["kernels"]
        return found

    @property
    def zero(self) -> int:
        """Stage of ZeRO: schedules that defer weight gradients have none beyond 1."""
        found: int = self.chosen["zero"]
        return min(found, 1) if self.chosen["schedule"] in ("zb-h1", "zb-v") else found

    @property
    def copies(self) -> int:
        """Groups of ranks that are copies of each other: with ZeRO, and of ZeRO-3 where more than one rank shares."""
        found: int = self.chosen["copies"]
        return found if self.zero and self.layout.dp * self.layout.cp > (found if self.zero == 3 else 1) else 1

    @property
    def argv(self) -> list[str]:
        """Its command line."""
        layout, chosen = self.layout, self.chosen
        schedule = chosen["schedule"]
        zero, state, precision = self.zero, chosen["state"], chosen["precision"]
        words = [
            "--mock-data --vocab-size 32000 --num-attention-heads 16 --seq-length 2048",
            "" if state == "padded" else "--hidden-size 1024",
            f"--num-layers {2 * layout.pp * CHUNKS.get(schedule or '', 1)} --train-iters 10 --lr 1e-3",
            f"--tp {layout.tp} --pp {layout.pp} --cp {layout.cp} --dp {layout.dp} --zero-stage {zero}",
            f"--micro-batch-size {chosen['micro_batch_size']} {'' if precision == 'fp32' else precision}",
            STATES[state] if zero or state != "offloaded" else "",
            f"--dp-replicate {self.copies}",
            f"--global-batch-size {layout.dp * chosen['micro_batch_size'] * chosen['num_microbatches']}",
            MODELS[chosen["model"]],
            RECOMPUTE[chosen["recompute"]],
        ]
        words += ["--sequence-parallel"] if chosen["sequence_parallel"] else []
        words += [f"--pipeline-schedule {schedule}"] if schedule else []
        words += ["--num-virtual-stages-per-pipeline-rank 2"] if schedule == "interleaved" else []
        words += [f"--cp-comm-type {chosen['cp_comm_type']}"] if layout.cp > 1 else []
        if chosen["model"] == "experts" and chosen["expert"] == "ep":
            words.append(f"--ep {self.ep} --etp 1")
        return " ".join(words).split()


def deal(layouts: Sequence[Layout], *, seed: int) -> list[Case]:
    """Cases of these layouts in which every two features that can meet do so, as far as there are enough."""
    dealt = pairwise([choices(layout) for layout in layouts], seed=seed)
    return [Case(layout, chosen) for layout, chosen in zip(layouts, dealt, strict=True)]


CASES = deal(LAYOUTS, seed=SEED)


def cost_of(case: Case) -> float:
    """About how many operators the rank of a case runs."""
    layers = 2 * CHUNKS.get(case.chosen["schedule"] or "", 1)
    passes = 3 if case.chosen["recompute"] in ("uniform", "block") else 2
    return layers * passes * min(case.num_microbatches, case.layout.pp + 1)


FEW = sorted(one_of_each([case.chosen for case in CASES], [cost_of(case) ** 0.7 for case in CASES]))
"""Numbers of the cases that every run of the suite takes: cheap ones, in which every value of every feature occurs."""


class SingleCase(NamedTuple):
    """A feature that is not dealt: flags of a model of two layers, on the last rank of a layout of four by default."""

    name: str
    model: str
    flags: str = ""
    layout: str = "--tp 2 --sequence-parallel --zero-stage 1"
    dp: int = 2
    rank: int = 3
    kernels: str = "assumed"
    num_layers: int = 2
    more_waits: Mapping[str, int] = {}
    precision: str = "--bf16"

    @property
    def argv(self) -> list[str]:
        """Its command line: two micro-batches."""
        sizes = f"--vocab-size 32000 --num-attention-heads 16 --hidden-size 1024 --num-layers {self.num_layers}"
        step = f"--seq-length 2048 --train-iters 10 --lr 1e-3 --micro-batch-size 1 {self.precision}"
        ranks = f"--dp {self.dp} --global-batch-size {2 * self.dp} {self.layout}"
        return f"--mock-data {sizes} {step} {ranks} {MODELS[self.model]} {self.flags}".split()

    @property
    def waits(self) -> dict[str, int]:
        """Waits of the host in a step, by file."""
        number = 2 * self.num_layers if self.model == "experts" else 0
        words = f"{self.layout} {self.flags}"
        reads_counts = "--ep " in words and not any(word in words for word in ("rank-capacity", "pad-expert"))
        adds_biases = "moe-add-bias" in words
        reads_groups = not reads_counts and (adds_biases or not self.precision)
        found = {"layers/dispatch.py": number * reads_counts, "ops/grouped_mm.py": number * reads_groups}
        return {"engine/results.py": 1, **{file: number for file, number in found.items() if number}, **self.more_waits}


ROOMS = "--moe-expert-rank-capacity-factor 1.5"
QWEN3_MOE = (
    "--group-query-attention --num-query-groups 4 --qk-layernorm --kv-channels 32 --hidden-size 256 --seq-length 256 "
    "--num-attention-heads 8 --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 96 --ffn-hidden-size 768 "
    "--moe-router-pre-softmax --moe-router-norm-topk-prob --vocab-size 1000 --num-layers 2"
)
"""The form of Qwen3-30B-A3B; a micro-batch has 64 rows for each expert where the load is even."""
LLAMA4 = (
    "--moe-router-topk 1 --moe-router-score-function sigmoid --moe-apply-probs-on-input --qk-l2-norm --no-rope-freq 2 "
    "--moe-shared-expert-intermediate-size 1024 --attention-pattern fixed --attention-block-size 512 "
    "--attention-local-blocks 1 --attention-global-blocks 0 --window-attn-skip-freq 2 --attn-temperature-scale 0.1"
)
GPT_OSS = (
    "--no-swiglu --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7 --moe-add-bias-linear "
    "--add-attention-bias --softmax-type learnable --window-size 128 --window-attn-skip-freq 2 --moe-router-topk 4 "
    "--group-query-attention --num-query-groups 4 --rope-scaling-type yarn --no-yarn-correction-range-round-to-int"
)
ALIBI = "--position-embedding-type alibi"
SDPA = "--attention-backend flash"
AGAIN = "--recompute-granularity selective --recompute-modules"
SHARED = "--moe-shared-expert-intermediate-size 1024"
BY_HEAD = "--qk-layernorm --qk-layernorm-by-head"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LORA = "--load never-read --adapter-type lora"
CAPS = "--attn-logit-softcapping 50 --final-logit-softcapping 30"
LATENT = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm "
    "--untie-embeddings-and-output-weights --ffn-hidden-size 2816 --multi-latent-attention --q-lora-rank 384 "
    "--kv-lora-rank 256 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
)
"""A small DeepSeek without experts."""
T5 = (
    "--model-type t5 --encoder-num-layers 1 --decoder-num-layers 1 --encoder-seq-length 1536 --decoder-seq-length 512 "
    "--seq-length 2048 --position-embedding-type relative --vocab-extra-ids 100 --mean-span-length 3"
)
SINGLE = [
    SingleCase("a window", "llama", "--window-size 512"),
    SingleCase("documents", "llama", "--reset-attention-mask --reset-position-ids"),
    SingleCase("ALiBi", "gpt", f"{ALIBI} --micro-batch-size 2 --global-batch-size 8"),
    SingleCase("a window by SDPA", "llama", f"--window-size 512 {SDPA}"),
    SingleCase("documents by SDPA", "llama", f"--reset-attention-mask --reset-position-ids {SDPA}"),
    SingleCase(
        "documents by SDPA, recomputed", "gpt", f"--reset-attention-mask --recompute-granularity selective {SDPA}"
    ),
    SingleCase("ALiBi by SDPA", "gpt", f"{ALIBI} {SDPA} --micro-batch-size 2 --global-batch-size 8"),
    SingleCase("a window by SDPA over cp", "llama", f"--window-size 512 {SDPA}", "--cp 2 --cp-comm-type a2a"),
    SingleCase("a window with dropout", "dropped", "--window-size 128"),
    SingleCase("qk-norm across heads", "llama", "--qk-layernorm --qk-layernorm-across-heads"),
    SingleCase("shared heads, recomputed", "llama", f"--num-query-groups 1 {FULL}", "--tp 4 --zero-stage 1", 1),
    SingleCase("by pieces", "llama", "--tp-comm-overlap", "--tp 4 --sequence-parallel --zero-stage 1", 1),
    SingleCase("by pieces, with LoRA", "llama", f"--tp-comm-overlap {LORA}"),
    SingleCase(
        "by pieces in stages",
        "gpt",
        "--tp-comm-overlap --pipeline-schedule zb-h1",
        "--tp 2 --pp 2 --sequence-parallel",
        1,
    ),
    SingleCase("by pieces, recomputed", "experts", f"--tp-comm-overlap {SHARED} {FULL} --ep 4 --etp 1"),
    SingleCase("a shared head", "llama", "--num-query-groups 1"),
    SingleCase("a shared head in fp32", "llama", "--num-query-groups 1", precision=""),
    SingleCase("a shared head on a ring", "llama", "--num-query-groups 1", "--tp 2 --cp 2"),
    SingleCase("a shared head, traded", "llama", "--num-query-groups 1", "--tp 2 --cp 2 --cp-comm-type a2a"),
    SingleCase("shared heads with norms", "llama", f"{BY_HEAD} --num-query-groups 2", "--tp 4 --sequence-parallel", 1),
    SingleCase("shared heads with LoRA", "llama", f"{BY_HEAD} --num-query-groups 1 {LORA} --adapter-targets v"),
    SingleCase("qk-norm after RoPE", "llama", "--qk-layernorm --qk-layernorm-after-rope"),
    SingleCase("QK-clip", "llama", "--qk-clip", "--tp 2 --sequence-parallel", more_waits={"engine/qk_clip.py": 1}),
    SingleCase("QK-clip on a ring", "llama", "--qk-clip", "--tp 2 --cp 2", more_waits={"engine/qk_clip.py": 1}),
    SingleCase(
        *("QK-clip with latents", "gpt", f"{LATENT} --qk-clip", "--tp 2 --cp 2"),
        more_waits={"engine/qk_clip.py": 1},
    ),
    SingleCase("soft caps", "llama", CAPS, "--tp 2 --zero-stage 1"),
    SingleCase("soft caps of adapters", "llama", f"{CAPS} --vocab-size 200000 {LORA} {FULL}", "", 1, 0),
    SingleCase("xIELU", "gpt", "--xielu", "--tp 2 --zero-stage 1"),
    SingleCase("wide xIELU", "gpt", "--xielu --ffn-hidden-size 16384 --vocab-size 1000", "--tp 2 --zero-stage 1"),
    SingleCase("4 bits", "llama", "--load never-read --adapter-type lora --quantize-base nf4"),
    SingleCase("8 bits", "llama", "--load never-read --adapter-type lora --quantize-base int8"),
    SingleCase(
        *("4 bits, replayed", "llama", "--load never-read --adapter-type lora --quantize-base nf4 --cuda-graph"),
        *("", 1, 0),
    ),
    SingleCase("capacity", "experts", "--moe-expert-capacity-factor 1.25 --ep 4 --etp 1"),
    SingleCase(
        *("rooms for the capacity", "experts"),
        "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity --ep 4 --etp 1",
    ),
    SingleCase("rooms", "experts", f"{ROOMS} --ep 4 --etp 1"),
    SingleCase("large experts", "experts", "--moe-ffn-hidden-size 4096 --ep 4 --etp 1"),
    SingleCase("rooms over etp, computed again", "experts", f"{ROOMS} {AGAIN} moe_act --ep 2 --etp 2 {SHARED}"),
    SingleCase(
        *("expert bias", "experts"),
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --ep 4 --etp 1",
    ),
    SingleCase("global balance", "experts", "--moe-router-load-balancing-type global_aux_loss --ep 4 --etp 1"),
    SingleCase(
        *("experts offloaded", "experts"),
        "--moe-router-load-balancing-type global_aux_loss --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --ep 4 --etp 1 --optimizer-cpu-offload --dp-replicate 2",
        dp=4,
        more_waits={"parallel/data_parallel/zero.py": 1},
    ),
    SingleCase("Qwen3-30B-A3B, small", "experts", QWEN3_MOE, "", 1, 0, num_layers=2),
    SingleCase("Qwen3-30B-A3B, small, in fp32", "experts", QWEN3_MOE, "", 1, 0, num_layers=2, precision=""),
    SingleCase("SparseMixer", "experts", "--moe-router-score-function sparsemixer --ep 4 --etp 1"),
    SingleCase("Llama 4, small", "experts", LLAMA4, "", 1, 0, num_layers=2),
    SingleCase("Llama 4, small, over tp", "experts", f"{LLAMA4} --etp 2 --ep 2", "--tp 2 --sequence-parallel"),
    SingleCase("gpt-oss, small", "experts", GPT_OSS, "", 1, 0),
    SingleCase("gpt-oss, small, over ep", "experts", f"{GPT_OSS} --ep 4 --etp 1", "--tp 2 --zero-stage 1"),
    SingleCase("gpt-oss, small, over etp", "experts", f"{GPT_OSS} --etp 2 --ep 2 {AGAIN} moe_act core_attn"),
    SingleCase("adapters of gpt-oss", "experts", f"{GPT_OSS} --ep 4 --etp 1 {LORA}"),
    SingleCase("SGD", "llama", "--optimizer sgd"),
    SingleCase(
        "Muon of replicas", "gpt", "--optimizer muon --seq-length 256", "--tp 2", 4, 7, precision="", num_layers=1
    ),
    SingleCase("copies of ranks with fewer rows", "llama", "--dp-replicate 2 --zero-stage 3", "", 6, 5),
    SingleCase("latent attention", "gpt", LATENT),
    SingleCase("further predictions", "llama", "--mtp-num-layers 2"),
    SingleCase(
        *("further predictions at the end", "llama", "--mtp-num-layers 1"),
        *("--pp 2 --tp 2 --sequence-parallel", 2, 7),
    ),
    SingleCase(
        *("further predictions, recomputed", "llama", "--mtp-num-layers 2 --recompute-granularity full"),
        "--tp 2 --zero-stage 2",
    ),
    SingleCase("further predictions, gathered", "llama", "--mtp-num-layers 1", "--zero-stage 3", 4),
    SingleCase(
        *("further predictions of experts", "experts", "--mtp-num-layers 1 --ep 4 --etp 1"),
        more_waits={"layers/dispatch.py": 6},
    ),
    SingleCase(
        *("further predictions, tied", "gpt"),
        *("--mtp-num-layers 1 --position-embedding-type rope --pipeline-schedule zb-h1",),
        *("--pp 2 --tp 2 --sequence-parallel", 2, 7),
    ),
    SingleCase(
        *("latent attention in stages", "gpt", f"{LATENT} --pipeline-schedule zb-h1 --attention-dropout 0.1"),
        *("--tp 2 --pp 2 --sequence-parallel", 1),
        num_layers=4,
    ),
    SingleCase("Muon of latent attention", "gpt", f"{LATENT} --optimizer muon"),
    SingleCase("latent attention on a ring", "gpt", f"{LATENT} --recompute-granularity selective", "--cp 4", 1),
    SingleCase(
        "latents on a ring over tp", "gpt", f"{LATENT} {AGAIN} mla_up_proj", "--tp 2 --cp 2 --sequence-parallel"
    ),
    SingleCase("latents on a ring without sequence parallelism", "gpt", LATENT, "--tp 2 --cp 2"),
    SingleCase(
        *("a ring of latent attention with adapters", "gpt", f"{LATENT} --load never-read --adapter-type lora"),
        *("--cp 2", 2),
    ),
    SingleCase("adapters of latent attention", "gpt", f"{LATENT} --load never-read --adapter-type lora"),
    SingleCase("latent attention, unfused", "gpt", f"{LATENT} --attention-backend unfused", "--tp 2 --zero-stage 1"),
    SingleCase("latent attention computed again to the latents", "gpt", f"{LATENT} {AGAIN} core_attn mla_up_proj"),
    SingleCase("norms and MLPs computed again", "llama", f"{AGAIN} layernorm mlp", "--tp 2 --sequence-parallel"),
    SingleCase("MLPs computed again, without sequence parallelism", "gpt", f"{AGAIN} mlp", "--tp 2 --zero-stage 1"),
    SingleCase(
        "experts' activations computed again",
        "experts",
        f"{AGAIN} layernorm moe_act {SHARED}",
        "--tp 2 --sequence-parallel",
    ),
    SingleCase("experts computed again", "experts", f"{AGAIN} moe layernorm {SHARED}", "--ep 2 --etp 2 --tp 2"),
    SingleCase("shared experts computed again", "experts", f"{AGAIN} shared_experts {SHARED}", "--tp 2"),
    SingleCase(
        *("MLPs computed again, with adapters", "llama", f"{AGAIN} mlp --load never-read --adapter-type lora"),
        "--tp 2 --sequence-parallel",
    ),
    SingleCase("BERT", "gpt", "--model-type bert"),
    SingleCase("BERT with dropout, in stages", "dropped", "--model-type bert", "--tp 2 --pp 2 --cp 2", 1, 7),
    SingleCase("T5", "gpt", T5),
    SingleCase("T5 with dropout, in stages", "dropped", T5, "--tp 2 --pp 2 --cp 2 --cp-comm-type a2a", 1, 7),
    SingleCase(
        *("T5's encoder, scores computed again", "gpt", f"{T5} --recompute-granularity selective"),
        *("--tp 2 --pp 2", 1, 0),
        precision="",
    ),
    SingleCase("unfused attention", "llama", "--attention-backend unfused"),
    SingleCase("unfused attention with dropout", "dropped", "--attention-backend unfused"),
    SingleCase("fused softmax", "llama", "--attention-backend fused_softmax"),
    SingleCase("ZeRO-2 without overlap", "llama", "--no-overlap-grad-reduce", "--zero-stage 2", dp=4),
    SingleCase(
        *("ZeRO-2 without overlap, recomputed", "llama", "--no-overlap-grad-reduce --recompute-granularity full"),
        *("--zero-stage 2", 4),
    ),
    SingleCase(
        *("shared inputs of recomputation", "gpt"),
        "--recompute-granularity full --recompute-num-layers 1 --distribute-saved-activations",
        "--tp 2 --zero-stage 1",
    ),
    SingleCase("ZeRO-3 of few layers with experts", "experts", "", "--zero-stage 3 --ep 4 --etp 1", 4, num_layers=4),
    SingleCase(
        *("ZeRO-3 with rows to pad", "experts", "--ep 2 --etp 1", "--tp 2 --zero-stage 3"),
        rank=11,
        dp=6,
        num_layers=4,
    ),
    SingleCase(
        *("ZeRO-3 with rows for some", "experts", "--ep 2 --etp 1", "--tp 2 --zero-stage 3"),
        rank=1,
        dp=6,
        num_layers=4,
    ),
    SingleCase(
        *("layers computed again by fours", "llama"),
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4 --vocab-size 2000",
        num_layers=4,
    ),
    SingleCase(
        *("a large embedding in fp32", "gpt", "--vocab-size 128000 --seq-length 512", "--pp 2"),
        rank=0,
        precision="",
    ),
    SingleCase(
        *("a large tied table in fp32", "gpt", "--vocab-size 128000 --seq-length 128", ""),
        rank=1,
        precision="",
    ),
    SingleCase(
        *("a tied table and one micro-batch", "gpt"),
        "--vocab-size 64000 --seq-length 256 --global-batch-size 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        layout="--zero-stage 0",
        rank=1,
    ),
    SingleCase(
        *("a last stage of rows for all of etp", "experts", "--moe-router-topk 4 --ep 2 --etp 2"),
        "--tp 2 --pp 2 --zero-stage 1",
        rank=7,
        num_layers=4,
        more_waits={"layers/dispatch.py": 4},
    ),
    SingleCase("weights as codes", "llama", "--zero-quantized-weights int8"),
    SingleCase(
        *("weights of layers as codes", "llama", "--zero-quantized-weights int8 --zero-quantized-weights-block 64"),
        "--zero-stage 3",
        dp=4,
    ),
    SingleCase(
        *("weights of experts as codes", "experts", "--zero-quantized-weights int8 --ddp-bucket-size 1000000"),
        "--zero-stage 2 --ep 2 --etp 1",
        dp=4,
    ),
    SingleCase("gradients as codes", "llama", "--zero-quantized-gradients int8"),
    SingleCase(
        *("gradients of a backward as codes", "experts", "--zero-quantized-gradients int4 --ddp-bucket-size 1000000"),
        "--zero-stage 2 --ep 2 --etp 1",
        dp=4,
    ),
    SingleCase(
        *("gradients of layers as codes", "llama", "--zero-quantized-gradients int4"),
        "--zero-stage 3 --dp-replicate 2",
        dp=4,
    ),
    SingleCase(
        *("4 bits under ZeRO-3", "llama", "--load never-read --adapter-type lora --quantize-base nf4"),
        "--zero-stage 3 --seq-length 256",
        dp=4,
    ),
    SingleCase(
        *("ZeRO-3 of a middle stage", "llama"),
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --global-batch-size 48",
        *("--pp 4 --zero-stage 3", 4),
        rank=7,
        num_layers=8,
    ),
    SingleCase(
        *("ZeRO-3 in chunks", "llama", ""),
        "--pp 2 --zero-stage 3 --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        num_layers=4,
    ),
    SingleCase(
        *("ZeRO-3 kept by neighbours, recomputed", "llama"),
        "--zero-hpz-partition-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--global-batch-size 16",
        *("--zero-stage 3", 4),
        num_layers=6,
    ),
    SingleCase(
        *("experts kept by neighbours", "experts", "--zero-hpz-partition-size 2"),
        *("--tp 2 --zero-stage 3 --ep 2 --etp 1", 4),
        num_layers=4,
    ),
    SingleCase(
        *("islands", "llama"),
        "--outer-optimizer nesterov --outer-interval 1 --outer-move-dtype int8 --dp-replicate 2",
        dp=4,
    ),
    SingleCase(
        *("islands offloaded", "gpt", "--outer-optimizer nesterov --dp-replicate 2 --optimizer-cpu-offload"),
        *("--zero-stage 2", 4),
        more_waits={"parallel/data_parallel/zero.py": 1},
    ),
    # torch waits for each gradient of a micro-batch; what is summed over other axes goes to the device and back.
    SingleCase(
        *("parameters on the host", "llama", "--param-cpu-offload", "--tp 2 --sequence-parallel --zero-stage 3"),
        num_layers=4,
        more_waits={"torch": 2 * (4 * 6 + 3), "parallel/data_parallel/fully_sharded.py": 2, "optim/global_norm.py": 6},
    ),
    SingleCase(
        *("parameters on the host, with copies", "gpt", "--param-cpu-offload --dp-replicate 2"),
        *("--pp 2 --zero-stage 3", 4),
        num_layers=4,
        more_waits={
            "torch": 2 * (2 * 12 + 2),
            "parallel/data_parallel/fully_sharded.py": 2 * (4 + 1),
            "optim/global_norm.py": 4,
        },
    ),
]
"""What a pairwise deal has no room for."""
FURTHER = {
    "a shared head": "a shared head on a ring",
    "QK-clip": "QK-clip on a ring",
    "soft caps": "soft caps of adapters",
    "Llama 4, small": "Llama 4, small, over tp",
    "further predictions": "further predictions, gathered",
    "adapters of latent attention": "a ring of latent attention with adapters",
    "MLPs computed again, without sequence parallelism": "norms and MLPs computed again",
    "shared experts computed again": "experts computed again",
    "weights as codes": "weights of experts as codes",
    "gradients as codes": "gradients of a backward as codes",
    "xIELU": "wide xIELU",
    "a window by SDPA": "a window by SDPA over cp",
    "documents by SDPA, recomputed": "documents by SDPA",
    "ALiBi by SDPA": "ALiBi",
    "a window": "a window with dropout",
    "unfused attention": "unfused attention with dropout",
    "Muon of latent attention": "latent attention",
    "latent attention in stages": "latents on a ring over tp",
    "latent attention, unfused": "latent attention",
    "BERT": "BERT with dropout, in stages",
    "T5": "T5 with dropout, in stages",
    "4 bits": "4 bits under ZeRO-3",
    "8 bits": "4 bits under ZeRO-3",
    "gpt-oss, small": "gpt-oss, small, over etp",
    "adapters of gpt-oss": "gpt-oss, small, over etp",
    "expert bias": "experts offloaded",
    "global balance": "experts offloaded",
    "ZeRO-2 without overlap, recomputed": "ZeRO-2 without overlap",
    "ZeRO-3 with rows for some": "ZeRO-3 with rows to pad",
    "ZeRO-3 of few layers with experts": "ZeRO-3 with rows to pad",
    "ZeRO-3 of a middle stage": "ZeRO-3 in chunks",
    "a large embedding in fp32": "a large tied table in fp32",
    "islands": "islands offloaded",
    "parameters on the host": "parameters on the host, with copies",
    "a shared head in fp32": "a shared head on a ring",
    "by pieces": "by pieces, with LoRA",
    "rooms": "rooms over etp, computed again",
    "gpt-oss, small, over ep": "gpt-oss, small, over etp",
    "further predictions at the end": "further predictions, tied",
    "latent attention on a ring": "latents on a ring over tp",
    "latent attention computed again to the latents": "latents on a ring over tp",
    "experts' activations computed again": "rooms over etp, computed again",
}
"""Of these only `pytest --all-layouts` runs those at the left, which differ little from those at the right."""
