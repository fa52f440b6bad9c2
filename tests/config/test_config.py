"""Tests of config reading: values arrive as given, and one error lists everything that is wrong."""

import dataclasses
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_lines import DEMO, problems, read, small, toml
from machine_speed import seconds_of_a_million_entries
from paths import ROOT

from megatronish.config.config import Config
from megatronish.config.dump import resolved, to_toml
from megatronish.config.fields import ALIASES, FIELDS, SECTIONS
from megatronish.config.read import ConfigError, read_config
from megatronish.config.suggest import SYNONYMS
from megatronish.formats.start import read_start
from megatronish.optim.optimizer import OPTIMIZERS
from megatronish.parallel.schedules.table import SCHEDULES

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))

# reading


@pytest.mark.long
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
    config = config.with_fields(global_batch_size=8)
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
        assert read("--attention-backend", theirs).training.attention_backend == ours
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
    unit, before = seconds_of_a_million_entries(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program + "read_config(['--help-all'])"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # of work, whoever else is busy
    unit = (unit + seconds_of_a_million_entries()) / 2
    assert done.returncode == 0, done.stderr
    assert "--config FILE.toml" in done.stdout
    words = " ".join(done.stdout.split())
    for section in SECTIONS:
        assert f"[{section}]" in words and f"─ {section} options" in words
    for part in ("model options", "--sequence-parallel, --no-sequence-parallel", "--tp"):
        assert part in done.stdout
    assert seconds < 8 * unit  # 3.5 to 5.4 on two busy cores


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


@pytest.mark.parametrize(("frequency", "is_idle"), [("1", True), ("2", False)])
def test_mlps_to_compute_again_are_noted_where_each_layer_has_experts(frequency: str, is_idle: bool) -> None:
    again = ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    _, notes = read_config(small("--mock-data", *again, "--num-experts", "4", "--moe-layer-freq", frequency))
    told = "recompute_modules=mlp: idle, as every layer has experts; moe computes those again"
    assert (told in notes) == is_idle


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
        "micro_batch_size is not given; set it in [training] of the config file, or add --micro-batch-size",
        "the length of the run is not given; add --train-iters, --train-samples or --num-epochs",
        "no data is given",
    ):
        assert sentence in told
    for name in ("num_attention_heads", "num_layers", "lr"):  # given, and wrong or misspelled
        assert f"{name} is not given" not in told


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


def test_a_config_that_is_no_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(2**24 + 1)
    for path, what in {
        "/dev/zero": "is no file but a device or a pipe; name a TOML file",
        str(tmp_path / "pipe.toml"): "is no file but a device or a pipe; name a TOML file",
        str(tmp_path): "is a folder; name a TOML file",
        str(tmp_path / "large.toml"): "has 16777217 bytes, and 16777216 is the limit; name a TOML file",
    }.items():
        with pytest.raises(ConfigError) as refused:
            read_config(["--config", path])
        assert refused.value.problems == [f"--config {path} {what}"]


# A misspelled name is told alone


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read_config(argv, read_start=read_start)
    return error.value.problems


WHOLE = (
    *("--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "8", "--lr", "1"),
    *("--micro-batch-size", "1", "--train-iters", "1", "--mock-data"),
)


@pytest.mark.parametrize("flag", [word for word in WHOLE if word.startswith("--") and word != "--lr"])
def test_a_misspelled_flag_is_the_only_complaint(flag: str) -> None:
    argv = [f"{word[:-2]}{word[-1]}" if word == flag else word for word in WHOLE]
    assert problems_of(*argv) == [f"{flag[:-2]}{flag[-1]} is not a flag; did you mean {flag}?"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("num_layers = 2", "[model] num_layer is not a key; did you mean num_layers?"),
        ("[model]", "[modle] is not a section; did you mean [model]?"),
    ],
)
def test_a_misspelled_key_or_section_is_the_only_complaint(tmp_path: Path, text: str, told: str) -> None:
    whole = "[model]\nnum_layers = 2\nhidden_size = 8\nnum_attention_heads = 2\n"
    path = tmp_path / "mine.toml"
    path.write_text(whole.replace(text, {"[model]": "[modle]"}.get(text, "num_layer = 2")))
    assert problems_of("--config", str(path), *WHOLE[6:]) == [told]


def test_a_misspelled_config_is_the_only_complaint(tmp_path: Path) -> None:
    assert problems_of("--confg", "demo", "--mock-data") == ["--confg is not a flag; did you mean --config?"]


def test_what_does_not_follow_from_a_misspelled_flag_is_told_too() -> None:
    problems = problems_of(*WHOLE, "--num-query-gruops", "1", "--tp", "3")
    assert problems[0] == "--num-query-gruops is not a flag; did you mean --num-query-groups?"
    assert any("tensor_model_parallel_size" in problem for problem in problems[1:])


@pytest.mark.long
@pytest.mark.parametrize(("name", "ours"), list(SYNONYMS.items()), ids=str)
def test_names_of_other_programs_lead_to_ours(name: str, ours: str) -> None:
    if ours.replace("-", "_") in FIELDS:
        assert f"--{name} is not a flag; did you mean --{ours}?" in problems_of(
            *WHOLE, f"--{name}", "a/b" if ours == "load-hf" else "1"
        )
