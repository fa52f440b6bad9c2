"""Tests of times of steps that are no plain training: adapters, references, Muon, pipelines of many micro-batches."""

from dataclasses import replace

import pytest
from paths import ROOT

from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.estimate.costs.candidate import UNASKED, config_of, without_layout
from megatronish.estimate.costs.step_traffic import TrafficKey
from megatronish.estimate.costs.traffic import expected_traffic
from megatronish.estimate.planner.device_speed import Efficiencies, reservations
from megatronish.estimate.planner.devices import find_device
from megatronish.estimate.planner.exact import exact_step
from megatronish.estimate.planner.layer_time import Passes
from megatronish.estimate.planner.named_layout import read_layout
from megatronish.estimate.planner.search import Search
from megatronish.estimate.planner.step_time import StepSeconds
from megatronish.estimate.planner.workload import Workload
from megatronish.parallel.stages import Stages

RANK_CAPACITY, CAPACITY = "--moe-expert-rank-capacity-factor", "--moe-expert-capacity-factor"
CHAT = "--dataset-type chat --data-path x.jsonl --load x"


def step_of(layout: str, flags: str = "", *, gpus: int = 8, name: str = "llama-8b-8gpu") -> StepSeconds:
    argv = ["--config", str(ROOT / f"configs/{name}.toml"), *flags.split()]
    config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
    device = find_device("a100-sxm" if name == "gpt3-175b" else "h100-sxm")
    search = Search(config, Workload.of(config, 128256), device, gpus)
    candidate = read_layout(layout, gpus=gpus)
    return exact_step(search.clock, candidate, search.stages(candidate), config_of(config, candidate))


def test_adapters_have_no_gradients_of_frozen_weights() -> None:
    plain, lora = (step_of("tp=4,sp,zero=1", flags) for flags in ("", "--adapter-type lora --load x"))
    assert 0.6 * plain.high < lora.high < 0.95 * plain.high  # two of three products, and those of rank r
    nf4 = step_of("tp=4,sp,zero=1", "--adapter-type lora --load x --quantize-base nf4")
    assert lora.high < nf4.high
    assert step_of("tp=4,sp,zero=1", "--adapter-type ia3 --load x").high < lora.high
    plain, lora = (step_of("micro=1,recompute=full", flags, gpus=64) for flags in ("", "--adapter-type lora --load x"))
    assert lora.exchange < 0.05 * plain.exchange
    assert lora.optimizer < 0.05 * plain.optimizer


def test_zero3_gathers_a_frozen_base_and_exchanges_gradients_of_adapters_alone() -> None:
    plain, lora, nf4 = (
        step_of("zero=3,recompute=full", flags, gpus=64).exchange
        for flags in ("", "--adapter-type lora --load x", "--adapter-type lora --load x --quantize-base nf4")
    )
    assert nf4 < lora < plain


@pytest.mark.parametrize("layout", ["tp=4,sp,zero=1", "tp=2,pp=4,zero=1,sp"])
def test_a_reference_adds_a_forward_pass_and_kto_another_one(layout: str) -> None:
    simpo, dpo, kto, stored = (
        step_of(layout, f"--objective {words} {CHAT}") for words in ("simpo", "dpo", "kto", "dpo --reference stored")
    )
    plain = step_of(layout)
    assert simpo.high == pytest.approx(plain.high)
    assert stored.high == pytest.approx(plain.high)
    assert 0.2 * plain.high < dpo.others < 0.45 * plain.high
    assert kto.others == pytest.approx(2 * dpo.others)
    assert dpo.high > plain.high + dpo.others


def test_muon_has_products_of_its_own_that_ranks_share_out() -> None:
    layout = "tp=4,sp,zero=1"
    adam, muon, fast = (
        step_of(layout, flags) for flags in ("", "--optimizer muon", "--optimizer muon --muon-fp32-matmul-prec medium")
    )
    # Of each [m, n] five times 2 (2 m m n + m m m) FLOPs, over 8 ranks in fp32: some 7 s for 8B.
    assert adam.optimizer < fast.optimizer < muon.optimizer
    assert 2 < muon.optimizer < 20
    more = step_of(layout, "--optimizer muon", gpus=32)
    assert more.optimizer < 0.6 * muon.optimizer  # the rest is the exchange of whole matrices


