"""Tests of config reading: values arrive as given, and one error lists everything that is wrong."""

import dataclasses
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from paths import ROOT

from megatronish.config.config import Config
from megatronish.config.data import parse_blend, parse_split
from megatronish.config.dump import resolved, to_toml
from megatronish.config.fields import ALIASES, FIELDS, SECTIONS, with_fields
from megatronish.config.read import ConfigError, read_config
from megatronish.optim.optimizer import OPTIMIZERS
from megatronish.schedule.schedules import SCHEDULES

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
DEMO = str(ROOT / "configs" / "demo.toml")
MODEL = {
    "--num-layers": "12",
    "--hidden-size": "96",
    "--num-attention-heads": "12",
    "--seq-length": "64",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "1e-3",
}


def small(*words: str) -> list[str]:
    """A command line of a sound model but for its data, in which `words` stand instead of what they override."""
    kept = [word for flag, value in MODEL.items() if flag not in words for word in (flag, value)]
    return [*kept, *words]


def problems(argv: Sequence[str], world_size: int | None = None) -> list[str]:
    """What is said of a command line, a sentence each; none if it is accepted."""
    try:
        read_config(argv, world_size=world_size)
    except ConfigError as error:
        return error.problems
    return []


def read(*words: str, world_size: int | None = None) -> Config:
    return read_config(small("--mock-data", *words), world_size=world_size).config


def toml(folder: Path, text: str) -> list[str]:
    path = folder / "mine.toml"
    path.write_text(text)
    return ["--config", str(path)]


# reading


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_sound_and_survives_being_written_down(path: Path, tmp_path: Path) -> None:
    config, _ = read_config(["--config", str(path), "--mock-data"])
    assert config.log.run_dir == f"runs/{path.stem}"
    assert config.data.vocab_size == 4096
    written = tmp_path / "config.toml"
    written.write_text(to_toml(config))
    assert read_config(["--config", str(written)]).config == config
    assert tomllib.loads(to_toml(config)) == resolved(config)


def test_what_is_written_down_keeps_every_text_and_number(tmp_path: Path) -> None:
    odd = '--"quotes"\n\\ tab\t del\x7f snowman ☃ 😀 = [x] # no comment'
    config = read(f"--sample-prompt={odd}", "--lr", "1.2345678901234567e-05", "--rampup-batch-size", "2", "2", "0")
    config = with_fields(config, global_batch_size=8)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert read_config(["--config", str(path)]).config == config


def test_the_demo_is_the_model_of_the_main_job() -> None:
    config = read_config(["--config", DEMO, "--mock-data"]).config
    assert (config.model.ffn_size, config.model.num_kv_heads, config.model.head_size) == (512, 8, 16)
    assert str(config.layout) == "dp 2 x tp 2 x pp 2"
    assert 1e6 < config.global_batch_size * config.training.seq_length * (config.training.train_iters or 0) < 2e6


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 1, 4), (4, 2, 1)])
def test_the_demo_takes_any_layout_that_divides_it(sizes: tuple[int, int, int]) -> None:
    dp, tp, pp = map(str, sizes)
    layout = read_config(["--config", DEMO, "--mock-data", "--dp", dp, "--tp", tp, "--pp", pp]).config.layout
    assert (layout.dp, layout.tp, layout.pp) == sizes


def test_all_spellings_of_a_flag_are_the_same() -> None:
    for words in (["--tp", "2"], ["--tp=2"], ["--tensor-model-parallel-size", "2"], ["--tensor_model_parallel_size=2"]):
        assert read(*words).parallel.tensor_model_parallel_size == 2
    assert read("--weight-decay=-0").optimizer.weight_decay == 0
    assert read("--no-overlap-grad-reduce").parallel.overlap_grad_reduce is False
    assert read("--no-check-for-nan-in-loss-and-grad").training.check_for_nan_in_loss_and_grad is False
    assert read("--sample-prompt=--x").log.sample_prompt == "--x"
    assert read("--run-dir", "elsewhere").log.run_dir == "elsewhere"
    assert read().log.run_dir == "runs/pretrain_gpt"


def test_megatrons_spellings_mean_our_fields(tmp_path: Path) -> None:
    assert read("--use-rotary-position-embeddings").model.position_embedding_type == "rope"
    assert read("--use-rotary-position-embeddings", "--use-rope-scaling").model.rope_scaling == "llama3"
    for theirs, ours in (("fused", "flash"), ("local", "fused_softmax"), ("unfused", "unfused")):
        words = ("--attention-dropout", "0", "--attention-backend", theirs)
        assert read(*words).training.attention_backend == ours
    (tmp_path / "spm.model").touch()
    words = small("--tokenizer-type", "Llama2Tokenizer", "--data-path", str(tmp_path / "x"))
    (tmp_path / "x.bin").touch()
    (tmp_path / "x.idx").touch()
    config = read_config([*words, "--tokenizer-model", str(tmp_path / "spm.model")]).config
    assert config.data.tokenizer_type == "sentencepiece"


