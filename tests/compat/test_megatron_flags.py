"""Tests of Megatron-LM's flags: each is known, real launch scripts run as they are, and what is said of them is true.

tests/golden/launch_flags.json has the names and values of flags of sixteen launch scripts, and of the test configs of
GPT training of Megatron-LM (`settings`, to which `configs` refer by number). tests/golden/megatron_flags.txt has the
names of all flags of Megatron-LM of August 2026, and of older ones.
"""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from paths import GOLDEN, ROOT

from megatronish.compat.megatron_flags.differences import DIFFERENCES, TRIED, Tried
from megatronish.compat.megatron_flags.families import FAMILIES
from megatronish.compat.megatron_flags.table import KNOWN, known_flag
from megatronish.config.check import refuse_unrunnable_plans
from megatronish.config.fields import ALIASES, FIELDS
from megatronish.config.flags import describe, flags_markdown, statuses
from megatronish.config.read import ConfigError, ReadConfig, read_config
from megatronish.config.settings import flags_of
from megatronish.config.suggest import nearest_name
from megatronish.estimate.costs.layout_costs import LayoutCosts
from megatronish.report.first_lines import first_lines

NAMES = [flag.removeprefix("--") for flag in (GOLDEN / "megatron_flags.txt").read_text().split()]
LAUNCHED = json.loads((GOLDEN / "launch_flags.json").read_text())
SCRIPTS = {name: shlex.split(words) for name, words in LAUNCHED["scripts"].items()}
TEST_CONFIGS = {
    name: [word for number in numbers for word in shlex.split(LAUNCHED["settings"][number])]
    for name, numbers in LAUNCHED["configs"].items()
}

# Flags of data and tokenizers, in whose place --mock-data stands.
OF_DATA = {
    *("data-path", "tokenizer-type", "tokenizer-model", "vocab-file", "merge-file", "tokenizer-name-or-path"),
    *("train-weighted-split-paths-path", "valid-weighted-split-paths-path", "patch-tokenizer-type"),
}
SMALL = "--num-layers 12 --hidden-size 96 --num-attention-heads 12 --seq-length 64 --micro-batch-size 2 --lr 1e-3"
BASE = [*SMALL.split(), "--train-iters", "10", "--mock-data"]


def problems(words: Sequence[str]) -> list[str]:
    try:
        read_config(words)
    except ConfigError as error:
        return error.problems
    return []


def read(words: str) -> ReadConfig:
    return read_config([*BASE, *shlex.split(words)])


def with_mock_data(words: Sequence[str]) -> list[str]:
    """The flags with --mock-data in the place of data and tokenizer."""
    kept = [word for flag, values in flags_of(words) if flag[2:] not in OF_DATA for word in (flag, *values)]
    return kept if "--mock-data" in kept else [*kept, "--mock-data"]


def counts(*lines: Sequence[str]) -> tuple[int, ...]:
    """Numbers of flags used, and of those that work, are idle, done otherwise, refused, unknown."""
    found: Counter[str | None] = Counter()
    for words in lines:
        found.update(statuses([(flag.lstrip("-").replace("_", "-"), values) for flag, values in flags_of(words)]))
    return (found.total(), *(found[status] for status in ("works", "idle", "done otherwise", "refused", None)))


# Every flag


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_is_known(name: str) -> None:
    field = ALIASES.get(name, name.replace("-", "_"))
    assert statuses([(name, ())]) != [None]
    assert (field in FIELDS) + (name in KNOWN) < 2, "a field needs no other row"
    assert describe(f"--{name}").startswith(f"--{name} ")


def test_rows_of_the_table_name_fields_and_say_why() -> None:
    for name, known in KNOWN.items():
        assert name.replace("-", "_") not in FIELDS, name
        assert len(known.text) > 10 or known.status == "means", name
        for pairs in (known.settings, *known.by_value.values()):
            assert {field for field, _ in pairs} <= set(FIELDS), name
        assert known.status != "means" or known.settings or known.by_value or known.harmless, name


