"""Hostile configs and records: of other frameworks, TOML, lists of data, JSON of models and of runs."""

import json
import os
import random
import tomllib
from pathlib import Path

from foreign_configs import AXOLOTL
from forked import Command, Ended
from hostile_values import CANARY, DEEP, JSON_VALUES, path_in, with_odd_value
from inputs import DEEPSPEED, TOML, Good, Input, pretrain
from saved_runs import sealed


def _check_imported(ended: Ended) -> str:
    """What is wrong with the TOML that an importer wrote."""
    if ended.status != 0:
        return ""
    try:
        tables = tomllib.loads(ended.output)
    except tomllib.TOMLDecodeError as error:
        return f"NO TOML {error}"
    return "PLUGIN" if "plugins" in tables or "plugin" in tables else ""


INJECTIONS = (
    *('a\n[plugins]\nplugin = ["{0}"]\n#', 'a"\n[plugins]\nplugin = ["{0}"]\n', '"""\n[plugins]\nplugin=["{0}"]\n'),
    *("a\r[plugins]\rplugin=['{0}']\r#", "\x85[plugins]", "\u2028[plugins]", "]\n[plugins]\n", "\\", "\\u0000", "\0"),
    *("'''\nplugin = ['{0}']\n", "\x1b[2J", "\udc80", "#", "=", ".inf", "x" * 200_000, "\ud83d"),
)
YAML_BOMBS = {
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "itself": "base_model: &a [*a]\n",
    "itself as a key": "&a {*a : 1}\n",
    "itself merged": "base_model: &a\n  <<: *a\n",
    "merged": "a: &a {x: 1}\n" + "".join(f"{b}: &{b}\n  <<: [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),  # noqa: E501
    "object": "base_model: !!python/object/apply:os.system ['touch {0}']\n",
    "new object": "base_model: !!python/object/new:os.system ['touch {0}']\n",
    "name": "base_model: !!python/name:os.system\n",
    "module": "base_model: !!python/module:os\n",
    "binary": "base_model: !!binary ////\n",
    "set": "base_model: !!set {{a, b}}\n",
    "omap": "base_model: !!omap [a: 1]\n",
    "tag": "base_model: !evil x\n",
    "deep": "base_model: " + "[" * 30_000 + "\n",
    "deep blocks": "".join(f"{' ' * depth}a:\n" for depth in range(300)),
    "deep lists": "- " * 20_000 + "a\n",
    "digits": "micro_batch_size: " + "9" * 5000 + "\n",
    "sexagesimal": "micro_batch_size: " + "59:" * 5000 + "59\n",
    "hexadecimal": "micro_batch_size: 0x" + "f" * 5000 + "\n",
    "date": "2026-13-45: 2026-99-99\n2026-01-01: 2026-01-01T99:99:99Z\n",
    "keys": "1: a\n1.5: b\nnull: c\ntrue: d\n? [a, b]\n: e\n? {{a: b}}\n: f\n",
    "documents": "---\na: 1\n---\nb: 2\n" * 2000,
    "many anchors": "".join(f"a{number}: &a{number} x\n" for number in range(20_000)),
    "directive": "%YAML 9.9\n%TAG ! tag:x,2000:\n---\na: 1\n",
    "tabs": "a:\n\tb: 1\n",
    "quote": "base_model: \"" + "a" * 100_000 + "\n",
    "infinite": "learning_rate: .inf\nweight_decay: .nan\nval_set_size: -.inf\n",
}  # fmt: skip


def importer_files(_good: Good, folder: Path, numbers: random.Random) -> Input:
    """Configs of DeepSpeed, Axolotl and Accelerate that want to become another TOML, or too much of it."""
    kind = numbers.choice(("axolotl", "axolotl", "accelerate", "deepspeed"))
    plugin = folder / "evil.py"
    plugin.write_text(f"open({str(folder / CANARY)!r}, 'w')\n")
    word = numbers.choice(INJECTIONS).replace("{0}", str(plugin))
    path = folder / ("config.json" if kind == "deepspeed" else "config.yml")
    how = numbers.choice(("key", "value", "odd", "bomb", "bomb"))
    base = DEEPSPEED if kind == "deepspeed" else ACCELERATE if kind == "accelerate" else AXOLOTL_AS_JSON
    content = json.loads(base)
    what = how
    if how in ("key", "value"):
        keys = path_in(content, numbers)
        place = content
        for key in keys[:-1]:
            place = place[key]
        if how == "key" and isinstance(place, dict):
            place[word] = numbers.choice((1, word, [word], {word: word}))
        else:
            place[keys[-1]] = numbers.choice((word, [word], {word: 1}))
        text, what = json.dumps(content), f"{how} {word[:20]!r}"
    elif how == "odd" or kind == "deepspeed":
        text, what = with_odd_value(base, numbers)
    else:
        what, bomb = numbers.choice(list(YAML_BOMBS.items()))
        text = bomb.replace("{0}", str(folder / CANARY)).replace("{{", "{").replace("}}", "}")
        text += numbers.choice(("", AXOLOTL, "base_model: *i\n", "datasets: *i\n"))
    path.write_text(text, errors="surrogatepass")
    argv = (f"from-{kind}", str(path), *numbers.choice(((), (), ("--output", str(folder / "out.toml")))))
    return Input(f"{kind} {what}", Command(argv, folder), check=_check_imported if "--output" not in argv else None)


AXOLOTL_AS_JSON = json.dumps(
    {
        "base_model": "a/b",
        "datasets": [{"path": "a.jsonl", "type": "chat_template", "ds_type": "json", "field_messages": "m"}],
        "val_set_size": 0.1,
        "sequence_len": 128,
        "adapter": "lora",
        "lora_r": 8,
        "lora_target_modules": ["q_proj"],
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_epochs": 1,
        "optimizer": "adamw_torch",
        "learning_rate": 1e-4,
        "lr_scheduler": "cosine",
        "special_tokens": {"pad_token": "</s>"},
        "output_dir": "./out",
        "rl": "dpo",
        "deepspeed": "zero2.json",
        "fsdp_config": {"offload_params": True},
        "wandb_project": "x",
    }
)
ACCELERATE = json.dumps(
    {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_machines": 1,
        "num_processes": 4,
        "machine_rank": 0,
        "main_process_ip": "127.0.0.1",
        "main_process_port": 29500,
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 2, "deepspeed_config_file": "a.json"},
        "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False, "fsdp_version": 2},
        "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1},
    }
)


