"""Malformed inputs by kind: each makes a folder with a sound example, changes one thing, and names a command."""

import base64
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from changes import BYTES, LETTERS, ODD_WORDS, any_change, forbid
from chat_formats import chatml
from chat_models import write_adapter, write_chat_model
from chat_tokenizers import said, write_lines
from foreign_configs import AXOLOTL
from forked import Command, Ended
from jobs import tiny, train_on_ranks, write_tokens
from paths import ROOT
from saved_runs import sealed
from test_place import ALL
from test_torchrun_and_srun import SLURM

from megatronish.config.fields import FIELDS
from megatronish.formats.convert import convert


@dataclass(frozen=True)
class Input:
    """A malformed input: what it is, and the command that reads it. `must_fail`: it is damaged beyond doubt.

    `is_silent`: it may be a rank other than the first, which leaves the sentence to that one. `check`: what is wrong
    with how the command ended, beyond what is wrong for all.
    """

    what: str
    command: Command
    must_fail: bool = False
    is_silent: bool = False
    check: Callable[[Ended], str] | None = None


@dataclass(frozen=True)
class Good:
    """Folder of sound examples of everything."""

    folder: Path

    def copy(self, *names: str, to: Path) -> list[Path]:
        """Copies of examples in another folder."""
        for name in names:
            source = self.folder / name
            if source.is_dir():
                shutil.copytree(source, to / name)
            else:
                shutil.copy(source, to / name)
        return [to / name for name in names]


TEXT = "--tokenizer-type null --split 1,0,0 --data-path"
CHATS = "--dataset-type chat --split 1 --tokenizer-type huggingface --seq-length 128 --train-iters 1"
TOML = """[model]
num_layers = 2
hidden_size = 24
num_attention_heads = 4
position_embedding_type = "rope"
[training]
seq_length = 16
micro_batch_size = 1
global_batch_size = 4
train_iters = 1
[optimizer]
lr = 1e-2
lr_decay_style = "cosine"
[data]
mock_data = true
vocab_size = 101
[parallel]
device = "cpu"
"""
DEEPSPEED = """{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
 "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
 "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 100}},
 "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 0},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
 "activation_checkpointing": {"cpu_checkpointing": true}}
"""


def make_good(folder: Path) -> Good:
    """Sound examples, made once."""
    folder.mkdir()
    write_tokens(folder / "text")
    train_on_ranks(tiny(folder / "run", "--train-iters 2 --save-interval 1 --eval-iters 1 --eval-interval 1"))
    convert(folder / "run", folder / "megatron-dist", source="megatronish", target="megatron-dist")
    write_chat_model(folder / "model")
    write_adapter(folder / "adapter", seed=1)
    lines = [said("question", "answer"), said("q", "a" * 50), said("x", "y", system="s"), said("a", "b", "c", "d")]
    write_lines(folder / "chats.jsonl", [lines[i % 4] for i in range(24)])
    (folder / "lines.jsonl").write_text("".join(f'{{"text": "line {i} of a text, é", "id": {i}}}\n' for i in range(40)))
    (folder / "array.json").write_text("[" + ",\n".join(f'{{"text": "element {i}"}}' for i in range(20)) + "]")
    tokens = [bytes([byte]) for byte in range(256)]
    (folder / "words.tiktoken").write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    )
    (folder / "config.toml").write_text(TOML)
    (folder / "axolotl.yml").write_text(AXOLOTL)
    (folder / "ds_config.json").write_text(DEEPSPEED)
    (folder / "template.jinja").write_text(chatml())
    _make_sentencepiece(folder)
    return Good(folder)


def _make_sentencepiece(folder: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        input=str(ROOT / "CONTRIBUTING.md"), model_prefix=str(folder / "pieces"), vocab_size=300, minloglevel=2
    )


def pretrain(folder: Path, flags: str = "", *, data: str = "--mock-data") -> tuple[str, ...]:
    """A tiny run."""
    given = flags if "--train-iters" in flags else f"--train-iters 1 {flags}"
    return ("pretrain", *of_tokenizer(tiny(folder / "run", given, data=data)))


def of_tokenizer(argv: list[str]) -> list[str]:
    """The command line without --vocab-size where a tokenizer knows it."""
    at = argv.index("--vocab-size")
    return argv[:at] + argv[at + 2 :] if "--tokenizer-model" in argv else argv