def test_a_flag_alone_is_accepted_or_refused_with_its_reason() -> None:
    """All flags of one status together, as a launch script has them: idle ones share a line, refused ones by reason."""
    told = {"idle": [], "instead": [], "refused": []}  # type: dict[str, list[tuple[str, Known]]]
    for name in NAMES:
        known = known_flag(name) if name.replace("-", "_") not in FIELDS and name not in ALIASES else None
        if known is not None and known.status != "means" and not known.family:
            told[known.status].append((name, known))
    words = {
        status: [word for name, known in flags for word in (f"--{name}", *["7"] * (known.num_values or 0))]
        for status, flags in told.items()
    }
    notes = read_config([*BASE, *words["idle"], *words["instead"]]).notes
    assert sum("settings are idle" in note for note in notes) == 1
    assert all(any(f"--{name}" in note for note in notes) for name, _ in told["idle"])
    assert all(any("NOT AS ASKED" in note and known.text in note for note in notes) for _, known in told["instead"])
    found = problems([*BASE, *words["refused"]])
    assert len(found) == len({known.text for _, known in told["refused"]})
    for name, known in told["refused"]:
        assert any(f"--{name}" in problem and problem.endswith(f"refused: {known.text}") for problem in found), name


def test_a_value_that_asks_for_what_is_done_anyway_is_harmless() -> None:
    for name, known in KNOWN.items():
        for value in known.harmless:
            assert statuses([(name, (value,))]) == ["idle"], name
    assert "it asks for what is done anyway" in read("--ckpt-format torch_dist").notes[0]
    assert "is idle: checkpoints are in the format of" in read("--ckpt-format fsdp_dtensor").notes[0]
    assert "is refused: make the data again" in problems([*BASE, "--data-impl", "lazy"])[0]


def test_a_switch_and_its_negation_are_both_known() -> None:
    for name, known in KNOWN.items():
        opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
        if known.num_values == 0 and opposite.replace("-", "_") not in FIELDS:
            assert known_flag(opposite) is not None, opposite
    assert read("--no-add-bias-linear").config.model.disable_bias_linear
    assert not read("--disable-bias-linear --add-bias-linear").config.model.disable_bias_linear
    assert read("--masked-softmax-fusion --no-manual-gc --no-fp32-residual-connection").config


def test_a_family_is_one_complaint_and_its_settings_say_nothing_without_its_switch() -> None:
    (told,) = problems([*BASE, "--mhc-num-residual-streams", "2", "--enable-hyper-connections"])
    assert told.startswith("--mhc-num-residual-streams 2, --enable-hyper-connections are refused: hyper-connections")
    notes = read("--mhc-num-residual-streams 2 --mhc-init-gating-factor 1").notes
    assert notes[0] == (
        "--mhc-num-residual-streams 2, --mhc-init-gating-factor 1 are idle: it belongs to hyper-connections, and "
        "--enable-mhc-connections is not given"
    )


def test_layers_of_multi_token_prediction_are_as_asked_and_of_their_own() -> None:
    asked = "--position-embedding-type rope --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
    model = read(asked).config.model
    assert (model.num_depths, model.mtp_loss_scaling_factor) == (2, 0.3)
    (told,) = problems([*BASE, *asked.split(), "--mtp-detach-heads", "--mtp-use-repeated-layer"])
    assert told.startswith("--mtp-detach-heads, --mtp-use-repeated-layer are refused: each depth of --mtp-num-layers")
    assert (
        "mtp_loss_scaling_factor=0.3: idle, as --mtp-num-layers is not given"
        in read("--mtp-loss-scaling-factor 0.3").notes
    )