def test_what_no_measured_step_confirms_is_said() -> None:
    def said(flags: str) -> str:
        argv = ["--config", str(ROOT / "configs/llama-8b-8gpu.toml"), *flags.split()]
        config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
        return " ".join(reservations(config))

    assert said("") == ""
    for flags, part in (
        ("--adapter-type lora --load x --quantize-base nf4", "decoding a quantised base is counted by its bytes alone"),
        (f"--objective dpo {CHAT}", "the loss over pairs is not counted"),
        ("--optimizer muon", "Newton-Schulz iterations of three products in fp32"),
        ("--qk-clip", "a product of queries and keys more in each forward is counted"),
        ("--optimizer-cpu-offload", "the update by the CPU are not modelled"),
    ):
        assert part in said(flags)
    islands = Config().with_fields(outer_optimizer="nesterov")  # of a run: plans are without
    assert "outer steps are left out" in " ".join(reservations(islands))
    for name in ("zero_hpz_partition_size", "num_distributed_optimizer_instances"):
        assert "copies keep it in a node" in " ".join(reservations(Config().with_fields(**{name: 2})))


def test_ranks_of_a_node_share_its_disk() -> None:
    """Of 8 billion parameters 28 bytes each a step with Adam, at 6 GB/s, among however many ranks of a node."""
    for layout, gpus, nodes in (("zero=1", 8, 1), ("zero=2", 64, 8), ("tp=8,zero=1", 16, 2)):
        offloaded = step_of(layout, "--optimizer-cpu-offload", gpus=gpus)
        on_disk = step_of(layout, "--optimizer-cpu-offload --offload-folder /data", gpus=gpus)
        more = on_disk.optimizer - offloaded.optimizer
        assert more == pytest.approx(28 * 8.03e9 / 6e9 / nodes, rel=0.02), layout
    rows = [step_of("zero=3", f"--param-cpu-offload {flags}") for flags in ("", "--offload-folder /data")]
    assert rows[1].optimizer - rows[0].optimizer == pytest.approx(24 * 8.03e9 / 6e9, rel=0.02)
    micro_batches = (rows[1].exchange - rows[0].exchange) / (8 * 8.03e9 / 6e9)  # read twice by each
    assert micro_batches == pytest.approx(round(micro_batches), rel=0.02) and round(micro_batches) >= 1


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_cp_takes_as_long_as_the_bytes_that_the_engine_sends(kind: str, recompute: str) -> None:
    """Those of a dry run, with sums of gradients in fp32 and repeated heads; here without latency."""
    argv = ["--config", str(ROOT / "configs/llama-8b-8gpu.toml"), "--cp-comm-type", kind]
    config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
    work, device = Workload.of(config, 128256), replace(find_device("h100-sxm"), latency_us=1e-9)
    candidate = read_layout(f"tp=2,cp=4,recompute={recompute},zero=1", gpus=8)
    layers = Search(config, work, device, 8).clock.layers
    passes, rate = layers.passes(work.kinds[0], candidate), layers.links.bandwidth(4, 2)
    sent = (passes.forward.context + passes.backward.context) * rate * (1 if kind == "p2p" else 4 / 3)
    run = config_of(config, candidate)
    stages = Stages.of(run.parallel, run.model, vocab_size=128256, seq_length=8192)
    m = candidate.num_microbatches(config.global_batch_size)
    traffic = expected_traffic(run, stages.loads(m)[0], 0, vocab_size=128256)
    of_cp = traffic[TrafficKey("cp", "send" if kind == "p2p" else "all-to-all")]
    assert sent == pytest.approx(of_cp / (m * config.model.num_layers), rel=1e-6)


@pytest.mark.long
def test_transfers_grow_evenly_with_the_micro_batches() -> None:
    layout = "tp=8,pp=8,micro=1,zero=1,sp"
    transfers = [
        step_of(layout, f"--global-batch-size {16 * m}", gpus=1024, name="gpt3-175b").pipeline.transfers
        for m in (728, 744, 752, 768)
    ]
    assert transfers == sorted(transfers)
    assert transfers[-1] < 1.1 * transfers[0]


LATENT = (
    "--multi-latent-attention --no-group-query-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128"
)


