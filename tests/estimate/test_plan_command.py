"""Tests of `megatronish plan`: what it prints and writes, and a sentence for each impossible request."""

import json
from pathlib import Path

import pytest
from paths import ROOT
from scripts import run_script
from sweeps import further

from megatronish.commands.plan import main, split
from megatronish.commands.probing import measured_links
from megatronish.config.check import refuse_unrunnable_plans
from megatronish.config.read import ConfigError, read_config
from megatronish.estimate.costs.candidate import UNASKED
from megatronish.estimate.planner.calibrate import calibrated
from megatronish.estimate.planner.device_speed import Efficiencies, Links
from megatronish.estimate.planner.devices import find_device

SMALL = [
    *("--config", str(ROOT / "configs/llama-8b-8gpu.toml"), "--vocab-size", "128256"),
    *("--gpus", "16", "--device", "h100-sxm"),
]


def plan(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(list(words), program="megatronish plan")
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.long
def test_the_list_the_explanation_and_the_config_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(*SMALL, "--network", "400Gb/s", "--layouts", "3", capsys=capsys)
    assert status == 0
    assert "16 h100-sxm, 8 a node, 450 GB/s inside, 50 GB/s a device to other nodes; not calibrated" in out
    for word in ("s/step", "MFU %", "GPU-hours", "weights", "in flight", "temporaries", "1 ", "* "):
        assert word in out
    path = tmp_path / "plan.toml"
    status, out, _ = plan(*SMALL, "--explain", "2", "--write", str(path), capsys=capsys)
    assert status == 0
    for word in (
        "matrix products",
        "data-parallel exchange",
        "all of it, nothing hidden",
        "logits",
        f"--config {path}",
    ):
        assert word in out
    written = read_config(["--config", str(path)], world_size=16, unasked=UNASKED).config
    refuse_unrunnable_plans(written)
    assert written.layout.world_size == 16
    assert written.global_batch_size == 128


def test_a_plan_needs_neither_learning_rate_nor_data_and_its_run_asks_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, written = tmp_path / "small.toml", tmp_path / "plan.toml"
    config.write_text(
        "[model]\nnum_layers = 4\nhidden_size = 256\nnum_attention_heads = 4\n"
        "[training]\nseq_length = 512\nglobal_batch_size = 16\n"
    )
    words = ("--config", str(config), "--gpus", "4")
    status, out, _ = plan(*words, "--vocab-size", "50257", "--write", str(written), capsys=capsys)
    assert status == 0
    assert "s/step" in out
    with pytest.raises(ConfigError) as raised:
        read_config(["--config", str(written)])
    assert [problem.partition(";")[0] for problem in raised.value.problems] == [
        "lr is not given",
        "the length of the run is not given",
        "no data is given",
        "tokenizer_type=sentencepiece needs its file",
    ]
    status, _, err = plan(*words, capsys=capsys)
    assert status == 2
    assert "the vocabulary is not known" in err and "add --vocab-size" in err
    for given, complaint in (
        ("--train-iters -5", "train_iters=-5 must be at least 1"),
        (f"--train-iters {'9' * 350}", "must be at most"),
        ("--lr -1", "lr=-1.0 must be greater than 0"),
        ("--lr nan", "must be finite"),
        ("--lr 1e-3 --min-lr 1", "min_lr=1.0"),
        ("--train-iters 10 --lr-warmup-iters 20", "lr_warmup_iters=20"),
        ("--data-path 30 a 70 b c", "data_path="),
        ("--tokenizer-type null", "tokenizer_type=null needs"),
    ):
        vocabulary = () if "null" in given else ("--vocab-size", "50257")
        status, _, err = plan(*words, *vocabulary, *given.split(), capsys=capsys)
        assert status == 2
        assert complaint in err, given


def test_a_layout_by_name_is_explained_and_one_that_does_not_fit_has_a_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = plan(*SMALL, "--explain", "tp=4,pp=2,micro=1,zero=1,sp", capsys=capsys)
    assert status == 0
    assert "layout: tp 4 pp 2 dp 2, 1f1b, micro-batch 1, ZeRO-1, sequence parallel; 64 micro-batches a step" in out
    status, _, err = plan(*SMALL, "--explain", "tp=1,pp=1,zero=0,micro=4", capsys=capsys)
    assert status == 2
    assert err.count("\n") == 1
    for part in ("does not fit: it needs", "and lacks", "most are", "the cheapest change that makes it fit is"):
        assert part in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "0"], "--gpus 0 must be at least 1"),
        (["--gpus", "-4"], "--gpus -4 must be at least 1"),
        (["--gpus", "100000000000000000007"], "--gpus 100000000000000000007 must be at most 1,000,000"),
        (["--device", ""], "--device '' is not known; use one of"),
        (["--explain", ""], "--explain '' names no layout"),
        (["--explain", "9" * 5000], "is no row of the list"),
        (["--calibrate"], "--calibrate names no file; add"),
        (["--explain", "tp=8,sp,zero=7"], "zero must be one of 0, 1, 2, 3"),
        (["--device", "h100"], "--device h100 is not known; did you mean h100-sxm?"),
        (["--device", "a1000-sxm"], "--device a1000-sxm is not known; did you mean a100-sxm"),
        (["--network", "50"], "--network 50 needs a number and a unit"),
        (["--gpus-per-node", "0"], "--gpus-per-node 0 must be at least 1"),
        (["--layouts", "0"], "--layouts 0 must be at least 1"),
        (["--gpus", "1"], "no layout fits:"),
        (
            ["--gpus", "37"],
            "no layout of --gpus 37 is legal for this model with global_batch_size=128: tp, cp, pp and dp must divide "
            "heads, sequence, layers and batch; use --gpus 36",
        ),
        (["--explain", "tp=3"], "tp x pp x cp = 3 must divide --gpus 16"),
        (["--explain", "pp=2,zero=3,schedule=zb-h1"], "zero_stage=3 exchanges gradients after every backward"),
        (["--explain", "tq=4"], "tq is no part of a layout; did you mean tp=?"),
        (["--explain", "tp=four"], "tp needs a whole number"),
        (["--explain", "schedule=fast"], "schedule must be one of gpipe, 1f1b"),
        (["--explain", "99"], "--explain 99 is no row of the list, which has at most 6; name one of them, or ask for"),
        (["--explain", "123456789012"], "--explain 123456789012 is no row of the list"),
        (["--explain", "0"], "--explain 0 is no row of the list, which has at most 6"),
        further((["--explain", "99", "--layouts", "99"], "--explain 99 is no row of the list, which has")),
        (["--calibrate", "nowhere.json"], "--calibrate nowhere.json cannot be read"),
        (["--hiden-size", "64"], "--hiden-size is not a flag; did you mean --hidden-size?"),
        (["--write", "/nowhere/plan.toml"], "--write /nowhere/plan.toml cannot be written"),
        (["--probe", "/nowhere/probe.jsonl"], "--probe /nowhere/probe.jsonl cannot be written: No such file"),
        (["--tp", "8"], "--tp 8 is a part of a layout, and a plan tries all layouts; leave it out, or name one with"),
        (["--zero_stage", "3"], "--zero_stage 3 is a part of a layout"),
    ],
    ids=lambda each: " ".join(each)[:40] if isinstance(each, list) else "",
)
def test_impossible_requests_are_one_sentence_each(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = dict(zip(SMALL[::2], SMALL[1::2], strict=True)) | {words[0]: " ".join(words[1:])}
    given = [word for flag, value in flags.items() for word in ((flag, value) if [flag] != words else (flag,))]
    status, out, err = plan(*given, capsys=capsys)
    assert (status, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.long
def test_what_does_not_fit_names_what_is_missing_and_the_cheapest_change(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = plan(*SMALL[:4], "--gpus", "2", "--device", "a100-sxm-40", capsys=capsys)
    assert status == 2
    assert "lacks" in err and "most are" in err
    assert err.rstrip().endswith(("--zero3-in-pipelines", "which is slower", "--gpus 32"))


LLAMA_70B = ["--config", str(ROOT / "configs/llama-70b.toml"), "--vocab-size", "128256", "--device", "h100-sxm"]


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        further(["--gpus", "8", "--device", "b200", "--global-batch-size", "8"]),
        ["--gpus", "64", "--optimizer-cpu-offload", "--explain", "tp=8,pp=8,sp,zero=1"],
        ["--gpus", "64", "--param-cpu-offload", "--explain", "tp=8,sp,zero=3"],
        further(["--gpus", "8", "--adapter-type", "lora", "--load", "x"]),
        ["--gpus", "2", "--adapter-type", "lora", "--load", "x", "--quantize-base", "nf4", "--global-batch-size", "16"],
    ],
    ids=" ".join,
)
def test_the_layout_of_the_file_is_no_reason_to_refuse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = plan(*LLAMA_70B, *words, capsys=capsys)
    assert (status, err) == (0, "")
    for flag, note in (("--adapter-type", "adapters: the products"), ("-offload", "offloading: transfers over PCIe")):
        assert (note in out) == any(flag in word for word in words)


@pytest.mark.parametrize(
    ("memory_gib", "words", "remedy"),
    [
        (
            24,
            "--gpus 8 --explain tp=1",
            "no single change makes it fit; leave --explain out, which lists layouts that do",
        ),
        (20, "--gpus 4 --explain tp=1", "use devices of 140 GiB, such as h200"),
        (1e-9, "--gpus 4 --explain tp=2,pp=2,sp", "use devices of 80 GiB, such as a100-sxm"),
        further((12, "--gpus 7 --global-batch-size 112", "use --gpus 16")),
    ],
)
def test_remedies_help(
    memory_gib: float, words: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text(f'[own]\nlike = "h100-sxm"\nmemory_gib = {memory_gib}\n')
    status, _, err = plan(*SMALL[:4], "--device", str(tmp_path / "own.toml"), *words.split(), capsys=capsys)
    assert status == 2
    assert err.rstrip().endswith(f"; {remedy}")


def test_without_a_vocabulary_the_remedy_is_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(ROOT / "configs/llama-8b-8gpu.toml"), "--gpus", "8"]
    status, _, err = plan(*words, capsys=capsys)
    assert status == 2
    assert "add --vocab-size" in err


def test_flags_of_the_config_are_told_apart() -> None:
    own, others = split(["--config", "x.toml", "--gpus", "8", "--seq-length", "128", "--bf16", "--calibrate", "a", "b"])
    assert own == ["--config=x.toml", "--gpus=8", "--calibrate=a", "b"]
    assert others == ["--seq-length=128", "--bf16"]


def test_deepspeeds_estimates_are_printed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(*SMALL, "--estimator", "deepspeed", capsys=capsys)
    assert status == 0
    assert "2 nodes of 8 devices" in out
    assert "offload_param=cpu  offload_optimizer=cpu  zero_init=1" in out


def collective(name: str, *, ranks: int, nodes: int, bandwidth: float, alpha: float, accepted: bool = True) -> str:
    fit = {"alpha_s": alpha, "bandwidth_bytes_per_s": bandwidth, "mean_error": 0.05, "accepted": accepted}
    times = {"seconds_min": 1e-3, "seconds_median": 2e-3, "seconds_max": 3e-3}
    return json.dumps(
        {"collective": name, "bytes": 2**20, "ranks": ranks, "nodes": nodes, "axis": "tp", "fit": fit} | times
    )


@pytest.mark.long
def test_measurements_calibrate_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured, device = tmp_path / "measured.jsonl", tmp_path / "mine.toml"
    probe = {"device": "MyGPU", "precision": "bf16", "tflops": 600.0, "host_seconds_a_layer": 2e-4}
    probe |= {"memory_gb_s": 2478.0, "attention_tflops": 400.0}
    lines = [
        json.dumps({"probe": probe}),
        collective("all_reduce", ranks=8, nodes=1, bandwidth=160e9, alpha=60e-6),
        collective("all_reduce", ranks=8, nodes=1, bandwidth=160e9, alpha=60e-6),
        collective("all_gather", ranks=8, nodes=1, bandwidth=9e9, alpha=1.0, accepted=False),
        collective("all_gather", ranks=16, nodes=2, bandwidth=256e9, alpha=80e-6),
        collective("send_recv", ranks=8, nodes=1, bandwidth=90e9, alpha=15e-6),
        collective("send_recv", ranks=16, nodes=2, bandwidth=5e9, alpha=1.0),
    ]
    measured.write_text("\n".join(lines))
    words = ["--config", SMALL[1], "--vocab-size", "128256", "--device", "h100-sxm", "--calibrate", str(measured)]
    status, out, _ = plan(*words, "--write-device", str(device), capsys=capsys)
    assert status == 0
    assert "matrix products and host of MyGPU, 1 collectives in a node, 1 collectives over nodes" in out
    mine = find_device(str(device))
    assert mine.flops("bf16") == pytest.approx(600e12)
    assert mine.host_us == pytest.approx(200)
    assert mine.hbm_gb_s == pytest.approx(3000) and mine.attention_tflops == 400
    assert mine.all_reduce_gb_s == pytest.approx(160 * 2 * 7 / 8)
    assert mine.latency_us == pytest.approx(10)
    assert mine.network_all_reduce_gb_s == pytest.approx(256 * 15 / 16 / 8)
    assert (mine.send_gb_s, mine.send_us) == (pytest.approx(90), pytest.approx(15))
    status, out, _ = plan(*SMALL[:6], "--device", str(device), "--layouts", "1", capsys=capsys)
    assert status == 0
    assert "calibrated: matrix products and host of MyGPU" in out


def test_measurements_of_which_none_can_be_used_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "noisy.jsonl"
    measured.write_text(collective("all_reduce", ranks=8, nodes=1, bandwidth=1e9, alpha=1e-3, accepted=False))
    status, _, err = plan(*SMALL, "--calibrate", str(measured), capsys=capsys)
    assert status == 2
    assert "has no probe and no accepted fit" in err


@pytest.mark.processes
def test_a_probe_of_this_machine_calibrates_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "probe.jsonl"
    words = ["--config", str(ROOT / "configs/quick.toml"), "--vocab-size", "257", "--device", "cpu"]
    status, out, _ = plan(*words, "--probe", str(measured), capsys=capsys)
    assert status == 0, out
    (row,) = map(json.loads, measured.read_text().splitlines())  # a CPU has no links unless --gpus says so
    assert row["probe"]["tflops"] > 0
    assert 1e-6 < row["probe"]["host_seconds_a_layer"] < 1
    assert row["probe"]["memory_gb_s"] > 0
    status, out, _ = plan(*words, "--gpus", "2", "--calibrate", str(measured), "--layouts", "2", capsys=capsys)
    assert status == 0
    assert "calibrated: matrix products and host of" in out


@pytest.mark.sweep
@pytest.mark.processes
def test_a_probe_measures_the_links_of_the_ranks_of_a_machine(tmp_path: Path) -> None:
    measured = tmp_path / "probe.jsonl"
    words = ["--config", str(ROOT / "configs/quick.toml"), "--vocab-size", "257", "--device", "cpu", "--gpus", "2"]
    done = run_script(["tools/plan.py", *words, "--probe", measured], tmp_path)
    assert done.status == 0, done.errors
    row, *links = map(json.loads, measured.read_text().splitlines())
    assert row["probe"]["tflops"] > 0
    assert {line["fit"]["collective"] for line in links} == {"all_reduce", "send_recv"}


@pytest.mark.processes
def test_the_links_of_ranks_that_a_probe_measures_calibrate_a_device(tmp_path: Path) -> None:
    measured, links = tmp_path / "probe.jsonl", measured_links(2)
    assert {line["fit"]["collective"] for line in links} == {"all_reduce", "send_recv"}
    # Runs of a busy machine may differ by more than a fit allows: the numbers are those of a quiet one.
    accepted = [line | {"fit": line["fit"] | {"accepted": True, "reason": None}} for line in links]
    measured.write_text("".join(json.dumps(line) + "\n" for line in accepted))
    device = calibrated(find_device("cpu"), [measured])
    assert device.calibrated is not None and "transfers between two devices" in device.calibrated
    assert device.all_reduce_gb_s != find_device("cpu").all_reduce_gb_s
    of_pair = Links.of(device, Efficiencies())
    assert of_pair.send(1, 2, 1e9) == pytest.approx(1 / device.send_gb_s + 1e-6 * device.send_us)