def test_flags_of_latent_attention_mean_fields_here() -> None:
    flags = "--multi-latent-attention --q-lora-rank 12 --qk-layernorm --disable-bias-linear --kv-lora-rank 16"
    rope = "--position-embedding-type rope --rope-type yarn --mscale 0.7 --mscale-all-dim 1.0 --beta-fast 16"
    model = read(f"{flags} {rope} --rotary-scaling-factor 40 --mla-down-proj-fusion").config.model
    assert (model.q_lora_rank, model.kv_lora_rank, model.rope_mscale, model.rope_mscale_all_dim) == (12, 16, 0.7, 1.0)
    stretched = (model.rope_scaling, model.rope_scaling_factor, model.rope_original_max_positions, model.rope_beta_fast)
    assert stretched == ("yarn", 40.0, 4096, 16.0)
    given = read(f"{flags} {rope} --rotary-scaling-factor 40 --original-max-position-embeddings 8192").config.model
    assert (given.rope_original_max_positions, given.rope_scaling_factor) == (8192, 40.0)
    for plain in ("--rope-type rope --rotary-scaling-factor 40", "--rotary-scaling-factor 40 --rope-type rope"):
        assert read(f"{flags} --position-embedding-type rope {plain}").config.model.rope_scaling_type == "none"
    usual = read(f"{flags} --position-embedding-type rope --rotary-scaling-factor 1.0").config.model
    assert usual.rope_scaling == "none"
    notes = read("--q-lora-rank 12 --v-head-dim 16").notes
    assert "q_lora_rank=12, v_head_dim=16: idle, as --multi-latent-attention is not given" in notes


def test_the_first_deepseek_of_pai_says_latent_attention_by_its_sizes() -> None:
    flags = "--kv-lora-rank 16 --qk-nope-head-dim 16 --qk-rope-head-dim 8 --v-head-dim 16 --enable-shared-expert"
    common = "--position-embedding-type rope --qk-layernorm --disable-bias-linear"
    model = read(f"{flags} {common}").config.model
    assert (model.multi_latent_attention, model.qk_head_dim, model.qk_pos_emb_head_dim) == (True, 16, 8)
    (told,) = problems([*BASE, *f"{common} {flags} --num-shared-experts 2".split()])
    assert told.endswith("use --moe-shared-expert-intermediate-size, so many times --moe-ffn-hidden-size")


def test_settings_of_experts_are_idle_in_a_dense_model() -> None:
    flags = "--moe-router-topk 4 --expert-model-parallel-size 8 --moe-grouped-gemm"
    notes = read(flags).notes
    assert "moe_router_topk=4, expert_model_parallel_size=8: idle, as --num-experts is not given" in notes
    for sizes in ("--etp 4", "--tp 2 --etp 8 --ep 16", "--etp 3 --zero-stage 3 --dp 2 --dp-replicate 2"):
        found = read(f"{sizes} --moe-ffn-hidden-size 7 --moe-shared-expert-intermediate-size 8")
        assert tuple(found.config.parallel.expert_layout) == (1, found.config.layout.tp), sizes
        costs = LayoutCosts.of(found.config, vocab_size=64, device="cpu", kernels=True)
        assert "parameters: " in first_lines(found.config, costs, device="cpu")
    other = (
        "--num-experts 8 --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-bias-update-rate 0.5"
    )
    of_router = [note for note in read(other).notes if note.startswith("moe_router")]
    assert of_router == [
        "moe_router_pre_softmax: idle, as the scores of experts are sigmoids",
        "moe_router_bias_update_rate=0.5: idle, as --moe-router-enable-expert-bias is not given",
    ]
    with_experts = read("--num-experts 8 --moe-router-load-balancing-type aux_loss")
    assert with_experts.config.model.moe_router_load_balancing_type == "seq_aux_loss"
    assert any("aux_loss is computed as seq_aux_loss: NOT AS ASKED" in note for note in with_experts.notes)


def test_a_misspelled_flag_of_a_family_is_no_flag_of_it() -> None:
    assert problems([*BASE, "--mtp-num-layers", "0"]) == []
    assert problems([*BASE, "--fp8-frmat", "hybrid"]) == ["--fp8-frmat is not a flag; did you mean --fp8-format?"]
    assert problems([*BASE, "--moe-blah", "3"]) == ["--moe-blah is not a flag; see --help"]
    for name in ("fp8-new", "rl-new", "inference-new", "retro-new", "vision-new", "dsa-new", "mtp-new", "mamba-new"):
        assert known_flag(name) is None, name
    assert len({family.title for family in FAMILIES}) == len(FAMILIES)