def test_a_transfer_may_be_waited_for_and_its_slices_are_put_together() -> None:
    step, whole = (step_of(f"tp=4,pp=4,zero=1{shared}", gpus=16) for shared in (",sp", ""))
    chunks = step_of("tp=4,pp=4,zero=1,sp,schedule=interleaved,chunks=2", gpus=16)
    for each in (step, whole, chunks):
        assert 0 < each.pipeline.hidden < each.pipeline.transfers
        assert each.high - each.low >= each.pipeline.hidden
    assert whole.pipeline.transfers > 1.05 * step.pipeline.transfers  # ranks of tp gather what each got a slice of
    assert chunks.pipeline.transfers > 1.2 * step.pipeline.transfers  # twice as many, both ways at once


def test_a_softmax_of_many_operations_takes_longer_to_launch_and_to_compute() -> None:
    fused, chain = (passes_of("tp=4,zero=1", f"--attention-backend {name}") for name in ("fused_softmax", "unfused"))
    assert chain.forward.attention > 2 * fused.forward.attention
    tiny = "--seq-length 128 --hidden-size 512 --ffn-hidden-size 1024"
    fused, chain = (passes_of("zero=1", f"{tiny} --attention-backend {name}") for name in ("fused_softmax", "unfused"))
    waiting = chain.forward.host - fused.forward.host
    assert waiting == pytest.approx(4 / 25 * 1e-6 * Efficiencies().host_us, rel=0.1)


def passes_of(layout: str, flags: str) -> Passes:
    """Times of a layer, of which the model has but one kind."""
    argv = ["--config", str(ROOT / "configs/llama-8b-8gpu.toml"), *flags.split()]
    config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
    search = Search(config, Workload.of(config, 128256), find_device("h100-sxm"), 8)
    (passes,) = search.clock.of_kinds(read_layout(layout, gpus=8))[0].values()
    return passes


@pytest.mark.parametrize("layout", ["tp=4,zero=1", "tp=4,sp,zero=1", "tp=4,sp,zero=1,recompute=full"])
@pytest.mark.parametrize("flags", ["", LATENT, LATENT.replace("--q-lora-rank 1536", "")], ids=["plain", "mla", "no q"])
def test_tp_takes_as_long_as_the_bytes_that_the_layers_of_the_engine_send(layout: str, flags: str) -> None:
    """Of latents and hidden states; without latency."""
    candidate, sent, planned = read_layout(layout, gpus=8), list[float](), 0.0
    for num_layers in (2, 4):
        argv = ["--config", str(ROOT / "configs/llama-8b-8gpu.toml"), "--num-layers", str(num_layers), *flags.split()]
        config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
        work, device = Workload.of(config, 128256), replace(find_device("h100-sxm"), latency_us=1e-9)
        layers, run = Search(config, work, device, 8).clock.layers, config_of(config, candidate)
        passes = layers.passes(work.kinds[0], candidate)
        planned = (passes.forward.tensor + passes.backward.tensor) * layers.links.bandwidth(4, 1) * 4 / 3
        m = candidate.num_microbatches(config.global_batch_size)
        stages = Stages.of(run.parallel, run.model, vocab_size=128256, seq_length=8192)
        traffic = expected_traffic(run, stages.loads(m)[0], 0, vocab_size=128256)
        # Under sequence parallelism all-reduces are of gradients of whole weights, once a step.
        times = {"all-gather": 1, "reduce-scatter": 1} if candidate.sequence_parallel else {"all-reduce": 2}
        sent.append(sum(number * traffic.get(TrafficKey("tp", kind), 0) for kind, number in times.items()) / m)
    assert planned == pytest.approx((sent[1] - sent[0]) / 2, rel=1e-6)