def test_a_flag_overrides_the_file_and_may_unset_it() -> None:
    config = read_config(["--config", DEMO, "--mock-data", "--num-layers", "4", "--save-interval", "None"]).config
    assert config.model.num_layers == 4
    assert config.checkpoint.save_interval is None


def test_help_and_import_are_quick_and_need_no_torch() -> None:
    program = "import sys; from megatronish.config.read import read_config\nassert 'torch' not in sys.modules\n"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program + "read_config(['-h'])"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # of work, whoever else is busy
    assert done.returncode == 0, done.stderr
    assert "--config FILE.toml" in done.stdout
    words = " ".join(done.stdout.split())
    for section in SECTIONS:
        assert f"[{section}]" in words and f"─ {section} options" in words
    for part in ("model options", "--sequence-parallel, --no-sequence-parallel", "--tp"):
        assert part in done.stdout
    assert seconds < 1


# world size and derived values


def test_data_parallel_size_follows_from_the_world() -> None:
    assert read("--tp", "2").layout.dp == 1
    assert read("--tp", "2", world_size=8).layout.dp == 4
    assert read("--tp", "2", "--dp", "2").layout.world_size == 4


@pytest.mark.parametrize(
    ("words", "world_size", "sentence"),
    [
        (["--tp", "2", "--pp", "2"], 6, r"world size 6 must be divisible by tp 2 x pp 2 x cp 1 = 4; start 4 processes"),
        (["--tp", "2", "--dp", "3"], 8, r"world size 8 must be dp 3 x tp 2 .* = 6; start 6 processes, or use --dp 4"),
    ],
)
def test_a_world_that_does_not_fit_is_told(words: list[str], world_size: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(*words, world_size=world_size)


def test_sequence_parallel_with_one_tp_rank_is_off_and_noted() -> None:
    config, notes = read_config(small("--mock-data", "--sequence-parallel"))
    assert config.parallel.sequence_parallel is False
    assert any(note.startswith("sequence_parallel is off") for note in notes)


@pytest.mark.parametrize(("flags", "precision"), [([], "fp32"), (["--bf16"], "bf16")])
def test_a_loss_scale_without_fp16_is_idle_and_noted(flags: list[str], precision: str) -> None:
    _, notes = read_config(small("--mock-data", *flags, "--initial-loss-scale", "65536", "--hysteresis", "3"))
    told = "initial_loss_scale=65536.0, hysteresis=3: idle, as"
    assert f"{told} {precision} needs no loss scale; --fp16 would use it" in notes
    assert not any("idle" in note for note in read_config(small("--mock-data", "--hysteresis", "2")).notes)


def test_megatrons_flags_of_fp16_mean_the_same_here(tmp_path: Path) -> None:
    words = ["--fp16", "--initial-loss-scale", "65536", "--min-loss-scale", "2", "--hysteresis", "4"]
    config, notes = read_config(small("--mock-data", *words, "--loss-scale-window", "500"))
    training = config.training
    assert (training.precision, training.initial_loss_scale, training.min_loss_scale) == ("fp16", 65536.0, 2.0)
    assert (training.loss_scale_window, training.hysteresis) == (500, 4)
    assert not any("idle" in note for note in notes)
    # What is typed wins over the file.
    file = toml(tmp_path, "[training]\nfp16 = true\n")
    config, notes = read_config(small("--mock-data", *file, "--bf16"))
    assert config.training.precision == "bf16"
    assert notes[0].endswith("fp16 (by --bf16)")


def test_a_schedule_of_the_table_can_be_named_in_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataclasses.replace(SCHEDULES["zb-v"], name="mine", num_chunks=3)
    monkeypatch.setitem(SCHEDULES, "mine", mine)
    file = toml(tmp_path, '[parallel]\npp = 2\npipeline_schedule = "mine"\n')
    parallel = read(*file).parallel
    assert (parallel.schedule, parallel.num_chunks(12)) == ("mine", 3)
    assert problems(small("--mock-data", *file, "--num-virtual-stages-per-pipeline-rank", "2")) == [
        "pipeline_schedule=mine has 3 chunks a stage in any case; leave the virtual stages out"
    ]
    assert (
        "pipeline_schedule=mine computes those of weights"
        in problems(small("--mock-data", *file, "--dp", "2", "--zero-stage", "2"))[0]
    )
    monkeypatch.delitem(SCHEDULES, "mine")
    assert problems(small("--mock-data", *file)) == [
        "[parallel] pipeline_schedule = mine: pipeline_schedule must be one of gpipe, 1f1b, interleaved, zb-h1 or "
        "zb-v; others are those of plug-ins (--plugin)"
    ]


def test_the_optimizers_of_a_config_are_those_of_the_table() -> None:
    assert FIELDS["optimizer"].choices == tuple(OPTIMIZERS)


# what is wrong, all at once


def test_problems_of_file_flags_and_rules_come_together(tmp_path: Path) -> None:
    words = toml(tmp_path, '[model]\nnum_layer = 4\nhidden_size = 96\n[trainin]\n[data]\nvocab_size = "x"\n')
    told = "\n".join(
        problems([*words, "--num-attention-heads", "x", "--skip-train", "--seq-length", "-1", "--lrr", "1"])
    )
    for sentence in (
        "[model] num_layer is not a key; did you mean num_layers?",
        "[trainin] is not a section; did you mean [training]?",
        "[data] vocab_size = x: vocab_size must be a whole number",
        "--num-attention-heads x: num_attention_heads must be a whole number",
        "--skip-train is refused: use tools/evaluate.py",
        "--lrr is not a flag; did you mean --lr?",
        "seq_length=-1 must be at least 1",
        "num_layers is not given; set it in [model] of the config file, or add --num-layers",
        "the length of the run is not given; add --train-iters or --train-samples",
        "no data is given",
    ):
        assert sentence in told
    assert "num_attention_heads is not given" not in told


def test_the_error_counts_its_problems() -> None:
    assert str(ConfigError(["a", "b"])) == "2 problems in the configuration:\n  a\n  b"
    assert str(ConfigError(["a"])).startswith("1 problem in")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[model\n", "is not TOML: "),
        ("num_layers = 3\n", "num_layers stands outside of any section; move it into [model]"),
        ("[training]\nnum_layers = 3\n", "[training] num_layers belongs in [model]; move it there"),
        ("[model]\nnum_layers = true\n", "num_layers = true: num_layers must be a whole number such as 4"),
        ("[model]\nnum_layers = [1, 2]\n", "num_layers = [1, 2]: num_layers must be a whole number"),
        ("[log.run_dir]\nx = 1\n", "run_dir must be a text"),
        ("[data]\ndata_path = [['a', 1]]\n", "data_path must be a list of texts"),
        ("[training]\nbf16 = []\n", "bf16 = []: bf16 must be true or false"),
        ('[model]\nswiglu = "yes"\n', "swiglu must be true or false"),
        ("[parallel]\ntp = 2\ntensor_model_parallel_size = 4\n", "contradicts"),
        ("[training]\nperform_rl_step = true\n", "[training] perform_rl_step = true is refused"),
        ("[training]\nfp16 = true\nbf16 = true\n", "contradicts [training] fp16 = true: a model is computed in one"),
        ("[training]\ntrain_iters = 3\ntrain_samples = 3\n", "contradicts"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in "\n".join(problems(toml(tmp_path, text)))


@pytest.mark.parametrize(
    "section", ["[model]\nnum_layers = true", "[model]\nnum_layers = [[1]]", "[log]\nnum_layers = 3"]
)
def test_a_value_of_the_file_that_does_not_fit_is_told_once(tmp_path: Path, section: str) -> None:
    words = small("--mock-data")[2:]  # without --num-layers 12
    (sentence,) = problems([*words, *toml(tmp_path, f"{section}\n")])
    assert "num_layers" in sentence


def test_a_single_dash_makes_no_flag() -> None:
    assert problems(small("--mock-data", "-tp", "2")) == ["-tp is not a flag; did you mean --tp?"]


def test_a_flag_with_an_empty_value_and_a_flag_that_has_no_off() -> None:
    assert problems(small("--mock-data", "--lr=")) == ["--lr '': lr must be a number such as 0.1"]
    assert problems(small("--mock-data", "--no-num-layers")) == [
        "--no-num-layers is not a flag: --num-layers is a whole number such as 4, and has no off; leave it out"
    ]
    assert problems(small("--plugin", "")) == [
        "--plugin '' is no module; write my.module, or the path of a file that ends in .py"
    ]


def test_a_config_that_is_not_there_is_told_with_its_neighbours() -> None:
    (sentence,) = problems(["--config", str(ROOT / "configs" / "dmo.toml")])
    assert "does not exist; there are " in sentence
    assert "demo.toml" in sentence
    assert "is not a flag" in problems(["--config", "nowhere.toml", "--bogus"])[1]
    assert "must name one file" in problems(["--config"])[0]


def test_a_word_that_belongs_to_no_flag_is_told() -> None:
    assert problems(["demo.toml", *small("--mock-data")]) == [
        "'demo.toml' belongs to no flag; write --config demo.toml"
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--tp 8",
            r"^num_attention_heads=12 must be divisible by tensor_model_parallel_size=8; use .* 1, 2, 3, 4, 6 or",
        ),
        ("--pp 16", r"^num_layers=12 is less than pipeline_model_parallel_size=16, .*; use --pp 12 or fewer"),
        ("--pp 8 --pipeline-schedule zb-v", r"^num_layers=12 is less than .*=8 x 2 chunks, .*; use --pp 6 or fewer"),
        ("--pipeline-schedule interleaved", r"^pipeline_schedule=interleaved needs several chunks a stage; add --num"),
        (
            "--pp 2 --pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2",
            r"^pipeline_schedule=zb-h1 has one chunk a stage, .*; use --pipeline-schedule interleaved",
        ),
        (
            "--pp 2 --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 3",
            r"^pipeline_schedule=zb-v has 2 chunks .*; leave the virtual stages out",
        ),
        (
            "--pp 2 --num-layers-per-virtual-pipeline-stage 4",
            r"^num_layers=12 must be divisible by .*=2 x num_layers_per_virtual_pipeline_stage=4; use --num-virtual",
        ),
        (
            "--pp 2 --num-layers-per-virtual-pipeline-stage 3 --num-virtual-stages-per-pipeline-rank 2",
            r"contradicts .*: both say how many chunks a stage holds; leave one of them out",
        ),
        (
            "--pp 3 --decoder-first-pipeline-num-layers 11",
            r"^decoder_first_pipeline_num_layers=11 leaves 1 of num_layers=12 to the other 2 stages, .*; use smaller",
        ),
        (
            "--pp 2 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 5",
            r"^decoder_first_.*=6 and decoder_last_.*=5 must add up to num_layers=12; change one by \+1",
        ),
        (
            "--decoder-last-pipeline-num-layers 4",
            r"^decoder_last_.*=4 needs pipeline_model_parallel_size > 1; add --pp",
        ),
        (
            "--pp 2 --pipeline-schedule zb-v --decoder-first-pipeline-num-layers 1",
            r"^decoder_first_.*=1 must be at least 2, a layer for each chunk of the stage; use more",
        ),
        (
            "--pp 2 --pipeline-split auto --decoder-first-pipeline-num-layers 5",
            r"contradicts .*: layers are shared out by hand or by weight; leave one of them out",
        ),
        ("--cp 3", r"^seq_length=64 must be divisible by 2 x context_parallel_size=3 = 6; use --seq-length 66"),
        (
            "--cp 2 --tp 12 --sequence-parallel",
            r"^seq_length=64 must be divisible by both 2 x .*=2 and .*=12 = 24; use --seq-length 72, or leave --seq",
        ),
        (
            "--cp 8 --tp 3 --cp-comm-type a2a",
            r"^cp_comm_type=a2a trades .*=12 / .*=3 = 4 must be divisible by context_parallel_size=8; use .* p2p",
        ),
        (
            "--cp 2 --attention-backend unfused",
            r"^attention_backend=unfused needs the scores of whole rows, and .* block by block; use --cp-comm-type a2a",
        ),
        (
            "--attention-backend flash",
            r"^attention_backend=flash must have attention_dropout=0, not 0.1: .*; add --attention-dropout 0, or use",
        ),
        ("--cp 2 --cp-comm-type ring", r"cp_comm_type must be one of p2p or a2a"),
        (
            "--recompute-granularity selective --recompute-method block",
            r"^recompute_method=block belongs to full recomputation, not to recompute_granularity=selective; add --rec",
        ),
        ("--recompute-num-layers 2", r"^recompute_num_layers=2 belongs to full .*; add --recompute-granularity full"),
        (
            "--recompute-granularity full --distribute-saved-activations",
            r"^distribute_saved_activations .*size, which is 1; add --tp 2, or leave it out",
        ),
        (
            "--tp 2 --sequence-parallel --recompute-granularity full --distribute-saved-activations",
            r"^distribute_saved_activations .*, which --sequence-parallel does already; leave one",
        ),
        (
            "--profile-schedule --profile-step-start 3 --profile-step-end 3",
            r"^profile_step_end=3 must be greater than profile_step_start=3; use 4 for one step",
        ),
        (
            "--profile-schedule --profile-step-start 11 --profile-step-end 12",
            r"^profile_step_start=11 is after the last step, train_iters=10; use an earlier one",
        ),
        (
            "--use-distributed-optimizer --zero-stage 0",
            r"^use_distributed_optimizer=true is ZeRO-1 and contradicts zero_stage=0; leave one of them out",
        ),
        (
            "--pp 2 --pipeline-schedule zb-h1 --zero-stage 2",
            r"^zero_stage=2 exchanges gradients after every backward, but .*=zb-h1 .* later; use --zero-stage 1, or",
        ),
        (
            "--pp 2 --pipeline-schedule zb-v --zero-stage 3",
            r"^zero_stage=3 exchanges .*=zb-v computes those of weights later; .* or --pipeline-schedule 1f1b",
        ),
        (
            "--dp 2 --cp 2 --zero-stage 1 --dp-replicate 3",
            r"^num_dist.*_instances=3 must divide data_.*=2 x context_.*=2 = 4, .*; use --num-.*-instances 1, 2 or 4",
        ),
        (
            "--dp 2 --num-distributed-optimizer-instances 2",
            r"^num_dist.*_instances=2 groups .* share nothing with zero_stage=0; add --zero-stage 1, 2 or 3, or leave",
        ),
        (
            "--dp 2 --optimizer-cpu-offload",
            r"^optimizer_cpu_offload .*, and zero_stage=0 shares nothing; add --zero-stage 1, 2 or 3, or leave it out",
        ),
        (
            "--dp 2 --zero-stage 2 --param-cpu-offload",
            r"^param_cpu_offload .*, and zero_stage=2 shares no parameters; add --zero-stage 3, or leave it out",
        ),
        (
            "--pp 2 --num-layers-per-virtual-pipeline-stage 3 --decoder-first-pipeline-num-layers 5",
            r"^num_layers_per_virtual_pipeline_stage=3 makes all chunks equal, .*; use --num-virtual-stages",
        ),
        (
            "--pp 2 --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 1",
            r"^pipeline_schedule=interleaved needs several chunks a stage",
        ),
        ("--global-batch-size 400000", r"is 200000 micro-batches, and must be at most 100000; use a smaller batch"),
        ("--yaml-cfg x", r"is refused: use --config FILE.toml"),
        (f"--num-layers {10**11} --pp 7", r"^num_layers=10+ must be at most 100000; change --num-layers"),
        (f"--hidden-size {10**400}", r"^hidden_size=10+ must be at most 2147483647; change --hidden-size"),
        (f"--seed {10**19}", r"^seed=10+ must be at most 9223372036854775807; the default is 1234"),
        ("--sample-prompt a\udcff", r"^'a\\udcff' is not UTF-8 text, as a config must be; type it again"),
        ("--run-dir=x\udcff", r"^'--run-dir=x\\udcff' is not UTF-8 text"),
        ("--tp 0", r"^tensor_model_parallel_size=0 must be at least 1; the default is 1"),
        ("--hidden-size 100", r"^hidden_size=100 must be divisible by num_attention_heads=12"),
        (
            "--ffn-hidden-size 99 --tp 2",
            r"^ffn_hidden_size=99 must be divisible by tensor_model_parallel_size=2; .* 1, 3,",
        ),
        ("--swiglu --hidden-size 12", r"^ffn_hidden_size derived from hidden_size=12 is 0; add --ffn-hidden-size"),
        (
            "--group-query-attention --num-query-groups 5",
            r"^num_attention_heads=12 must be divisible by num_query_groups=5",
        ),
        (
            "--group-query-attention --num-query-groups 3 --tp 2",
            r"^num_query_groups=3 must be divisible by tensor_.*1 or 3",
        ),
        ("--num-query-groups 3", r"^num_query_groups=3 needs group_query_attention .* add --group-query-attention"),
        (
            "--seq-length 63 --tp 2 --sequence-parallel",
            r"^seq_length=63 must be divisible by tensor_.*sequence-parallel out",
        ),
        ("--max-position-embeddings 32", r"^max_position_embeddings=32 must be at least seq_length=64; use --max-pos"),
        ("--position-embedding-type rope --kv-channels 7", r"^rotary_percent=1.0 of a head of size 7 is 7"),
        ("--rope-scaling-type yarn", r"^rope_scaling_type=yarn needs position_embedding_type=rope"),
        (
            "--global-batch-size 7",
            r"^global_batch_size=7 must be divisible by micro_batch_size=2 x .* use --global-batch-.*8",
        ),
        (
            "--rampup-batch-size 3 2 10 --global-batch-size 8",
            r"^rampup_batch_size=3 2 10: START and INCREMENT must be div",
        ),
        (
            "--rampup-batch-size 2 4 10 --global-batch-size 8",
            r"^rampup.*plus a whole number of INCREMENTs; use .*size 10",
        ),
        ("--rampup-batch-size 1 2", r"^--rampup-batch-size 1 2: rampup_batch_size must be 3 whole numbers"),
        ("--min-lr 1", r"^min_lr=1.0 must not exceed lr=0.001"),
        ("--decoupled-min-lr 1e-4", r"^decoupled_min_lr=0.0001 needs the rate that decays to it; add --decoupled-lr"),
        ("--decoupled-lr 0", r"^decoupled_lr=0.0 must be greater than 0; change --decoupled-lr"),
        (
            "--decoupled-lr 1e-4 --min-lr 5e-4",
            r"^min_lr=0.0005 must not exceed decoupled_lr=0.0001; add --decoupled-min-lr, or a larger --decoupled-lr",
        ),
        (
            "--decoupled-lr 1e-4 --decoupled-min-lr 5e-4",
            r"^decoupled_min_lr=0.0005 must not exceed decoupled_lr=0.0001; use a smaller one, or a larger",
        ),
        ("--decoupled-lr 1e-4 --lr-warmup-init 5e-4", r"^lr_warmup_init=0.0005 must not exceed decoupled_lr=0.0001"),
        (
            "--window-attn-skip-freq 2",
            r"^window_attn_skip_freq=2 needs window_size; add --window-size, or leave it out",
        ),
        (
            "--window-size 8 --window-attn-skip-freq [1]*3",
            r"^window_attn_skip_freq=\[1\]\*3 is a list of 3, and must have .* change --window-attn-skip-freq",
        ),
        (
            "--no-rope-freq 4",
            r"^no_rope_freq=4 needs position_embedding_type=rope; add --position-embedding-type rope, ",
        ),
        (
            "--position-embedding-type rope --no-rope-freq x",
            r"^no_rope_freq=x is no pattern; it must be a number N for",
        ),
        ("--glu-linear-offset 1", r"^glu_linear_offset=1.0 needs a gated MLP; add --quick-geglu or --swiglu, or leave"),
        ("--squared-relu --activation-func-clamp-value 7", r"^activation_func_clamp_value=7.0 needs a gated MLP"),
        ("--swiglu --activation-func-clamp-value 0", r"^activation_func_clamp_value=0.0 must be greater than 0"),
        ("--swiglu --glu-linear-offset inf", r"^glu_linear_offset=inf must not be negative"),
        ("--softmax-type sinks", r"softmax_type must be one of vanilla, off-by-one or learnable"),
        (
            "--position-embedding-type alibi --use-rope-scaling",
            r"^rope_scaling_type=llama3 needs position_embedding_type=rope, not alibi",
        ),
        ("--lr-warmup-iters 10", r"^lr_warmup_iters=10 must be less than train_iters=10"),
        ("--lr-decay-style WSD", r"^lr_decay_style=WSD needs the length of its last part; add --lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", r"^lr_wsd_decay_iters=11 must not exceed train_iters=10"),
        ("--lr-decay-style cubic", r"must be one of constant, linear, cosine, inverse-square-root or WSD"),
        ("--start-weight-decay 0.1", r"need a weight_decay_incr_style other than constant"),
        ("--weight-decay-incr-style linear", r"needs both ends; add --start-weight-decay and --end-weight-decay"),
        ("--adam-beta2 1", r"^adam_beta2=1.0 must be at least 0 and less than 1; the default is 0.999"),
        ("--hidden-dropout 1", r"^hidden_dropout=1.0 must be"),
        ("--fp16 --bf16", r"^--bf16 contradicts --fp16: a model is computed in one precision; leave one of them out"),
        (
            "--fp16 --initial-loss-scale 4 --min-loss-scale 8",
            r"^min_loss_scale=8.0 must not exceed initial_loss_scale=4.0; use a smaller one, or a larger --initial",
        ),
        ("--fp16 --min-loss-scale 0", r"^min_loss_scale=0.0 must be greater than 0; the default is 1.0"),
        (
            "--fp16 --initial-loss-scale inf",
            r"^initial_loss_scale=inf must be at most 2\^120, .*; the default is 42949",
        ),
        ("--fp16 --loss-scale -1", r"^loss_scale=-1.0 must not be negative; change --loss-scale"),
        ("--fp16 --hysteresis 0", r"^hysteresis=0 must be at least 1; the default is 2"),
        ("--fp16 --loss-scale-window 0", r"^loss_scale_window=0 must be at least 1; the default is 1000"),
        (
            "--fp16 --loss-scale 128 --hysteresis 3",
            r"^--loss-scale 128 contradicts --hysteresis 3: a loss scale that is given follows no rule; leave one",
        ),
        (
            "--fp16 --grad-reduce-in-bf16",
            r"^grad_reduce_in_bf16 rounds gradients further than a run in fp16 does; add --bf16, or leave it out",
        ),
        ("--clip-grad nan", r"^clip_grad=nan must not be negative"),
        ("--lr inf", r"^lr=inf must be greater than 0"),
        ("--window-size 0", r"^window_size=0 must be at least 1"),
        ("--split 1,2,3,4", r"^split='1,2,3,4' must be up to three parts"),
        ("--multiple-validation-sets", r"^--mock-data contradicts --multiple-validation-sets: made-up tokens stand in"),
        ("--device tpu", r"^--device tpu: device must be one of auto, cpu or cuda"),
        ("--device cpu --distributed-backend nccl", r"^distributed_backend=nccl needs CUDA"),
        ("--finetune", r"^finetune takes its weights from a checkpoint, and none is given; add --load DIR"),
        ("--tp", r"^--tp: tensor_model_parallel_size must be a whole number"),
        ("--bf16 maybe", r"^--bf16 maybe: bf16 must be true or false"),
        ("--use-mcore-models yes", r"^--use-mcore-models yes must have no value; it has 1"),
    ],
)
def test_each_rule_is_told_by_value_rule_and_remedy(words: str, sentence: str) -> None:
    (told,) = problems(small("--mock-data", *words.split()))
    assert re.search(sentence, told), told


def test_every_number_has_a_range_and_every_whole_one_a_maximum() -> None:
    for field in FIELDS.values():
        bounds = [bound.is_maximum for bound in field.ranges]
        if field.type is int:
            assert bounds == [False, True], f"{field.name}: mark its least and its largest value"
        elif field.type is float:
            assert bounds in ([False], [False, True]), f"{field.name}: mark its range"
        else:
            assert not bounds, f"{field.name} is no number"


# files


def test_a_missing_data_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    for name in ("a.bin", "b_text_document.bin", "b_text_document.idx"):
        (tmp_path / name).touch()
    words = small("--tokenizer-type", "bytes", "--data-path")
    assert problems([*words, f"{tmp_path}/a"])[0].endswith(
        f"{tmp_path}/a.idx does not exist; make them with megatronish preprocess, or use --mock-data"
    )
    assert problems([*words, f"{tmp_path}/b"])[0].endswith(f"use {tmp_path}/b_text_document")
    assert problems([*words, f"{tmp_path}/a.bin"])[0].endswith(f"leave .bin off: use {tmp_path}/a")
    assert problems([*words, f"{tmp_path}/b_text_document"]) == []


def test_a_tokenizer_without_its_file_is_told(tmp_path: Path) -> None:
    for end in ("bin", "idx"):
        (tmp_path / f"a.{end}").touch()
    words = small("--data-path", f"{tmp_path}/a")
    assert "tokenizer_type=sentencepiece needs its file" in problems(words)[0]
    assert "tokenizer_model=x.model does not exist" in problems([*words, "--tokenizer-model", "x.model"])[0]
    assert "needs a vocabulary; add --vocab-size" in problems([*words, "--tokenizer-type", "NullTokenizer"])[0]
    gpt2 = problems([*words, "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(tmp_path / "a.bin")])
    assert "vocab_file and merge_file belong together" in gpt2[0]


@pytest.mark.parametrize(
    ("values", "blend"),
    [
        ([], []),
        (["a"], [(None, "a")]),
        (["a", "b", "c"], [(None, "a"), (None, "b"), (None, "c")]),
        (["0.3", "a", "0.7", "b"], [(0.3, "a"), (0.7, "b")]),
        (["1", "./2"], [(1.0, "./2")]),
    ],
)
def test_a_blend_is_prefixes_or_weights_and_prefixes(values: list[str], blend: list[tuple[float | None, str]]) -> None:
    assert parse_blend(values) == blend


@pytest.mark.parametrize("values", [["1"], ["a", "1"], ["1", "a", "b"], ["1", "a", "b", "2"], ["0", "a"], ["-1", "a"]])
def test_a_crooked_blend_is_told(values: list[str]) -> None:
    with pytest.raises(ValueError, match=r"weights and prefixes must alternate|must not be negative"):
        parse_blend(values)


def test_a_split_sums_to_one() -> None:
    assert parse_split("95, 5, 0") == (0.95, 0.05, 0.0)
    assert parse_split("1") == (1.0, 0.0, 0.0)
    for bad in ("", "0,0", "a,b", "1,-1", "nan", "1,2,3,4"):
        with pytest.raises(ValueError, match="must be up to three parts"):
            parse_split(bad)


# settings that exclude each other

CONFLICTS = [
    "--train-iters 10 --train-samples 100",
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
    "--lr-warmup-fraction 0.1 --lr-warmup-samples 3",
    "--train-iters 10 --lr-decay-samples 100",
    "--swiglu --squared-relu",
    "--swiglu --openai-gelu",
    "--openai-gelu --squared-relu",
    "--quick-geglu --swiglu",
    "--quick-geglu --squared-relu",
    "--quick-geglu --openai-gelu",
    "--mock-data --data-path x",
    "--data-path x --train-data-path y",
    "--pp 2 --pipeline-split auto --account-for-embedding-in-pipeline-split",
    "--rampup-batch-size 2 2 8 --step-batch-size-schedule 0:2",
]


@pytest.mark.parametrize("words", CONFLICTS)
def test_contradicting_flags_are_an_error(words: str) -> None:
    assert any(
        "contradicts" in problem and problem.endswith("leave one of them out") for problem in problems(words.split())
    )


def test_a_repeated_flag_that_says_the_same_is_fine() -> None:
    assert read("--tp", "2", "--tensor-model-parallel-size=2").layout.tp == 2
    assert read("--no-swiglu", "--squared-relu").model.squared_relu


LAST_COUNTS = {
    "--tp 2 --tp 4": "--tp is given twice; the last, --tp 4, counts",
    "--tp 2 --tp 1 --tp=4": "--tp is given 3 times; the last, --tp 4, counts",
    "--tp 2 --tensor-model-parallel-size 4": "--tp 2, --tensor-model-parallel-size 4 set the same field, "
    "tensor_model_parallel_size; the last, --tensor-model-parallel-size 4, counts",
}


@pytest.mark.parametrize("words", LAST_COUNTS)
def test_the_last_of_a_repeated_flag_counts_and_a_note_says_so(words: str) -> None:
    config, notes = read_config(small("--mock-data", *words.split()))
    assert config.layout.tp == 4
    assert notes[0] == LAST_COUNTS[words]
    assert not any("counts" in note for note in read_config(small("--mock-data", "--tp", "2", "--tp", "2")).notes)
    assert not read("--tp", "2", "--sequence-parallel", "--no-sequence-parallel").parallel.sequence_parallel
    rope = ("--position-embedding-type", "rope", "--use-rope-scaling", "--rope-scaling-type", "yarn")
    assert read(*rope).model.rope_scaling_type == "yarn"


def test_what_is_typed_makes_its_conflict_in_the_file_idle() -> None:
    config, notes = read_config(
        ["--config", DEMO, "--mock-data", "--train-samples", "320", "--lr-warmup-samples", "32"]
    )
    assert config.training.train_iters is None
    assert config.optimizer.lr_warmup_fraction is None
    assert config.data.data_path == ()
    (line,) = [note for note in notes if note.startswith("idle in ")]
    for part in (
        "train_iters (by --train-samples 320)",
        "lr_warmup_fraction (by --lr-warmup-samples 32)",
        "data_path (",
    ):
        assert part in line


def test_a_parent_that_is_switched_off_takes_its_child_along(tmp_path: Path) -> None:
    words = toml(tmp_path, "[model]\ngroup_query_attention = true\nnum_query_groups = 4\n")
    assert read_config(small("--mock-data", *words)).config.model.num_kv_heads == 4
    assert read_config(small("--mock-data", *words, "--no-group-query-attention")).config.model.num_kv_heads == 12


# Megatron-LM's flags: see also test_megatron_flags.py


def test_field_names_are_unique_over_the_sections() -> None:
    assert len(FIELDS) == sum(len(dataclasses.fields(getattr(Config(), f.name))) for f in dataclasses.fields(Config))
    assert not set(ALIASES) & set(FIELDS)


def test_what_megatron_scripts_say_of_pipelines_and_recomputation_is_understood() -> None:
    words = small("--mock-data", "--pp", "2", "--recompute-activations", "--cp", "2", "--cp-comm-type", "p2p")
    config = read_config([*words, "--num-layers-per-virtual-pipeline-stage", "3"]).config
    assert config.recompute.recompute_granularity == "selective"
    assert (config.parallel.schedule, config.parallel.num_chunks(12)) == ("interleaved", 2)
    assert read_config(
        small("--mock-data", "--num-virtual-stages-per-pipeline-rank", "1")
    ).config.parallel == dataclasses.replace(
        read_config(small("--mock-data")).config.parallel, num_virtual_stages_per_pipeline_rank=1
    )
    any_number = small("--mock-data", "--pp", "5", "--decoder-first-pipeline-num-layers", "1")
    assert read_config(any_number).config.parallel.schedule == "1f1b"