def test_fp8_is_computed_more_exactly_and_the_run_says_so() -> None:
    notes = read("--bf16 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-param-gather").notes
    assert notes[0].startswith(
        "NOT AS ASKED: --fp8-format hybrid, --fp8-amax-history-len 1024, --fp8-param-gather: low"
    )
    assert "idle" in read("--bf16 --fp8-amax-history-len 1024").notes[0]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *[("numlayers", "num-layers"), ("num-layer", "num-layers"), ("hiden-size", "hidden-size"), ("lrr", "lr")],
        *[("manual-gcc", "manual-gc"), ("micro-batchsize", "micro-batch-size"), ("trainiters", "train-iters")],
        *[("num-expert", "num-experts"), ("fp8-formats", "fp8-format"), ("log-progres", "log-progress")],
        *[("deepspd-mode", None), ("num-towers", None), ("checkpoint-shape", None), ("steps-of-accumulation", None)],
        *[("use-fast-optimizer", None), ("progress-of-log", None), ("gradient-steps", None), ("seed-speed", None)],
    ],
)
def test_a_suggestion_is_close_and_of_the_same_words(name: str, meant: str | None) -> None:
    assert nearest_name(name) == meant


# Values


def test_quotes_that_a_script_leaves_are_taken_off() -> None:
    assert read("""--split "'99,1,0'" """).config.data.split == "99,1,0"
    assert read("""--split='"99,1,0"'""").config.data.split == "99,1,0"
    one_word = read_config([*BASE, "--split '99,1,0'", "--lr  3e-4", "--sample-prompt=--a b"]).config
    assert (one_word.data.split, one_word.optimizer.lr) == ("99,1,0", 3e-4)
    assert one_word.log.sample_prompt == "--a b"
    assert problems([*BASE, "--split '99"])[0].startswith('split="\'99" must be up to three parts')
    assert read("""--sample-prompt "'quoted'" """).config.log.sample_prompt == "'quoted'"


@pytest.mark.parametrize(
    ("window", "size"), [("127,0", 128), ("(127,0)", 128), ("127 0", 128), ("128", 128), ("-1,0", None), ("0,0", 1)]
)
def test_a_window_is_one_number_or_megatrons_pair(window: str, size: int | None) -> None:
    assert read(f"--window-size {window}").config.model.window_size == size


def test_a_window_into_the_future_is_refused() -> None:
    assert problems([*BASE, "--window-size", "127,4"]) == [
        "--window-size 127,4 lets a token see 4 tokens after itself, and a GPT sees none; use --window-size 127,0"
    ]
    assert problems([*BASE, "--window-size", "127,-1"]) == [
        "--window-size 127,-1 lets a token see all tokens after itself, and a GPT sees none; use --window-size 127,0"
    ]


def test_a_flag_that_switches_pipelines_off_is_one_stage_and_a_later_number_counts_with_a_note() -> None:
    assert read("--no-pipeline-parallel").config.layout.pp == 1
    config, notes = read("--no-pipeline-parallel --pp 2")
    assert config.layout.pp == 2
    assert notes[0] == (
        "--no-pipeline-parallel, --pp 2 set the same field, pipeline_model_parallel_size; the last, --pp 2, counts"
    )
    assert read("--pp 2 --no-pipeline-parallel").config.layout.pp == 1


def test_extra_rows_of_the_vocabulary_are_said_to_be_padding() -> None:
    assert (
        read("--extra-vocab-size 421")
        .notes[0]
        .startswith(
            "NOT AS ASKED: --extra-vocab-size 421: the vocabulary is the tokenizer's with all its added tokens; rows "
        )
    )
    assert not any("NOT AS ASKED" in note for note in read("--extra-vocab-size 0").notes)