def toml_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """TOML configs and rows of devices that are too deep, too long or odd."""
    bombs = {
        "deep lists": f"a = {'[' * DEEP}",
        "deep closed lists": f"a = {'[' * 400}{']' * 400}",
        "deep tables": f"a = {'{a=' * 20_000}",
        "dotted key": "a" + ".a" * 50_000 + " = 1",
        "dotted table": "[a" + ".a" * 50_000 + "]",
        "many dotted": "\n".join("a." * 200 + f"b{number} = 1" for number in range(1000)),
        "digits": f"num_layers = {'9' * 5000}",
        "hexadecimal": f"num_layers = 0x{'f' * 5000}",
        "exponent": "lr = 1e99999",
        "long key": f"{'k' * 1_000_000} = 1",
        "long text": f'tokenizer_model = "{"x" * 1_000_000}"',
        "NUL": 'tokenizer_model = "a\\u0000b"',
        "escape": 'tokenizer_model = "\\u001b[2J"',
        "date": "num_layers = 2026-01-01",
        "time": "lr = 07:32:00",
        "infinite": "lr = inf\nmin_lr = nan",
        "lists": "data_path = [[[1]]]",
        "objects": "data_path = [{a = 1}]",
        "many keys": "\n".join(f"k{number} = 1" for number in range(20_000)),
        "bytes": "\udcff\udcfe = 1",
        "control": "a = '\x01'",
        "no text": "\0" * 1000,
        "megabytes": "# " + "x" * (40 << 20),
    }
    what, text = numbers.choice(list(bombs.items()))
    kind = numbers.choice(("config", "config", "plan", "device", "run", "generate"))
    section = numbers.choice(("", "[model]\n", "[data]\n", "[h100]\n"))
    path = folder / "odd.toml"
    written = f"{section}{text}\n" + (TOML if numbers.random() < 0.3 and kind != "device" else "")
    sound = ("plan", "--config", str(good.folder / "config.toml"), "--gpus", "2")
    if kind == "run" or kind == "generate":
        (run,) = good.copy("run", to=folder)
        path = run / "config.toml"
    path.write_text(written, errors="surrogateescape")
    argv = {
        "config": ("pretrain", "--config", str(path), "--dry-run", "--mock-data"),
        "plan": ("plan", "--config", str(path), "--gpus", "2"),
        "device": (*sound, "--device", str(path)),
        "run": pretrain(folder, "--train-iters 3"),
        "generate": (
            "generate",
            "--load",
            str(folder / "run"),
            "--prompt",
            "a",
            "--num-tokens",
            "1",
            "--device",
            "cpu",
        ),
    }[kind]
    return Input(f"{kind}: {what}", Command(argv, folder))


