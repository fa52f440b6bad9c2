"""Tests of the search: speed, legality of what is printed, memory against the exact figures, guards."""

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import searches
from searches import CASES, search_of
from sweeps import further, some_of

from megatronish.estimate.costs.candidate import Candidate, MeshSizes, complaints, config_of
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.planner.choose import conventional, short_list
from megatronish.estimate.planner.exact import fullest_stage, plan_of
from megatronish.estimate.planner.pipeline_time import StageTimes, pipeline_seconds
from megatronish.estimate.planner.search import Search, SearchResult, divisors
from megatronish.parallel.schedules.simulate import Costs, simulate
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.stages import Stages
from megatronish.report.plan import explanation

Find = Callable[[str], tuple[Search, SearchResult]]


@pytest.fixture
def searched(session_folder: Path) -> Find:
    """A search by its name, with what it has found."""
    return lambda name: (search_of(name), searches.searched(name, session_folder).result)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layouts", "most"), [further(("gpt3-175b", 50_000, 20_000_000)), ("llama-70b", 55_000, 14_500_000)]
)
def test_fifty_thousand_layouts_take_seconds(name: str, layouts: int, most: int, session_folder: Path) -> None:
    """10 s of a slow core for 17 million calls: of these two, calls are the same on every machine, busy or not."""
    tried, calls = searches.searched(name, session_folder)
    assert calls is not None
    print(f"{tried.legal:,} layouts, {len(tried.found):,} fit, {calls / 1e6:.1f} million calls")
    assert tried.legal > layouts
    assert calls < most


@pytest.mark.long
@pytest.mark.parametrize("name", some_of(CASES, ["llama-70b"]))
def test_what_is_found_is_accepted_by_the_real_rules(name: str, searched: Find) -> None:
    search, tried = searched(name)
    chosen = random.Random(1).sample(tried.found, 15)
    for each in chosen:
        assert complaints(config_of(search.config, each.candidate)) == [], each.candidate


@pytest.mark.long
def test_what_is_found_of_experts_on_few_devices_is_accepted_by_the_real_rules() -> None:
    search = search_of("qwen3-30b-a3b", gpus=8)
    for each in random.Random(1).sample(search.run().found, 15):
        assert complaints(config_of(search.config, each.candidate)) == [], each.candidate


OTHERS = {
    "LoRA": (8, "--adapter-type lora --load x"),
    "QLoRA": (2, "--adapter-type lora --load x --quantize-base nf4 --global-batch-size 16"),
    "IA3": (8, "--adapter-type ia3 --load x"),
    "Muon": (64, "--optimizer muon"),
    "DPO": (64, "--objective dpo --dataset-type chat --data-path y.jsonl --load x"),
    "SimPO": (64, "--objective simpo --dataset-type chat --data-path y.jsonl --load x"),
    "offloading": (64, "--optimizer-cpu-offload"),
    "codes": (16, "--zero-quantized-gradients int8 --zero-quantized-weights int8"),
    "latents": (
        4,
        "--multi-latent-attention --no-group-query-attention --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --global-batch-size 4 --num-layers 8",
    ),
    "predictions ahead": (4, "--mtp-num-layers 2 --global-batch-size 8 --num-layers 8"),
}


def alone(search: Search, candidate: Candidate) -> int:
    """Bytes of the fullest stage of a layout that is the config's own."""
    return fullest_stage(config_of(search.config, candidate), search.work.vocab_size).memory.total