def test_values_of_megatron_that_mean_others_here() -> None:
    config, notes = read("--cp 2 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --eval-iters -1")
    assert (config.parallel.cp_comm_type, config.training.eval_iters) == ("p2p", 0)
    assert notes[0] == ("--cp-comm-type a2a+p2p is computed as p2p: the numbers are the same, the messages are not")
    yarn = read("--position-embedding-type yarn --yarn-beta-fast 16 --yarn-rotary-scaling-factor 4").config.model
    assert (yarn.position_embedding_type, yarn.rope_scaling_type, yarn.rope_beta_fast) == ("rope", "yarn", 16)
    assert yarn.rope_scaling_factor == 4
    linear = read("--position-embedding-type rope --rotary-seq-len-interpolation-factor 2").config.model
    assert (linear.rope_scaling_type, linear.rope_scaling_factor) == ("linear", 2)
    assert read("--rotary-seq-len-interpolation-factor 1").config.model.rope_scaling_type == "none"
    assert read("--no-position-embedding").config.model.position_embedding_type == "none"
    assert read("--position-embedding-type rope --no-position-embedding").config.model.position_embedding_type == "rope"
    assert read("--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp").config.parallel.zero == 3
    assert read("--use-torch-fsdp2").config.parallel.zero == 3
    assert problems([*BASE, "--data-parallel-sharding-strategy", "all"])[0].startswith(
        "--data-parallel-sharding-strategy all is refused: use --zero-stage"
    )
    old = read("--activations-checkpoint-method uniform --checkpoint-num-layers 3").config.recompute
    assert (old.recompute_granularity, old.recompute_method, old.recompute_num_layers) == ("full", "uniform", 3)
    deepspeed = read("--num-key-value-heads 4 --normalization rmsnorm --use-flash-attn-v2").config.model
    assert (deepspeed.num_kv_heads, deepspeed.normalization) == (4, "RMSNorm")
    split = read("--pp 2 --pp-partition-method type:transformer|embedding".replace("|", "\\|")).config.parallel
    assert split.ends_in_split == (1, 1)


def test_a_list_of_batch_sizes_is_several_words_or_one_text() -> None:
    for spelled in ("0:4 1K:8 2K:16", """ "'0:4 1K:8 2K:16'" """, "0:4,1K:8,2K:16"):
        config = read(f"--step-batch-size-schedule {spelled}").config
        assert config.global_batch_size == 16
        refuse_unrunnable_plans(config)
    (told,) = problems([*BASE, *["--step-batch-size-schedule", "0:3", "1K:8"]])
    assert told == (
        "step_batch_size_schedule=0:3 1K:8: 3 must be divisible by micro_batch_size=2 x data_parallel_size=1; "
        "use multiples of 2"
    )
    (told,) = problems([*BASE, *["--step-batch-size-schedule", "0:4", "1K:8", "--global-batch-size", "4"]])
    assert told.endswith("ends with 8, and global_batch_size=4; leave --global-batch-size out, or use the same")
    (told,) = problems([*BASE, *["--step-batch-size-schedule", "640:8"]])
    assert told == "step_batch_size_schedule='640:8' must begin with 0:BATCH_SIZE; for example 0:384 200B:768 400B:1152"
    (told,) = problems([*BASE, *["--eval-global-batch-size", "5"]])
    assert told.startswith("eval_global_batch_size=5 must be divisible by micro_batch_size=2 x data_parallel_size=1")


def test_hybrid_sharding_on_a_plain_start_has_as_many_copies_as_groups() -> None:
    words = "--num-distributed-optimizer-instances 2 --use-distributed-optimizer"
    assert read(words).config.layout.dp == 2
    assert read(f"{words} --cp 2").config.layout.dp == 1
    assert read(f"{words} --dp 4").config.layout.dp == 4