def lists_of_data(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Files and texts that list data sets."""
    flag = numbers.choice(
        ("data-args-path", "per-split-data-args-path", "train-weighted-split-paths", "valid-weighted-split-paths-path")
    )
    text = good.folder / "text"
    if flag == "per-split-data-args-path":
        content, _ = with_odd_value(
            json.dumps({"train": ["1", str(text)], "valid": [str(text)], "test": None}), numbers
        )
    else:
        odd = (
            *("", "\0", "1", "1e999 " + str(text), "nan " + str(text), "-1 " + str(text), "1 " * 50_000, "," * 100_000),
            *("train: " * 20_000, "train: 1 0:9e99 a", "train: 1 a:b c", ": : : :", "x" * 1_000_000, "train: 1 1:0 /"),
            *('"' * 50_000, "train: 0.5 0:1 /dev/zero", "a b c d e", "\x1b[2J", "[0:1]", f"1 {text}[0:0.5]", "\udcff"),
            *(f"{text}[0:{'9' * 5000}]", f"{text}[nan:inf]", f"{'9' * 5000} {text}", "1 /dev/zero", " " * 3_000_000),
        )
        content = numbers.choice(odd)
    value = content
    if flag.endswith("path"):
        value = str(folder / "list")
        (folder / "list").write_text(content, errors="surrogateescape")
    value = value[:100_000].replace("\0", "")
    flags = f"--tokenizer-type null --{flag}"
    argv = (*pretrain(folder, data=flags), "--dry-run")
    at = argv.index(f"--{flag}") + 1
    argv = (*argv[:at], value, *argv[at:], *numbers.choice(((), (), ("--split", "9" * 5000))))
    return Input(f"{flag}: {content[:40]!r}", Command(argv, folder))


def json_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Odd values in the JSON files of models, adapters, tokenizers, runs and the planner."""
    model, adapter, run = good.copy("model", "adapter", "run", to=folder)
    save = ("--save", str(folder / "out"))
    step = run / "checkpoints" / "step_00000002"
    hf = ("--load-hf", str(model), "--global-batch-size", "4", "--lr", "1e-3", "--train-iters", "1", "--device", "cpu")
    starts = (*hf, "--mock-data", "--micro-batch-size", "1", "--run-dir", str(folder / "new"))
    of_model = (
        ("convert", "--from", "hf", "--to", "megatronish", "--load", str(model), *save),
        ("pretrain", *starts, "--seq-length", "16", "--dry-run"),
        ("plan", "--config", str(good.folder / "config.toml"), "--load-hf", str(model), "--gpus", "2"),
        ("generate", "--load", str(model), "--prompt", "a", "--num-tokens", "1", "--device", "cpu"),
    )
    of_tokenizer = (
        (
            "audit",
            "--data-path",
            str(good.folder / "chats.jsonl"),
            "--tokenizer-model",
            str(model),
            "--seq-length",
            "64",
        ),
        of_model[3],
    )
    of_adapter = (
        ("convert", "--from", "hf", "--to", "hf", "--load", str(model), *save, "--adapter", str(adapter)),
        (*of_model[3], "--adapter", str(adapter)),
    )
    resumed = pretrain(folder, "--train-iters 3")
    of_run = (
        resumed,
        ("generate", "--load", str(run), "--prompt", "a", "--num-tokens", "1", "--device", "cpu"),
        ("convert", "--from", "megatronish", "--to", "hf", "--load", str(run), *save),
    )
    recorded, measured = folder / "recorded.json", folder / "measured.jsonl"
    recorded.write_text(json.dumps({"schedule": "1f1b", "stages": [[["F", 0, 0, 0.0, 1.0], ["B", 0, 0, 1.0, 2.0]]]}))
    measured.write_text(json.dumps(MEASURED))
    files: list[tuple[Path, tuple[tuple[str, ...], ...]]] = [
        *((model / "config.json", of_model),) * 4,
        *((model / "tokenizer_config.json", of_tokenizer),) * 2,
        (model / "tokenizer.json", of_tokenizer),
        *((adapter / "adapter_config.json", of_adapter),) * 3,
        *((path, (resumed,)) for path in sorted(run.glob("*.json"))),
        (step / "state.json", of_run),
        (step / "checksums.json", of_run),
        *((recorded, (("draw", "--recorded", str(recorded)),)),) * 2,
        *((measured, (("plan", "--config", str(good.folder / "config.toml"), "--calibrate", str(measured)),)),) * 2,
    ]
    path, commands = numbers.choice(files)
    text, what = with_odd_value(path.read_text(), numbers)
    if path.name == "state.json" and numbers.random() < 0.7:
        sealed(step, lambda _: path.write_text(text))
    else:
        path.write_text(text)
    return Input(f"{path.name}: {what}", Command(numbers.choice(commands), folder))


MEASURED = {
    "collective": "all_reduce",
    "ranks": 4,
    "nodes": 1,
    "axis": "tp",
    "device": "cpu",
    "fit": {"accepted": True, "bandwidth_bytes_per_s": 1e10, "alpha_s": 1e-5, "ranks": 4, "nodes": 1},
}


def records_of_runs(good: Good, folder: Path, numbers: random.Random) -> Input:
    """metrics.jsonl, health.json and the other files of a run folder, odd, endless or of another kind."""
    (run,) = good.copy("run", to=folder)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and "checkpoints" not in str(path)]
    path = numbers.choice([*files, run / "metrics.jsonl", run / "health.json", run / "config.toml"])
    how = numbers.choice(("fifo", "zero", "circle", "folder", "deep", "digits", "odd", "long", "many", "bytes"))
    path.unlink(missing_ok=True)
    if how == "fifo":
        os.mkfifo(path)
    elif how in ("zero", "circle"):
        path.symlink_to("/dev/zero" if how == "zero" else path.name)
    elif how == "folder":
        path.mkdir()
    else:
        row = '{"step": 2, "loss": ODD, "grad_norm": ODD, "lr": ODD, "time": ODD}'
        path.write_bytes(
            {
                "deep": b"[" * DEEP,
                "digits": b'{"step": ' + b"9" * 5000 + b"}\n",
                "odd": (row.replace("ODD", numbers.choice(JSON_VALUES)) + "\n").encode(errors="surrogatepass"),
                "long": b'{"step": 1, "a": "' + b"x" * (64 << 20) + b'"}\n',
                "many": b'{"step": 2}\n' * 300_000,
                "bytes": b"\xff\0\n" * 1000,
            }[how]
        )
    return Input(f"{path.name} {how}", Command(pretrain(folder, "--train-iters 3"), folder))
