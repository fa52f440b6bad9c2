"""Tests of times of steps that are no plain training: adapters, references, Muon, pipelines of many micro-batches."""

from dataclasses import replace

import pytest
from paths import ROOT

from megatronish.config.config import Config
from megatronish.config.fields import with_fields
from megatronish.config.read import read_config
from megatronish.estimate.costs.candidate import config_of, without_layout
from megatronish.estimate.costs.step_traffic import TrafficKey
from megatronish.estimate.costs.traffic import expected_traffic
from megatronish.estimate.planner.device_speed import reservations
from megatronish.estimate.planner.devices import find_device
from megatronish.estimate.planner.exact import exact_step
from megatronish.estimate.planner.named_layout import read_layout
from megatronish.estimate.planner.search import Search
from megatronish.estimate.planner.step_time import StepSeconds
from megatronish.estimate.planner.workload import Workload
from megatronish.parallel.stages import Stages

CHAT = "--dataset-type chat --data-path x.jsonl --load x"


def step_of(layout: str, flags: str = "", *, gpus: int = 8, name: str = "llama-8b-8gpu") -> StepSeconds:
    argv = ["--config", str(ROOT / f"configs/{name}.toml"), *flags.split()]
    config = read_config(argv, needs_files=False, settle_layout=without_layout).config
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
        config = read_config(argv, needs_files=False, settle_layout=without_layout).config
        return " ".join(reservations(config))

    assert said("") == ""
    for flags, part in (
        ("--adapter-type lora --load x --quantize-base nf4", "decoding a quantised base is counted by its bytes alone"),
        (f"--objective dpo {CHAT}", "the loss over pairs is not counted"),
        ("--optimizer muon", "Newton-Schulz iterations of three products in fp32"),
        ("--optimizer-cpu-offload", "the update by the CPU are not modelled"),
    ):
        assert part in said(flags)
    islands = with_fields(Config(), outer_optimizer="nesterov")  # of a run: plans are without
    assert "outer steps are left out" in " ".join(reservations(islands))


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
    config = read_config(argv, needs_files=False, settle_layout=without_layout).config
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