def test_a_vocabulary_and_merges_imply_their_tokenizer(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    files = ["--vocab-file", f"{tmp_path}/vocab.json", "--merge-file", f"{tmp_path}/merges.txt"]
    prefix = data_at(tmp_path)
    config = read_config([*BASE[:-1], "--data-path", prefix, *files]).config
    assert config.data.tokenizer_type == "huggingface"
    null = read_config([*BASE[:-1], "--data-path", prefix, *files, "--tokenizer-type", "null", "--vocab-size", "9"])
    assert null.config.data.tokenizer_type == "null"
    (tmp_path / "tokenizer.json").write_text("{}")
    pai = ["--patch-tokenizer-type", "Qwen2Tokenizer", "--load", str(tmp_path)]
    assert read_config([*BASE[:-1], "--data-path", prefix, *pai]).config.data.tokenizer_model == str(tmp_path)


# Lists of data


def data_at(folder: Path, name: str = "text") -> str:
    """Prefix of two files that exist."""
    for end in (".bin", ".idx"):
        (folder / f"{name}{end}").touch()
    return str(folder / name)


def test_files_that_list_data_are_read(tmp_path: Path) -> None:
    a, b = data_at(tmp_path, "a"), data_at(tmp_path, "b")
    (tmp_path / "words").write_text(f"0.3 {a}\n0.7 {b}\n")
    (tmp_path / "splits").write_text(json.dumps({"train": ["1", a], "valid": [b], "test": None}))
    (tmp_path / "train").write_text(f'"train: 0.25 0:0.949 {a}, 0.75 0:1 {b}"\n')
    (tmp_path / "valid").write_text(f"valid_a: 1 0:1 {a}, valid_b: 1 0:1 {b}\n")
    null = [*BASE[:-1], "--tokenizer-type", "null", "--vocab-size", "9"]
    assert read_config([*null, "--data-args-path", f"{tmp_path}/words"]).config.data.data_path == ("0.3", a, "0.7", b)
    data = read_config([*null, "--per-split-data-args-path", f"{tmp_path}/splits"]).config.data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (("1", a), (b,), ())
    words = ["--train-weighted-split-paths-path", f"{tmp_path}/train"]
    data = read_config([*null, *words, "--valid-weighted-split-paths-path", f"{tmp_path}/valid"]).config.data
    assert (data.train_data_path, data.valid_data_path) == (("0.25", f"{a}[0:0.949]", "0.75", b), (a, b))
    assert data.multiple_validation_sets


@pytest.mark.parametrize(
    ("flag", "text", "sentence"),
    [
        ("data-args-path", None, "cannot be read (No such file or directory); correct the path"),
        ("per-split-data-args-path", "[", "is not JSON"),
        ("per-split-data-args-path", '{"eval": []}', "must hold lists named train, valid and test"),
        (
            "train-weighted-split-paths-path",
            "train: 1 0.9:0.1 a",
            "'a[0.9:0.1]' must have a part between 0 and 1, as in",
        ),
        ("train-weighted-split-paths-path", "train: a", "'a' must be WEIGHT START:END PREFIX"),
        ("valid-weighted-split-paths-path", "x: 1 0:1 a, 1 0:1 b, y: 1 0:1 c", "use one name, or a data set a name"),
    ],
)
def test_a_bad_list_of_data_is_told(tmp_path: Path, flag: str, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "list").write_text(text)
    assert any(sentence in problem for problem in problems([*BASE[:-1], f"--{flag}", f"{tmp_path}/list"]))


# Launch scripts


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launch_script_runs_as_it_is(name: str) -> None:
    words = with_mock_data(SCRIPTS[name])
    assert problems([*words, "--dry-run"]) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launch_script_runs_with_its_files_at_hand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that the script names exist; tokenizers of a hub are folders."""
    words = SCRIPTS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    prefix = data_at(tmp_path / "data", "my_text_document")
    (tmp_path / "train.txt").write_text(f'"train: 1 0:0.949 {prefix}"')
    (tmp_path / "valid.txt").write_text(f'"valid: 1 0.949:0.999 {prefix}"')
    for flag, value in pairwise(words):
        if flag in ("--tokenizer-model", "--tokenizer-name-or-path", "--vocab-file", "--merge-file"):
            Path(value).parent.mkdir(exist_ok=True)
            Path(value).touch()
    if "--patch-tokenizer-type" in words:
        Path("ckpt_pre").mkdir()
        Path("ckpt_pre/tokenizer.json").touch()
    mock = "--mock-data" in words
    kept = [word for flag, values in flags_of(words) if not (mock and flag[2:] in OF_DATA) for word in (flag, *values)]
    assert problems([*kept, "--dry-run"]) == []


@pytest.mark.long
def test_configs_of_megatrons_tests_are_clean() -> None:
    """All but those of parts that are not there; variables of the shell stand for files and numbers."""
    unclean = {}
    for name, words in TEST_CONFIGS.items():
        found = problems(with_mock_data([word.replace("${REPEAT}", "1") for word in words]))
        if found:
            unclean[name] = found
    reasons = (
        "fim_data cuts documents of .bin/.idx pairs, and mock_data reads none",
        "linear and sparse attention",
        "multi_latent_attention turns a part of each head",  # and their config has learned positions in addition
        "distillation",
        "num_layers is not given",  # of an inference test, whose model is in its checkpoint
    )
    for name, found in unclean.items():
        assert any(reason in problem for problem in found for reason in reasons), (name, found)
    assert len(TEST_CONFIGS) - len(unclean) >= 112


def test_the_table_of_tried_scripts_is_current() -> None:
    scripts = [Tried(name, counts(words)) for name, words in SCRIPTS.items()]
    configs = Tried(f"{len(TEST_CONFIGS)} test configs of Megatron-LM", counts(*TEST_CONFIGS.values()), is_script=False)
    rows = "".join(f"    {each},\n" for each in (*scripts, configs))
    assert (*scripts, configs) == TRIED, f"these are the rows of compat/megatron_flags/differences.py now:\n{rows}"
    assert all(each.counts[-1] == 0 for each in TRIED), "no flag is unknown"


def test_the_page_of_flags_is_current() -> None:
    assert (ROOT / "docs" / "FLAGS.md").read_text() == flags_markdown()
    assert set(DIFFERENCES) <= set(FIELDS)


MEGATRONS = {
    # What becomes of the flags of Megatron-LM: "" works, a text is in a note or in a refusal.
    **dict.fromkeys(
        (
            "--expert-model-parallel-size 2",
            "--expert-tensor-parallel-size 1",
            "--moe-layer-freq 2",
            "--moe-layer-freq ([0]*1+[1]*3)",
            "--moe-ffn-hidden-size 8",
            "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate",
            "--moe-router-topk 3",
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3",
            "--moe-router-pre-softmax",
            "--moe-router-topk-scaling-factor 2.5",
            "--moe-router-num-groups 4 --moe-router-group-topk 2",
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2",
            "--moe-router-load-balancing-type global_aux_loss",
            "--moe-router-load-balancing-type none",
            "--moe-z-loss-coeff 1e-3",
            "--moe-input-jitter-eps 0.1",
            "--moe-expert-capacity-factor 1.0",
            "--moe-router-force-load-balancing",
        ),
        "",
    ),
    **dict.fromkeys(
        (
            *("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion"),
            *("--moe-deepep-num-sms 20", "--moe-permute-fusion-into-hybridep"),
            *("--overlap-moe-expert-parallel-comm", "--moe-paged-stash"),
        ),
        "idle: it changes the speed of experts alone",
    ),
    "--moe-token-dispatcher-type alltoall": "",
    "--moe-token-dispatcher-type allgather": "is computed as alltoall: the numbers are the same, the messages are not",
    "--moe-token-dispatcher-type flex": "moe_token_dispatcher_type: idle, as expert_model_parallel_size is 1",
    "--moe-enable-deepep": "moe_token_dispatcher_type: idle, as expert_model_parallel_size is 1",
    "--moe-flex-dispatcher-backend deepep": "idle: --moe-token-dispatcher-type flex is DeepEP's Buffer",
    "--moe-shared-expert-overlap": "idle: shared experts are always computed while rows go to the other experts",
    "--moe-per-layer-logging": "idle: the tokens of each expert",
    "--delay-wgrad-compute": "zb-h1 or zb-v computes weight gradients later",
    "--moe-router-dtype fp32": "idle: it asks for what is done anyway",
    "--moe-router-dtype fp64": "NOT AS ASKED: --moe-router-dtype fp64: the router computes in fp32",
    "--moe-router-load-balancing-type aux_loss": "is computed as seq_aux_loss: NOT AS ASKED",
    "--moe-token-drop-policy position": "idle: it asks for what is done anyway",
    "--moe-token-drop-policy probs": "refused: a layout that cuts sequences cannot compare scores of other ranks",
    "--moe-router-score-function sqrtsoftplus": "refused: these scores are not there yet; use sigmoid or softmax",
    "--moe-router-load-balancing-type sinkhorn": "refused: it balances the tokens of one rank",
    "--moe-router-load-balancing-type quantile_balancing": "refused: its quantiles are those of one rank",
    "--moe-router-load-balancing-type seq_aux_loss global_aux_loss": "refused: one loss balances the load at a time",
    "--moe-aux-loss-coeff 0.1 0.2": "refused: one loss balances the load at a time",
    "--moe-router-quantile-balancing-ema 0.1": "refused: use --moe-router-load-balancing-type seq_aux_loss",
    "--moe-router-topk-limited-devices 2": "refused: use --moe-router-num-groups with --moe-router-group-topk",
    "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-score-function sigmoid": "",
    "--moe-layer-recompute": "",
    "--moe-use-upcycling": "starts from a dense model, and none is given",
    "--moe-upcycling-granularity 2": "refused: each expert is a copy of the whole MLP",
    "--moe-router-force-biased 0.5": "refused: biased random routing is not there",
    "--moe-latent-size 12": "refused: experts compute on whole tokens",
    "--moe-expert-rank-capacity-factor 1.0": "idle, as expert_model_parallel_size is 1",
    "--moe-pad-expert-input-to-capacity": "sends as many rows as a capacity leaves, and none is given",
    "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0": "idle, as expert_model_parallel_size is 1",
}


@pytest.mark.long
@pytest.mark.parametrize("flags", MEGATRONS)
def test_every_flag_of_megatrons_experts_works_or_says_why_not(flags: str) -> None:
    words, told = [*BASE, *["--num-experts", "8", "--num-layers", "4"], *flags.split()], MEGATRONS[flags]
    try:
        answers = [note for note in read_config(words).notes if "moe" in note or "wgrad" in note]
        assert "refused" not in told
    except ConfigError as error:
        answers = error.problems
        assert told.startswith("refused") or "none is given" in told
    assert len(answers) == bool(told) and all(told in answer for answer in answers), answers


@pytest.mark.parametrize(
    ("flags", "granularity", "parts"),
    [
        ("--recompute-granularity selective --recompute-modules mlp core_attn", "selective", "mlp core_attn"),
        ("--recompute-modules moe --recompute-activations --num-experts 8", "selective", "moe"),
        ("--recompute-granularity full --recompute-modules moe", "full", ""),
        ("--recompute-granularity selective", "selective", "core_attn"),
        ("--moe-layer-recompute --num-experts 8", "selective", "core_attn moe"),
        ("--moe-layer-recompute --recompute-modules moe_act --num-experts 8", "selective", "moe_act"),
    ],
)
def test_modules_to_recompute_are_those_of_megatron(flags: str, granularity: str, parts: str) -> None:
    config = read_config([*BASE, *flags.split()]).config
    assert config.recompute.recompute_granularity == granularity
    assert config.recompute.recomputed == set(parts.split())


def test_lengths_in_tokens_are_samples_of_the_sequence_length() -> None:
    words = [word for place, word in enumerate(BASE) if "--train-iters" not in (word, BASE[place - 1])]
    length = read_config(BASE).config.training.seq_length
    tokens = f"--train-tokens {1000 * length + 3} --lr-decay-tokens {900 * length} --lr-warmup-tokens {10 * length}"
    config, notes = read_config([*words, *tokens.split()])
    assert (config.training.train_samples, config.training.train_tokens) == (1000, None)
    assert (config.optimizer.lr_decay_samples, config.optimizer.lr_warmup_samples) == (900, 10)
    assert any("train_samples=1000, lr_decay_samples=900, lr_warmup_samples=10" in note for note in notes)
    again = read_config([*words, *tokens.split(), "--train-samples", "500"]).config
    assert (again.training.train_samples, again.optimizer.lr_decay_samples) == (500, 900)
    with pytest.raises(ConfigError, match="a run is counted in steps, or in samples and tokens"):
        read_config([*BASE, "--train-iters", "3", "--train-tokens", "1000"])


def test_a_sliding_window_is_that_of_hugging_face() -> None:
    words = [*BASE, "--position-embedding-type", "rope"]
    config, notes = read_config([*words, "--sliding-window", "4"])
    assert config.model.window_size == 4
    (note,) = [note for note in notes if "window" in note]
    assert "some models of Pai-Megatron-Patch let it see one more: add 1" in note
    assert not [note for note in read_config([*words, "--window-size", "4"]).notes if "window" in note]