@pytest.mark.parametrize("layout", ["ep=4", "tp=2,sp,ep=4,etp=1", "tp=2,sp,ep=4,etp=2", "tp=2,ep=2,etp=2"])
@pytest.mark.parametrize(
    "room",
    ["", f"{RANK_CAPACITY} 1.5", f"{CAPACITY} 0.75", f"{CAPACITY} 0.75 --moe-pad-expert-input-to-capacity"],
    ids=["counts", "rooms", "capacity by counts", "rooms by capacity"],
)
def test_experts_take_as_long_as_the_bytes_that_the_engine_sends(layout: str, room: str) -> None:
    """Rows over ep as the room has them; over etp tokens, with their few weights; here without latency."""
    argv = ["--config", str(ROOT / "configs/llama-8b-8gpu.toml"), *f"--num-experts 8 {room}".split()]
    config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
    work, device = Workload.of(config, 128256), replace(find_device("h100-sxm"), latency_us=1e-9)
    candidate = read_layout(f"{layout},zero=1", gpus=8, has_experts=True)
    run, layers, (ep, etp) = (
        config_of(config, candidate),
        Search(config, work, device, 8).clock.layers,
        layout_of(layout),
    )
    passes = layers.passes(work.kinds[0], candidate)
    m = candidate.num_microbatches(config.global_batch_size)
    stages = Stages.of(run.parallel, run.model, vocab_size=128256, seq_length=8192)
    traffic = expected_traffic(run, stages.loads(m)[0], 0, vocab_size=128256)
    sent = dict.fromkeys(("ep", "etp"), 0.0)
    for key, nbytes in traffic.items():
        if key.axis in sent and key.collective in ("all-to-all", "all-gather", "reduce-scatter"):
            sent[key.axis] += nbytes / (m * config.model.num_layers)
    seconds = sent["ep"] * (ep - 1) / ep / layers.links.bandwidth(ep, etp)
    seconds += sent["etp"] * (etp - 1) / etp / layers.links.bandwidth(etp, 1) if etp > 1 else 0.0
    assert passes.forward.experts + passes.backward.experts == pytest.approx(seconds, rel=5e-3)


def test_by_deep_ep_a_token_goes_once_to_a_rank() -> None:
    """Of 8 experts 2 chosen: over 4 ranks of two each, 4 (1 - 15/28) ranks a token, and not 2."""
    rows, tokens = (
        passes_of("ep=4,zero=1", f"--num-experts 8 --moe-token-dispatcher-type {by}").forward.experts
        for by in ("alltoall", "deepep")
    )
    assert tokens / rows == pytest.approx(4 * (1 - 15 / 28) / 2, rel=1e-2)


def layout_of(text: str) -> tuple[int, int]:
    sizes = dict(part.split("=") for part in text.split(",") if "=" in part)
    return int(sizes["ep"]), int(sizes.get("etp", 1))


def test_ways_down_are_of_a_ranks_own_tokens_under_sequence_parallelism_alone() -> None:
    whole, own, alone = (passes_of(layout, LATENT).forward.products for layout in ("tp=8", "tp=8,sp", "tp=1"))
    assert own < 1.3 * alone / 8
    # Of 4096 x 2112 products a token each of eight ranks has all, and not an eighth.
    assert whole - own == pytest.approx(7 / 8 * passes_down(), rel=0.1)


def passes_down() -> float:
    """Seconds of the ways down of all tokens, on one rank."""
    with_ways, without = (passes_of("tp=1", LATENT.replace("1536", rank)).forward.products for rank in ("3072", "1536"))
    up = 32 * 192 / 4096  # the way up from a latent of so many features over that down to it
    of_queries = (with_ways - without) / (1 + up)
    return of_queries * (1536 + 576) / 1536


def test_latents_go_round_a_ring_in_a_plan_too() -> None:
    latent, plain = passes_of("cp=8", LATENT), passes_of("cp=8", f"{LATENT} --kv-lora-rank 100000")
    assert latent.forward.context < 0.3 * plain.forward.context
    deferred = passes_of("cp=4,pp=2,schedule=zb-h1", LATENT)
    assert deferred.forward.context > 5 * passes_of("cp=4,pp=2", LATENT).forward.context


@pytest.mark.parametrize("asked", ["--qk-clip", "--log-max-attention-logit"])
def test_a_pass_over_queries_and_keys_finds_the_largest_logits(asked: str) -> None:
    for layout, flags in (("tp=4,sp", ""), ("tp=4,sp", LATENT), ("cp=4", "")):
        plain, clipped = passes_of(layout, flags), passes_of(layout, f"{flags} {asked}")
        assert clipped.forward.attention > 1.3 * plain.forward.attention
        assert (clipped.backward, clipped.weight) == (plain.backward, plain.weight)
    # Keys of the whole sequence are gathered for it, and latents do not go round then.
    assert clipped.forward.context > plain.forward.context
    latent, clipped = passes_of("cp=4", LATENT), passes_of("cp=4", f"{LATENT} {asked}")
    assert clipped.forward.context > 5 * latent.forward.context