def sizes_of(search: Search, number: int) -> list[tuple[Candidate, int, int]]:
    """Random layouts, whether they fit or not, with their bytes among others and of a config by itself."""
    random_one, meshes, found = random.Random(2), list(search.meshes()), list[tuple[Candidate, int, int]]()
    while len(found) < number:
        families = [(each, zeros) for each, zeros in search.families(random_one.choice(meshes)) if zeros]
        if families:
            candidate, zeros = random_one.choice(families)
            candidate = candidate._replace(zero=random_one.choice(zeros))
            found.append((candidate, search.nbytes(candidate), alone(search, candidate)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_a_layout_has_the_same_memory_in_a_search_and_by_itself(name: str) -> None:
    gpus, flags = OTHERS.get(name, (None, ""))
    search = search_of(name if name in CASES else "llama-70b", *flags.split(), gpus=gpus)
    for candidate, among_others, by_itself in sizes_of(search, 20):
        assert among_others == by_itself, candidate


def test_settings_that_need_some_of_a_layout_have_the_layouts_that_have_it() -> None:
    """Codes are of what ZeRO shards, pieces of products of sequences that are cut, and a head can be a stage."""
    codes = search_of("llama-70b", "--zero-quantized-gradients", "int8", gpus=64)
    assert {zero for mesh in codes.meshes() for _, zeros in codes.families(mesh) for zero in zeros} == {1, 2, 3}
    pieces = search_of("llama-70b", "--tp-comm-overlap", gpus=64)
    cuts = {(mesh.tp > 1, each.sequence_parallel) for mesh in pieces.meshes() for each, _ in pieces.families(mesh)}
    assert cuts == {(False, False), (True, True)}
    head = search_of("llama-70b", "--num-layers", "7", "--account-for-loss-in-pipeline-split", gpus=8)
    pipelines = {(mesh.pp, each.schedule) for mesh in head.meshes() for each, _ in head.families(mesh)}
    assert {(8, "1f1b"), (4, "zb-v")} <= pipelines


def test_latents_of_a_ring_wait_for_no_weight_gradients_in_a_search_either() -> None:
    """Under zero-bubble schedules keys and values go round, and not latents."""
    gpus, flags = OTHERS["latents"]
    search = search_of("llama-70b", *flags.split(), gpus=gpus)
    for schedule in ("1f1b", "zb-h1"):
        candidate = Candidate(MeshSizes(pp=2, cp=2), schedule=schedule)
        assert search.nbytes(candidate) == alone(search, candidate)


@pytest.mark.long
def test_rows_of_experts_that_zero3_pads_are_in_the_memory_of_the_search() -> None:
    search, found = search_of("qwen3-30b-a3b", "--global-batch-size", "480", gpus=48), 0
    for mesh in search.meshes():
        if mesh.pp == 1 and 128 // mesh.ep % mesh.edp:
            candidate = next(each for each, zeros in search.families(mesh) if 3 in zeros)._replace(zero=3)
            assert search.nbytes(candidate) == alone(search, candidate), candidate
            found += 1
    assert found > 5


def test_printed_memory_is_the_peak(searched: Find) -> None:
    search, tried = searched("llama-70b")
    config = config_of(search.config, tried.found[0].candidate)
    stages = Stages.of(config.parallel, config.model, vocab_size=128256, seq_length=search.work.seq_length)
    loads = stages.loads(tried.found[0].candidate.num_microbatches(search.work.global_batch))
    peaks = [memory.total for memory in expected_memory(config, loads, vocab_size=128256)]
    fullest = fullest_stage(config, 128256)
    assert (fullest.stage, fullest.memory.total) == (peaks.index(max(peaks)), max(peaks))


def test_what_is_on_a_disk_is_on_no_device() -> None:
    search = search_of("llama-70b", "--param-cpu-offload", "--offload-folder", "x", gpus=8)
    planned = plan_of(search, Candidate(MeshSizes(dp=8), zero=3, recompute="full"))
    fullest = planned.fullest
    assert fullest.memory.disk > fullest.memory.total > 0
    assert sum(fullest.owners.values()) == fullest.memory.total
    line = next(line for line in explanation(search, planned).splitlines() if line.startswith("on the disk"))
    assert line.endswith(format_bytes(fullest.memory.disk))


@pytest.mark.parametrize("name", some_of(["gpt3-175b", "llama-70b"], ["llama-70b"]))
def test_the_closed_form_of_a_pipeline_is_near_the_simulator(name: str, searched: Find) -> None:
    search, tried = searched(name)
    pipelines = [each for each in tried.found if each.candidate.mesh.pp > 1]
    off = []
    for each in random.Random(3).sample(pipelines, 12):
        if each.candidate.num_microbatches(search.work.global_batch) >= each.candidate.mesh.pp:
            off.append(plan_of(search, each.candidate).step.high / each.seconds - 1)
    assert max(map(abs, off)) < 0.15
    assert sorted(map(abs, off))[len(off) // 2] < 0.04


@pytest.mark.long
@pytest.mark.parametrize("stages", [4, 8, 16])
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.2, 0.8), (1, 1.6, 0.9), (1, 2, 1), (1, 1.1, 0.5)])
def test_the_closed_form_of_zb_v_has_the_bubble_of_the_simulator(stages: int, times: tuple[float, ...]) -> None:
    zb_v, m = SCHEDULES["zb-v"], 3 * stages
    closed = pipeline_seconds(
        StageTimes(sum(times), stages * sum(times), *times),
        **{"schedule": "zb-v", "stages": stages, "chunks": 2, "microbatches": m, "hop": 0.0},
    )
    whole = dict(zip("FBW", times, strict=True))
    simulated = simulate(
        zb_v.plan(num_stages=stages, num_microbatches=m, num_chunks=2),
        costs=Costs(transfer=0),
        placement=zb_v.place(num_stages=stages, num_chunks=2),
        durations=lambda _stage, action: whole[action.kind] / 2,
    )
    assert closed.bubble == pytest.approx(simulated.makespan - m * sum(times), rel=0.1)