def _changed(
    path: Path, argv: Sequence[str], numbers: random.Random, *, is_text: bool = False, sure: Sequence[str] = ()
) -> Input:
    """An input whose file is changed; `sure`: the changes after which it cannot be accepted."""
    change = any_change(path, numbers, is_text=is_text)
    name = change.__name__
    folder = path
    while not folder.name.isdecimal():
        folder = folder.parent
    command = Command(tuple(argv), folder, without_rights=change is forbid)
    return Input(f"{path.name}: {name}", command, must_fail=name in sure)


UNREADABLE = ("be_folder", "be_pipe", "be_link", "forbid", "remove")


def data_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """The .bin and the .idx."""
    text = folder / "text"
    good.copy("text.bin", "text.idx", to=folder)
    commands = [
        pretrain(folder, data=f"{TEXT} {text}"),
        pretrain(folder, "--num-workers 0", data=f"{TEXT} {text}"),
        ("merge", "--input", str(text), "--output-prefix", str(folder / "merged")),
        ("evaluate", "--load", str(good.folder / "run"), "--data-path", str(text), "--device", "cpu"),
    ]
    argv = numbers.choice(commands)
    sure = (*UNREADABLE, "cut_", "lengthen") if argv[0] != "evaluate" else UNREADABLE
    return _changed(Path(f"{text}{numbers.choice(('.bin', '.idx', '.idx'))}"), argv, numbers, sure=sure)


def caches(good: Good, folder: Path, numbers: random.Random) -> Input:
    """The cache of sample indices."""
    good.copy("text.bin", "text.idx", to=folder)
    argv = pretrain(folder, data=f"{TEXT} {folder / 'text'}")
    train_once = good.folder / "text-cache"
    if not train_once.is_dir():
        train_on_ranks([*argv[1:], "--data-cache-path", str(train_once), "--run-dir", str(good.folder / "cache-run")])
    cache = Path(shutil.copytree(train_once, folder / "cache"))
    return _changed(numbers.choice(sorted(cache.iterdir())), argv, numbers)