@pytest.mark.parametrize("like", ["gpipe", "1f1b"])
def test_a_schedule_of_a_plug_in_is_timed_by_the_simulator(like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name of a schedule that has a closed form takes as long as that says."""
    monkeypatch.setitem(SCHEDULES, "plug-in", replace(SCHEDULES[like], name="plug-in"))
    for stages, hop in ((4, 0.0), (8, 0.0), (32, 0.0), (8, 0.1)):
        times = StageTimes(3.0, 3.0 * stages, 1.0, 1.2, 0.8)
        sizes = {"stages": stages, "chunks": 1, "microbatches": 4 * stages, "hop": hop}
        closed, other = (pipeline_seconds(times, schedule=name, **sizes) for name in (like, "plug-in"))
        assert other.total == pytest.approx(closed.total, rel=0.06), (stages, hop)


def test_the_conventional_row_takes_more_stages_before_it_recomputes_whole_layers() -> None:
    """405B: with tp of a node and no cp only full recomputation fits; those who train it recompute nothing."""
    search = search_of(
        "llama-70b",
        *["--num-layers", "126", "--hidden-size", "16384", "--ffn-hidden-size", "53248"],
        *["--num-attention-heads", "128"],
        *["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"],
        *["--global-batch-size", "2048"],
        gpus=16384,
    )
    few = [MeshSizes(8, 8, 256, 1, 1, 8), MeshSizes(8, 16, 128, 1, 1, 8), MeshSizes(8, 16, 64, 2, 1, 8)]
    search.meshes = lambda: iter(few)  # type: ignore[method-assign]
    found = search.run().found
    assert any(each.candidate.mesh.cp == 1 and each.candidate.recompute == "full" for each in found)
    usual = conventional(search, found)
    assert usual is not None and usual.candidate.recompute == "none"
    assert (usual.candidate.mesh.tp, usual.candidate.mesh.pp, usual.candidate.schedule) == (8, 16, "1f1b")


def test_what_is_known_of_the_error_widens_the_interval() -> None:
    search = search_of("gpt3-175b")
    assert search.error.part == 0.12 and "276 published steps that were kept from the fit" in search.error.reason
    for other in (search_of("llama-70b"), search_of("qwen3-30b-a3b")):
        assert other.error.part == 0.26
    assert "no step of h100-sxm is among" in search_of("llama-70b").error.reason
    assert "no step of experts or h100-sxm is among" in search_of("qwen3-30b-a3b").error.reason
    calibrated = replace(search, device=replace(search.device, calibrated="a probe"))
    assert calibrated.error.part == 0.21
    candidate = Candidate(MeshSizes(8, 8, 16, 1, 1, 8), zero=1, sequence_parallel=True)
    step = plan_of(search, candidate).step
    low, high = search.interval(step, candidate)
    assert low == pytest.approx(0.88 * step.low) and high == pytest.approx(1.12 * step.high)
    low, high = search.interval(step, candidate._replace(schedule="zb-v", chunks=2))  # no step of it was published
    assert low == pytest.approx(0.88 * step.low) and high == pytest.approx(1.22 * step.high)


@pytest.mark.long
def test_the_short_list_has_different_meshes_and_a_conventional_layout(searched: Find) -> None:
    search, _ = searched("llama-70b")
    chosen = short_list(search, number=3)
    meshes = [each.candidate.mesh for each in chosen.planned]
    assert len(set(meshes[:3])) == 3
    assert chosen.conventional is not None
    usual = chosen.planned[chosen.conventional].candidate
    assert (usual.mesh.tp, usual.mesh.cp, usual.zero) == (8, 1, 1)
    assert all(each.step.low <= each.step.high for each in chosen.planned)
    ends = [each.step.high for each in chosen.planned[:3]]
    assert ends == sorted(ends)
    for each in chosen.planned:
        assert complaints(each.config) == []
        assert each.fullest.memory.total <= search.limit
        assert sum(each.fullest.owners.values()) == each.fullest.memory.total


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "gpus"), [("--cuda-graph", 64), ("--rampup-batch-size 48 16 10000 --global-batch-size 512", 64)]
)
def test_what_is_tried_is_legal_where_rules_read_micro_batches(flags: str, gpus: int) -> None:
    search = search_of("llama-70b", *flags.split(), gpus=gpus)
    tried = [
        each._replace(zero=zero) for mesh in search.meshes() for each, zeros in search.families(mesh) for zero in zeros
    ]
    assert tried
    for candidate in random.Random(7).sample(tried, min(80, len(tried))):
        assert complaints(config_of(search.config, candidate)) == [], candidate


def test_experts_may_be_shared_where_dense_layers_are_not() -> None:
    search = search_of("qwen3-30b-a3b", gpus=4)
    mesh = MeshSizes(tp=4, pp=1, dp=1, cp=1, ep=2, etp=1)
    assert mesh.edp == 2
    assert {zero for _, zeros in search.families(mesh) for zero in zeros} == {0, 1, 2, 3}


@pytest.mark.long
def test_zero3_under_a_pipeline_has_to_be_asked_for(searched: Find) -> None:
    _, tried = searched("llama-70b")
    assert not [each for each in tried.found if each.candidate.zero == 3 and each.candidate.mesh.pp > 1]
    search = search_of("llama-70b", gpus=32)
    search.zero3_in_pipelines = True
    assert [each for each in search.run().found if each.candidate.zero == 3 and each.candidate.mesh.pp > 1]


@pytest.mark.long
def test_parameters_on_the_cpu_are_planned_with_zero3_alone() -> None:
    search = search_of("llama-70b", "--param-cpu-offload", "--zero-stage", "3", gpus=64)
    for in_pipelines in (False, True):
        search.zero3_in_pipelines = in_pipelines
        tried = search.run()
        assert tried.found
        assert {each.candidate.zero for each in tried.found} == {3}
        assert any(each.candidate.mesh.pp > 1 for each in tried.found) == in_pipelines


@pytest.mark.parametrize("name", some_of(["gpt3-175b", "llama-70b"], ["llama-70b"]))
def test_a_chunk_computes_longer_than_its_transfer_takes(name: str, searched: Find) -> None:
    search, tried = searched(name)
    for each in random.Random(4).sample([one for one in tried.found if one.candidate.schedule == "interleaved"], 20):
        times, _ = search.clock.stage_times(each.candidate, search.stages(each.candidate))
        assert times.forward / each.candidate.chunks > search.clock.hop(each.candidate)


def step_of(search: Search, **changes: object) -> float:
    mesh = MeshSizes(tp=8, pp=4, dp=16, cp=1, ep=1, etp=8)
    plain = Candidate(mesh, 1, "1f1b", 1, 1, "none", True)
    changed = plain._replace(**changes)  # type: ignore[arg-type]
    return search.clock.step(changed, search.stages(changed)).high


def test_times_move_as_physics_says(searched: Find) -> None:
    search, _ = searched("llama-70b")
    plain = step_of(search)
    assert step_of(search, recompute="full") > 1.2 * plain
    assert step_of(search, schedule="zb-v", chunks=2) < plain
    assert step_of(search, zero=2) > plain  # exchanges gradients after every backward
    assert step_of(search, zero=3) > step_of(search, zero=2)
    assert step_of(search, schedule="interleaved", chunks=4) < plain
    slower = search_of("llama-70b", "--seq-length", "16384", "--global-batch-size", "256")
    assert step_of(slower) > plain  # as many tokens, with longer attention


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


def test_a_search_pauses_the_collection_of_garbage_and_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    search, seen = search_of("llama-70b", gpus=8), list[bool]()

    def meshes(_search: Search) -> Iterator[MeshSizes]:
        seen.append(gc.isenabled())
        yield from ()

    monkeypatch.setattr(Search, "meshes", meshes)
    search.run()
    assert (seen, gc.isenabled()) == ([False], True)