def masks(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Masked tokens of chats in their cache: .bin, .idx, .mask, .json."""
    flags = f"{CHATS} --tokenizer-model {good.folder / 'model'}"
    once = good.folder / "chat-cache"
    if not once.is_dir():
        data = f"--data-path {good.folder / 'chats.jsonl'} --data-cache-path {once}"
        train_on_ranks(of_tokenizer(tiny(good.folder / "chat-run", flags, data=data)))
    cache = Path(shutil.copytree(once, folder / "cache"))
    data = f"--data-path {good.folder / 'chats.jsonl'} --data-cache-path {cache}"
    files = sorted(path for path in cache.iterdir() if path.is_file())
    return _changed(numbers.choice(files), pretrain(folder, flags, data=data), numbers, is_text=False)


def tokenizers(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Tokenizer files of every kind."""
    good.copy("text.bin", "text.idx", "model", "pieces.model", "words.tiktoken", "lines.jsonl", to=folder)
    kind, path = numbers.choice(
        [
            ("sentencepiece", folder / "pieces.model"),
            ("tiktoken", folder / "words.tiktoken"),
            ("huggingface", folder / "model" / "tokenizer.json"),
            ("huggingface", folder / "model" / "tokenizer_config.json"),
        ]
    )
    model = path.parent if kind == "huggingface" else path
    flags = f"--tokenizer-type {kind} --tokenizer-model {model}"
    commands = [
        pretrain(folder, data=f"{flags} --split 1,0,0 --data-path {folder / 'text'}"),
        ("preprocess", "--input", str(folder / "lines.jsonl"), "--output-prefix", str(folder / "out"), *flags.split()),
    ]
    return _changed(path, numbers.choice(commands), numbers, is_text=kind != "sentencepiece")


def configs(good: Good, folder: Path, numbers: random.Random) -> Input:
    """A config in TOML."""
    (path,) = good.copy("config.toml", to=folder)
    argv = ("pretrain", "--config", str(path), "--run-dir", str(folder / "run"), *numbers.choice(((), ("--dry-run",))))
    return _changed(path, argv, numbers, is_text=True, sure=UNREADABLE)


def importers(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Configs of others, in YAML and JSON."""
    name, kind = numbers.choice((("axolotl.yml", "axolotl"), ("ds_config.json", "deepspeed")))
    (path,) = good.copy(name, to=folder)
    return _changed(path, (f"from-{kind}", str(path)), numbers, is_text=True, sure=UNREADABLE)


def flags(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Odd values of every flag of a run."""
    field = numbers.choice(list(FIELDS.values()))
    values = [numbers.choice(ODD_WORDS) for _ in range(numbers.choice((0, 1, 1, 1, 2)))]
    dry = ("--dry-run",) if numbers.random() < 0.6 or field.name in ENDLESS else ()
    argv = (*pretrain(folder), field.flag, *values, *dry)
    return Input(f"{field.flag} {values}"[:200], Command(argv, folder))


ENDLESS = (
    *("hidden_size", "num_layers", "seq_length", "ffn_hidden_size", "train_iters", "global_batch_size", "vocab_size"),
    *("micro_batch_size", "train_samples", "num_attention_heads", "kv_channels", "num_experts", "num_query_groups"),
)


def other_flags(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Odd values of the flags of other commands."""
    run, model, lines, text = (str(good.folder / name) for name in ("run", "model", "lines.jsonl", "text"))
    evaluate = f"evaluate --load {model} --data-path {lines} --device cpu"
    preprocess = f"preprocess --input {lines} --output-prefix out --tokenizer-type bytes"
    commands = {
        f"generate --load {model} --prompt a --num-tokens 2 --device cpu": (
            "--temperature --top-k --top-p --seed --num-tokens --batch-size --adapter --tp --prompt --prompts-file "
            "--output --tokenizer-model --seq-length --load --ckpt-step"
        ),
        evaluate: "--stride --seq-length --json-key --output --data-path --tp --dp",
        f"convert --from megatronish --to hf --load {run} --save out": "--load --save --dtype --from --to --ckpt-step",
        f"convert --from hf --to megatron --load {model} --save out": "--vocab-size --target-tensor-parallel-size",
        preprocess: "--input --output-prefix --json-keys --workers --tokenizer-type",
        f"audit --data-path {lines} --tokenizer-model {model}": (
            "--seq-length --seed --html --chat-template --data-path --chat-format --chat-date"
        ),
        f"merge --input {text} --output-prefix out": "--input --output-prefix",
        "draw": "--schedule --stages --microbatches --chunks --forward --transfer --recorded --png",
        "plan demo": "--device --gpus --gpus-per-node --network --layouts --write --calibrate",
        f"train-tokenizer --input {lines} --output out": "--vocab-size --json-key --max-bytes --output",
    }
    command = numbers.choice(list(commands))
    flag, value = numbers.choice(commands[command].split()), numbers.choice(ODD_WORDS)
    return Input(f"{command.split()[0]} {flag} {value!r}"[:200], Command((*command.split(), flag, value), folder))


def checkpoints(good: Good, folder: Path, numbers: random.Random) -> Input:
    """A file of a checkpoint."""
    (run,) = good.copy("run", to=folder)
    step = run / "checkpoints" / "step_00000002"
    path = numbers.choice([*(path for path in sorted(step.iterdir()) if path.is_file())])
    commands = [
        pretrain(folder, "--train-iters 3"),
        pretrain(folder, "--train-iters 3 --max-restarts 1"),
        ("generate", "--load", str(run), "--prompt", "a", "--num-tokens", "2", "--device", "cpu"),
        ("convert", "--from", "megatronish", "--to", "hf", "--load", str(run), "--save", str(folder / "out")),
        ("evaluate", "--load", str(run), "--data-path", str(good.folder / "text"), "--device", "cpu"),
    ]
    argv = numbers.choice(commands)
    sure = (*UNREADABLE, "lengthen", "replace_all")
    # Other commands do not read the optimizer's states, where the bit may be.
    sure = (*sure, "flip_bits", "flip_in_head") if argv[0] == "pretrain" else sure
    return _changed(path, argv, numbers, is_text=path.suffix == ".json", sure=sure)


def forged(good: Good, folder: Path, numbers: random.Random) -> Input:
    """A changed state of a checkpoint whose sums fit again: what only its readers can find."""
    (run,) = good.copy("run", to=folder)
    step = run / "checkpoints" / "step_00000002"
    path, change = step / numbers.choice(("state.json", "state.json", ".metadata")), numbers.choice(LETTERS)
    if path.name == ".metadata":
        change = numbers.choice(BYTES)
    sealed(step, lambda _: change(path, numbers))
    argv = numbers.choice(
        [
            pretrain(folder, "--train-iters 3"),
            ("generate", "--load", str(run), "--prompt", "a", "--num-tokens", "2", "--device", "cpu"),
            ("convert", "--from", "megatronish", "--to", "hf", "--load", str(run), "--save", str(folder / "out")),
        ]
    )
    return Input(f"{path.name}: {change.__name__}, with its sums", Command(argv, folder))


def run_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Any other file of a run folder when the run resumes."""
    (run,) = good.copy("run", to=folder)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and "step_" not in str(path)]
    return _changed(numbers.choice(files), pretrain(folder, "--train-iters 3"), numbers, is_text=True)


def models(good: Good, folder: Path, numbers: random.Random) -> Input:
    """A file of a Hugging Face folder."""
    (model,) = good.copy("model", to=folder)
    path = numbers.choice([model / "config.json", *sorted(path for path in model.iterdir() if path.is_file())])
    flags = (
        f"--load-hf {model} --seq-length 16 --global-batch-size 4 --lr 1e-3 --train-iters 1 --device cpu --mock-data"
    )
    save = ("--save", str(folder / "out"))
    commands = [
        ("convert", "--from", "hf", "--to", "megatronish", "--load", str(model), *save),
        ("pretrain", *flags.split(), "--micro-batch-size", "1", "--run-dir", str(folder / "run")),
        ("generate", "--load", str(model), "--prompt", "a", "--num-tokens", "2", "--device", "cpu"),
    ]
    return _changed(path, numbers.choice(commands), numbers, is_text=path.suffix != ".safetensors")


def adapters(good: Good, folder: Path, numbers: random.Random) -> Input:
    """A file of an adapter's folder."""
    (adapter,) = good.copy("adapter", to=folder)
    model = str(good.folder / "model")
    path = numbers.choice(sorted(adapter.iterdir()))
    save = ("--save", str(folder / "out"), "--adapter", str(adapter))
    commands = [
        ("convert", "--from", "hf", "--to", "hf", "--load", model, *save),
        ("convert", "--from", "hf", "--to", "megatronish", "--load", model, *save),
        (
            "generate",
            "--load",
            model,
            "--adapter",
            str(adapter),
            "--prompt",
            "a",
            "--num-tokens",
            "2",
            "--device",
            "cpu",
        ),
    ]
    argv = numbers.choice(commands)
    return _changed(path, argv, numbers, is_text=path.suffix == ".json", sure=UNREADABLE)


def chats(good: Good, folder: Path, numbers: random.Random) -> Input:
    """JSON lines of chats and of texts, and chat templates."""
    names = ("chats.jsonl", "lines.jsonl", "array.json", "template.jinja")
    chats, lines, array, template = good.copy(*names, to=folder)
    model = str(good.folder / "model")
    audit = ("audit", "--data-path", str(chats), "--tokenizer-model", model, "--seq-length", "128")
    preprocess = ("--output-prefix", str(folder / "out"), "--tokenizer-type", "bytes")
    data = f"--data-path {chats} --tokenizer-model {model}"
    path, argv = numbers.choice(
        [
            (chats, audit),
            (chats, pretrain(folder, CHATS, data=data)),
            (lines, ("preprocess", "--input", str(lines), *preprocess)),
            (array, ("preprocess", "--input", str(array), *preprocess)),
            (template, (*audit, "--chat-template", str(template))),
            (lines, ("evaluate", "--load", model, "--data-path", str(lines), "--device", "cpu")),
            (
                lines,
                ("generate", "--load", model, "--prompts-file", str(lines), "--num-tokens", "1", "--device", "cpu"),
            ),
        ]
    )
    if numbers.random() < 0.5:
        change = numbers.choice(LETTERS)
        change(path, numbers)
        return Input(f"{path.name}: {change.__name__}", Command(argv, folder))
    return _changed(path, argv, numbers, is_text=True, sure=UNREADABLE)


TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29533",
}
OTHERS = (
    *("GLOO_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_ERROR_FILE", "PET_NPROC_PER_NODE", "PET_NNODES", "NNODES", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS"),
    *("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES", "TMPDIR"),
    *("HOME", "COLUMNS", "LINES", "TERM", "NO_COLOR", "PYTORCH_CUDA_ALLOC_CONF", "MASTER_ADDR", "MASTER_PORT", "RANK"),
    *("WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "SKYPILOT_NUM_NODES", "TZ", "LANG", "XDG_CACHE_HOME", "MPLCONFIGDIR"),
)
LISTS = (
    "n[1-999999999]",
    "n[1-",
    "n]1[",
    "n[1-2",
    "n[5-1]",
    "[1-3]",
    "n[1-2][3-4]",
    "n[99999999999999999999]",
    ",",
    "n[a-b]",
)
TASKS = ("2(x99999999999)", "2(x2),1", "x", "2(x)", "0", "2(x0)", "-1")


def environments(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Variables of launchers, of torch and of the system."""
    launcher = numbers.choice([{}, TORCHRUN, TORCHRUN, SLURM, *ALL.values()])
    ones = {"3": "0", "4": "1", "2": "1", "1": "0"}
    sizes = numbers.random() < 0.5  # else it waits for its peers, and must say that they did not come
    environ = {name: ones.get(value, value) if sizes else value for name, value in launcher.items()}
    port = str(29000 + int(folder.name) % 900)  # no two inputs of one time meet there
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if numbers.random() < 0.5 else {}
    for _ in range(numbers.choice((1, 1, 2))):
        name = numbers.choice([*environ, *environ, *OTHERS])
        words = LISTS if "NODELIST" in name else TASKS if "TASKS_PER_NODE" in name else ODD_WORDS
        environ[name] = numbers.choice([*words, *words, *ODD_WORDS])
    if environ and numbers.random() < 0.2:
        del environ[numbers.choice(list(environ))]
    limits = "--distributed-timeout-minutes 0.05 --hang-seconds-start 4"
    argv = pretrain(folder, f"{limits} {numbers.choice(('', '', '--dp 2', '--tp 2'))}")
    return Input(f"{environ}", Command(argv, folder, tuple(environ.items())), is_silent=bool(launcher))


def places(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Folders to write to that are something else."""
    flag = numbers.choice(
        ("--run-dir", "--save", "--load", "--tensorboard-dir", "--data-cache-path", "--load-hf", "--kill-switch-path")
    )
    place = folder / "place"
    kind = numbers.choice(
        ("file", "pipe", "device", "link", "forbidden", "below a file", "word", "long", "circle", "full")
    )
    value = {
        "below a file": str(place / "below"),
        "word": numbers.choice(ODD_WORDS),
        "long": "x" * numbers.choice((250, 255, 300, 5000)),
        "full": "/dev/full",
        "device": numbers.choice(("/dev/zero", "/proc/1/fd", "/proc/self", "/sys")),
    }.get(kind, str(place))
    if kind in ("file", "below a file"):
        place.write_text("")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind in ("link", "circle"):
        place.symlink_to("/nowhere/at/all" if kind == "link" else place)
    elif kind == "forbidden":
        place.mkdir(mode=0)
    data = f"{TEXT} {good.folder / 'text'}" if flag == "--data-cache-path" else "--mock-data"
    argv = (*pretrain(folder, "--save-interval 1", data=data), flag, value)
    return Input(f"{flag} {kind} {value!r}"[:200], Command(argv, folder, without_rights=kind == "forbidden"))


def command_lines(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Words in any order."""
    words = [
        *ODD_WORDS,
        "pretrain",
        "help",
        "generate",
        "--config",
        "--num-layers",
        "2",
        "--help",
        "-h",
        "--version",
        "--",
    ]
    argv = tuple(numbers.choice(words) for _ in range(numbers.randint(0, 5)))
    return Input(f"{argv}"[:200], Command(("pretrain", *argv) if numbers.random() < 0.5 else argv, folder))


KINDS: dict[str, Callable[[Good, Path, random.Random], Input]] = {
    each.__name__: each
    for each in (
        *(data_files, caches, masks, tokenizers, configs, importers, flags, other_flags),
        *(checkpoints, forged, run_files, models, adapters, chats, environments, places, command_lines),
    )
}
